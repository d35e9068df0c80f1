"""The demo job: train with FSDP2, push the weights into a real vLLM server, and ask it what it has learned.

Started by torchrun, one rank a GPU (or on the CPU); `conf/train.yaml` has the command line and the settings.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import hydra
import requests
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from fsdp_ipc import DTensorSource, WeightSender
from fsdp_ipc.clients import HTTPWeightSyncClient, WeightSyncClient
from fsdp_ipc.sender import Backend
from recipes.config import (
    CONF_DIR,
    DataConfig,
    JobConfig,
    TrainConfig,
    load,
    quiet_other_ranks,
    register_configs,
    run_dir,
)
from recipes.models import build_model, write_model_dir
from recipes.ranks import joined, on_rank0, own_device
from recipes.report import Push, Report
from recipes.serve import Server

# Ranks wait for the server in a collective, so that time comes on top.
GROUP_TIMEOUT_S = 600.0


class Trainer:
    """The training loop's state: model, optimizer, data; the same calls on every rank.

    Args:
        model: The sharded model.
        tokens: The whole text as token ids, `[num_tokens]` int64 on the model's device; taken as a circle.
        config: The loop's settings.
        rank: This rank, which decides what it reads.
    """

    def __init__(self, model: nn.Module, tokens: torch.Tensor, config: TrainConfig, rank: int) -> None:
        self._model = model
        self._tokens = tokens
        self._config = config
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._params, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._lr_factor)
        self._random = torch.Generator().manual_seed(config.seed * 1000 + rank)

    def step(self) -> float:
        """Do one optimizer step. Collective. Returns this rank's loss."""
        batch = self._batch()
        logits = self._model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._params, self._config.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return loss.item()

    def _batch(self) -> torch.Tensor:
        """Windows of the text, `[batch_size, seq_len + 1]`, every second one from its beginning."""
        length = min(self._config.seq_len + 1, len(self._tokens))
        starts = torch.randint(len(self._tokens), (self._config.batch_size,), generator=self._random)
        if torch.rand((), generator=self._random) < 0.5:
            starts[0] = 0
        return torch.stack([self._tokens.roll(-int(start))[:length] for start in starts])

    def _lr_factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / self._config.warmup_steps) if self._config.warmup_steps else 1.0
        return warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self._config.steps))))


class Policy:
    """The server as rank 0 sees it: started or found, asked for text; the other ranks have none.

    Args:
        job: The settings.
        model_dir: Model that a started server serves.
        log_path: Log of a started server.
        num_replicas: Data-parallel size of a started server.
        on_gpu: Whether a started server runs on GPUs.
    """

    def __init__(
        self, job: JobConfig, model_dir: Path, log_path: Path, num_replicas: int, *, on_gpu: bool
    ) -> None:
        self._prompt, self._max_tokens = job.data.prompt, job.data.max_tokens
        self._server: Server | None = None
        self._num_replicas = 1
        if job.server.url is None:
            self._num_replicas = num_replicas
            self._server = Server(
                model_dir, num_replicas=num_replicas, config=job.server, log_path=log_path, on_gpu=on_gpu
            )
            self.url = self._server.url
        else:
            self.url = job.server.url
        self._client = HTTPWeightSyncClient(self.url)
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy cannot reach this machine's loopback

    def wait(self, progress: Callable[[float, str], None]) -> None:
        """Block until the server is healthy."""
        if self._server is not None:
            self._server.wait_healthy(progress)
        self._client.health()

    def ask(self) -> str:
        """Return the continuation of the prompt by the weights of now; if replicas disagree, those of all of them."""
        if self._server is not None:
            self._server.check_alive()
        self._client.reset_prefix_cache()  # an update leaves keys and values of the old weights behind
        with ThreadPoolExecutor(self._num_replicas) as pool:
            texts = list(pool.map(self._ask_replica, range(self._num_replicas)))
        if len(set(texts)) == 1:
            return texts[0]
        return "\n".join(f"[replica {replica}] {text}" for replica, text in enumerate(texts))

    def close(self) -> None:
        """Stop the server if it was started here."""
        if self._server is not None:
            self._server.close()

    @cached_property
    def _model(self) -> str:
        answer = self._session.get(f"{self.url}/v1/models", timeout=30)
        return str(answer.json()["data"][0]["id"])

    def _ask_replica(self, replica: int) -> str:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self._prompt,
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        headers = {"X-data-parallel-rank": str(replica)} if self._num_replicas > 1 else {}
        answer = self._session.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=300)
        if not answer.ok:
            raise RuntimeError(f"completion refused with status {answer.status_code}: {answer.text[:2000]}")
        return str(answer.json()["choices"][0]["text"])


def run(job: JobConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    1) (rank 0) write the model's directory, start the server in the background;
    2) (all ranks) build and shard the model, train up to the first push;
    3) (rank 0) wait until the server is healthy, ask it for a completion of its random weights;
    4) (all ranks) push, (rank 0) ask again, go on training; the last step pushes too.

    Args:
        job: The settings.
        device: This rank's device.
        out: Directory for the server's log and the model's files; rank 0 writes to it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    began = time.monotonic()
    text = read_text(job.data)
    with ExitStack() as stack:
        report = stack.enter_context(Report(steps=job.train.steps, active=rank == 0, prompt=job.data.prompt))
        report.expected = continuation(text, job.data.prompt)
        model_dir = on_rank0(lambda: model_dir_of(job, out))
        policies: list[Policy] = []  # rank 0 has one

        def start_server() -> str:
            log_path = out / "server.log"
            policy = Policy(job, model_dir, log_path, world_size, on_gpu=device.type == "cuda")
            stack.callback(policy.close)
            policies.append(policy)
            report.say(f"server at {policy.url}" + (f", log {log_path}" if job.server.url is None else ""))
            return policy.url

        def meet_server() -> float:
            policies[0].wait(report.waiting)
            report.ready(seconds := time.monotonic() - began)
            report.before = policies[0].ask() if job.complete else None
            return seconds

        def ask() -> str:
            return policies[0].ask()

        url = on_rank0(start_server)
        model = model_of(job, model_dir, mesh)
        trainer = trainer_of(job, model, model_dir, device)
        sender: WeightSender | None = None
        server_s, train_s = 0.0, 0.0
        for step in range(1, job.train.steps + 1):
            started = time.monotonic()
            loss = trainer.step()
            train_s += time.monotonic() - started
            report.step(step, loss)
            if step % job.train.push_every and step != job.train.steps:
                continue
            if sender is None:
                server_s = on_rank0(meet_server)
                sender = stack.enter_context(sender_of(job, model, HTTPWeightSyncClient(url)))
            stats = sender.send(version=step)
            answer = on_rank0(ask) if job.complete else None
            report.pushed(Push.of(stats, loss=loss, text=answer, expected=report.expected))
        report.finish(
            {
                "world_size": world_size,
                "device": device.type,
                "parameters": sum(p.numel() for p in model.parameters()),
                "server_ready_s": round(server_s, 2),
                "train_s": round(train_s, 2),
                "total_s": round(time.monotonic() - began, 2),
            }
        )


def read_text(data: DataConfig) -> str:
    """Read the text to learn: a file, or the Zen of Python out of the standard library."""
    if data.path is not None:
        return Path(data.path).read_text()
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints itself when it is imported
        import this
    return codecs.decode(this.s, "rot13")


def continuation(text: str, prompt: str) -> str:
    """What a model that knows the text by heart says after the prompt; empty if the prompt is not in it."""
    _, found, after = text.partition(prompt)
    return after if found else ""


def model_of(job: JobConfig, model_dir: Path, mesh: DeviceMesh) -> nn.Module:
    """All ranks, collective: the model of the settings, sharded over the mesh."""
    return build_model(
        model_dir,
        mesh,
        has_weights=job.model.path is not None,
        seed=job.train.seed,
        compute_dtype=getattr(torch, job.train.compute_dtype),
    )


def trainer_of(job: JobConfig, model: nn.Module, model_dir: Path, device: torch.device) -> Trainer:
    """This rank's training loop, on the job's text."""
    return Trainer(model, _tokens(read_text(job.data), model_dir).to(device), job.train, dist.get_rank())


def model_dir_of(job: JobConfig, out: Path) -> Path:
    """One rank: the checkpoint's folder, or a new one below `out` with the configuration of the sizes."""
    return Path(job.model.path) if job.model.path is not None else write_model_dir(job.model, out / "model")


def sender_of(job: JobConfig, model: nn.Module, client: WeightSyncClient) -> WeightSender:
    """All ranks, collective: the sender that the settings describe."""
    dtype = None if job.sync.wire_dtype is None else getattr(torch, job.sync.wire_dtype)
    return WeightSender(
        DTensorSource(model, dtype=dtype, keep=job.sync.keep),
        client,
        backend=cast("Backend", job.sync.backend),  # checked by `config.check`
        packed=job.sync.packed,
        bucket_bytes=None if job.sync.bucket_mb is None else int(job.sync.bucket_mb * 2**20),
        num_slots=job.sync.num_slots,
    )


def _tokens(text: str, model_dir: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor([*ids, *end])


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def _main(cfg: DictConfig) -> None:
    job = load(cfg)
    device = own_device()
    with joined(device, GROUP_TIMEOUT_S + job.server.start_timeout_s):
        run(job, device, run_dir())


def main() -> None:
    """Entry point of `python -m recipes.train`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
