"""The inference side of a job: servers that are started or found, and what is asked of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist

from fsdp_ipc.clients import HTTPWeightSyncClient
from recipes.checks import urls_of
from recipes.config import ServerConfig
from recipes.ranks import on_each_node, on_rank0
from recipes.report import Report
from recipes.serve import Server

_ASK_TIMEOUT_S = 600.0


def start_servers(
    config: ServerConfig, model_dir: Path, out: Path, stack: ExitStack, report: Report, device: torch.device
) -> Inference:
    """All ranks, collective: start a server on each node, or find those that run; does not wait for them.

    Args:
        config: The settings.
        model_dir: Model that a started server serves, on this node.
        out: Folder for the server's log.
        stack: Stops the servers.
        report: Is told where they are.
        device: This rank's device.

    Returns:
        The servers.

    Raises:
        ValueError: Several nodes, and servers that only their own node can reach.
    """
    found = urls_of(config)
    if found:
        return Inference(found)
    ranks_here = _ranks_here()
    if dist.get_world_size() > ranks_here and not config.allow_remote:
        raise ValueError(
            "the job has several nodes, so their servers must be reachable from rank 0: inference.host=0.0.0.0 "
            "inference.allow_remote=true, in a network that you trust"
        )
    num_replicas = config.replicas or max(1, ranks_here // config.tensor_parallel_size)
    started: list[Server] = []

    def start() -> str:
        # Further nodes of one folder in a shared file system get logs of their own.
        name = "server.log" if dist.get_rank() == 0 else f"server-rank{dist.get_rank()}.log"
        server = Server(
            model_dir,
            num_replicas=num_replicas,
            config=config,
            log_path=out / name,
            on_gpu=device.type == "cuda",
        )
        stack.callback(server.close)
        started.append(server)
        report.say(f"server at {server.url}, log {server.log_path}")
        return server.url

    return Inference(on_each_node(start), started[0] if started else None)


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class Inference:
    """The servers of a job; every rank has one and may ask, rank 0's alone controls them.

    Args:
        urls: Base URLs.
        server: The server that this rank has started.
    """

    def __init__(self, urls: Sequence[str], server: Server | None = None) -> None:
        self.urls = list(urls)
        self.client = HTTPWeightSyncClient(self.urls)
        self._server = server

    @property
    def url(self) -> str:
        """The first server's URL."""
        return self.urls[0]

    def wait(self, progress: Callable[[float, str], None]) -> None:
        """All ranks, collective: block until every server answers."""

        def wait_here() -> None:
            if self._server is not None:
                self._server.wait_healthy(progress)

        on_each_node(wait_here)
        on_rank0(self.client.health)

    @cached_property
    def num_replicas(self) -> int:
        """Data-parallel replicas of the first server."""
        parallel = HTTPWeightSyncClient(self.url).server_info().parallel_config or {}
        return int(parallel.get("data_parallel_size") or 1)

    @cached_property
    def model(self) -> str:
        """Name of the model that the servers serve."""
        return str(self.client.get("/v1/models")[0]["data"][0]["id"])

    @cached_property
    def can_sleep(self) -> bool:
        """Whether the servers can sleep. Rank 0."""
        return self.client.server_info().sleep_mode is True

    @cached_property
    def tells_version(self) -> bool:
        """Whether the servers' release publishes the version of its weights. Rank 0."""
        release = [int(part) for part in self.client.server_info().version.split(".")[:2] if part.isdigit()]
        return release >= [0, 28]

    def version(self) -> str | None:
        """The version of the weights that all servers hold, or None where their release does not tell. Rank 0."""
        return self.client.weight_version() if self.tells_version else None

    def complete(self, prompt: str, max_tokens: int) -> str:
        """The most likely continuation, from every replica of every server.

        Raises:
            RuntimeError: A server refused, or the replicas do not say the same.
        """
        places = [(url, replica) for url in self.urls for replica in range(self.num_replicas)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        with ThreadPoolExecutor(len(places)) as pool:
            answers = list(pool.map(lambda place: self.ask(place[0], place[1], body)[0]["text"], places))
        if len(set(answers)) != 1:
            told = "\n".join(f"  {place}: {text!r}" for place, text in zip(places, answers, strict=True))
            raise RuntimeError(f"the replicas say different things, so they hold different weights:\n{told}")
        return str(answers[0])

    def ask(self, url: str, replica: int | None, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of one completion request.

        Args:
            url: The server.
            replica: Its replica; None lets it choose.
            body: The request without the model's name.

        Raises:
            RuntimeError: The server refused.
        """
        pin = replica is not None and self.num_replicas > 1
        with requests.Session() as session:
            session.trust_env = False  # a proxy cannot reach this machine's loopback
            answer = session.post(
                f"{url}/v1/completions",
                json={"model": self.model, **body},
                headers={"X-data-parallel-rank": str(replica)} if pin else {},
                timeout=_ASK_TIMEOUT_S,
            )
        if not answer.ok:
            raise RuntimeError(f"completion refused with status {answer.status_code}: {answer.text[:2000]}")
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices
