"""The HTTP client: one or several vLLM servers driven as one, with every server's own words in the error."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import Future
from typing import Any

from fsdp_ipc.clients.base import ServerInfo, ServerRequestError
from fsdp_ipc.clients.transport import HTTPTransport, in_background
from fsdp_ipc.wire.stock import json_safe


class HTTPWeightSyncClient(HTTPTransport):
    """Drives vLLM servers over their HTTP routes; needs neither vLLM nor ray.

    Every call goes to all servers at once, waits for every answer, and raises if one of them failed. Calls from one
    thread follow each other, so each server sees them in order; the calls that end in `_soon` return when a request to a single
    server is written, so that another one can follow while it is out.
    Nothing is retried: a weight-transfer request is not idempotent. With several servers (one per data-parallel replica,
    external load balancing) a version is published only when all of them have closed the update.

    A server with internal load balancing reaches all of its engines by itself and is given as one URL.

    Args:
        urls: Base URL, or the base URLs of all servers that must hold the same weights.
        request_timeout_s: Seconds after which a request is given up, connecting included.
        connect_timeout_s: Seconds after which an unreachable server is given up.
        headers: Sent with every request, for example an authorisation; never part of an error text.

    Raises:
        ValueError: No URL, a URL twice, a URL that is not http(s), or a time-out that is not positive.
    """

    __module__ = "fsdp_ipc.clients"

    # What this client itself did to the servers last, because they tell it in part only: see `weights_asleep`.
    _can_sleep: bool | None = None
    _weights_woken = False
    _only_paused = False

    # The four verbs.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand the backend's handshake to every worker of every server.

        Args:
            init_info: The backend's handshake, JSON-safe.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Open a weight update on every server.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        # vLLM up to 0.24 parses a JSON body here, later releases look at none.
        self.post("/start_weight_update", {})

    def start_weight_update_soon(self) -> Future[None]:
        """As `start_weight_update`, but without waiting for the answer.

        Returns:
            What becomes of it: a `ServerRequestError`, or None.
        """
        if not self._is_own("start_weight_update"):
            return in_background(self.start_weight_update)
        return self.post_soon("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Deliver one payload; raw handles of the stock backend are pickled on the way, as its HTTP route wants.

        Args:
            update_info: Payload, or one payload for each worker.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        safe = (
            [json_safe(info) for info in update_info]
            if isinstance(update_info, list)
            else json_safe(update_info)
        )
        self.post("/update_weights", {"update_info": safe})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on every server, then publish the version.

        With one server the version travels with the request. With several, it is published in a second round, so
        that no server publishes it while another failed to close its update.

        Args:
            weight_version: Name of the weights; needs vLLM >= 0.27.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        if weight_version is None or len(self.urls) > 1:
            self.post("/finish_weight_update")
            if weight_version is not None:
                self.publish_version(weight_version)
        else:
            self.post("/finish_weight_update", {"weight_version": weight_version})

    def finish_weight_update_soon(self, weight_version: str | None = None) -> Future[None]:
        """As `finish_weight_update`, but without waiting for the answer.

        Args:
            weight_version: Name of the weights; needs vLLM >= 0.27.

        Returns:
            What becomes of it: a `ServerRequestError`, or None.
        """
        if len(self.urls) > 1 or not self._is_own("finish_weight_update"):
            return in_background(lambda: self.finish_weight_update(weight_version))
        body = None if weight_version is None else {"weight_version": weight_version}
        return self.post_soon("/finish_weight_update", body)

    def _is_own(self, verb: str) -> bool:
        """Whether a verb is this class's: what a subclass or a patch put in its place is called."""
        return getattr(getattr(self, verb), "__func__", None) is getattr(HTTPWeightSyncClient, verb)

    def publish_version(self, weight_version: str) -> None:
        """Name the weights that every server holds; needs vLLM >= 0.27.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        self.post("/update_weight_version", {"new_version": weight_version})

    # What else a training loop asks of a server.

    def server_info(self) -> ServerInfo:
        """Ask every server for its release, its weight-transfer backend and its number of workers.

        The routes for the last two exist in development mode only; the first such request makes vLLM collect
        facts about its machine and can take some seconds.

        Returns:
            The facts, the same release and backend on every server.

        Raises:
            ServerRequestError: A server did not answer as vLLM does.
            ValueError: The servers differ in release or backend.
        """
        infos = self.fan_out(self._one_server_info)
        first = infos[0]
        for url, info in zip(self.urls, infos, strict=True):
            theirs = (info.version, info.backend, info.dev_mode)
            if theirs != (first.version, first.backend, first.dev_mode):
                raise ValueError(
                    f"the servers must run the same release with the same backend, but {self.urls[0]} has vLLM "
                    f"{first.version}, backend {first.backend}, development mode {first.dev_mode}, and {url} has vLLM "
                    f"{info.version}, backend {info.backend}, development mode {info.dev_mode}"
                )
        modes = {info.sleep_mode for info in infos}
        self._can_sleep = None if None in modes else True in modes
        return ServerInfo(
            version=first.version,
            backend=first.backend,
            backend_known=all(info.backend_known for info in infos),
            dev_mode=first.dev_mode,
            sleep_mode=self._can_sleep,
            num_workers=tuple(info.num_workers[0] for info in infos),
            parallel_config=first.parallel_config,
        )

    def health(self) -> None:
        """Raise unless every server says that its engine is alive.

        Raises:
            ServerRequestError: A server is not reachable or its engine is dead.
        """
        self.get("/health")

    def pause(self, mode: str = "abort") -> None:
        """Pause generation on every server.

        Args:
            mode: `"abort"` ends running requests, `"wait"` lets them finish, `"keep"` freezes them; the first two
                clear the prefix cache.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        self.post("/pause", params={"mode": mode})
        self._only_paused = not self._weights_woken

    def resume(self) -> None:
        """Resume generation on every server.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        self.post("/resume")
        self._only_paused = False

    def is_paused(self) -> bool:
        """Whether generation is paused on at least one server."""
        return any(self._field(answer, "is_paused") for answer in self.get("/is_paused"))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Put every server to sleep.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.
            mode: What happens to running requests, as for `pause`.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        self._weights_woken = self._only_paused = False
        self.post("/sleep", params={"level": str(level), "mode": mode})

    def wake_up(self, *tags: str) -> None:
        """Wake every server, or only what the tags name.

        Args:
            tags: `"weights"`, `"kv_cache"`; none means everything.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        self.post("/wake_up", params={"tags": list(tags)} if tags else None)
        self._weights_woken = self._weights_woken or not tags or "weights" in tags

    def is_sleeping(self) -> bool:
        """Whether at least one server says that it sleeps: vLLM says so too while it is only paused or half awake."""
        return any(self._field(answer, "is_sleeping") for answer in self.get("/is_sleeping"))

    @property
    def surely_awake(self) -> bool:
        """Whether it is known without a request that no server's weights sleep."""
        return self._can_sleep is False or self._weights_woken

    def weights_asleep(self) -> bool:
        """Whether the weights of a server are not in its memory, so that an update would kill it.

        `/is_sleeping` is true as well for a server that is paused, and for one whose weights were woken but not its
        cache. What this client did to the servers comes first, then the sleep state in their metrics; where that
        leaves it open, the answer is yes.

        Returns:
            False only if it is certain that an update meets weights.

        Raises:
            ServerRequestError: A server did not answer.
        """
        if self.surely_awake or not self.is_sleeping():
            return False
        states = [_sleep_state(text) for text in self.fan_out(self._metrics)]
        return any(not self._only_paused if state is None else state for state in states)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool | None:
        """Drop the cached keys and values of old weights on every server; an update does not do it.

        Args:
            reset_running_requests: Also drop the blocks of running requests, which then start anew.

        Returns:
            True if every server says that it was done, False if one says that it was not, None if a server does
            not tell (older releases answer 200 either way).

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        params = {"reset_running_requests": "true"} if reset_running_requests else None
        verdicts = [_verdict(answer) for answer in self.post("/reset_prefix_cache", params=params)]
        if False in verdicts:
            return False
        return None if None in verdicts else True

    def weight_version(self) -> str:
        """The version that every server publishes; needs vLLM >= 0.27.

        Returns:
            The version.

        Raises:
            ServerRequestError: A server refused or did not answer.
            ValueError: The servers publish different versions.
        """
        versions = [self._field(answer, "weight_version") for answer in self.get("/weight_info")]
        if len(set(versions)) != 1:
            raise ValueError(
                f"the servers hold different weights: {dict(zip(self.urls, versions, strict=True))}"
            )
        return str(versions[0])

    def weight_checksums(self) -> list[dict[str, str]]:
        """Checksums of the weights that each server holds, by parameter; needs vLLM >= 0.32.

        Returns:
            One dict a server, in the order of the URLs.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        answers = self.post("/weight_checker", {"action": "checksum"})
        return [dict(self._field(answer, "checksums")) for answer in answers]

    def _one_server_info(self, url: str) -> ServerInfo:
        answer = self.request(url, "GET", "/version")
        version = answer.get("version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise ServerRequestError(
                url,
                "GET /version",
                status=200,
                body=repr(answer),
                hint="expected {'version': ...}: not a vLLM server",
            )
        try:
            answer = self.request(url, "GET", "/server_info", params={"config_format": "json"})
        except ServerRequestError as error:
            if error.status == 404:
                return ServerInfo(version=version, dev_mode=False)
            if error.status is None:
                raise
            # Some configurations cannot be written as JSON; the release is known, the rest must be asked otherwise.
            return ServerInfo(version=version, num_workers=(self._world_size(url),))
        config = answer.get("vllm_config") if isinstance(answer, dict) else None
        if not isinstance(config, dict):
            return ServerInfo(version=version, num_workers=(self._world_size(url),))
        transfer, parallel = config.get("weight_transfer_config"), config.get("parallel_config")
        model = config.get("model_config")
        sleep_mode = model.get("enable_sleep_mode") if isinstance(model, dict) else None
        return ServerInfo(
            version=version,
            backend=transfer.get("backend") if isinstance(transfer, dict) else None,
            backend_known="weight_transfer_config" in config,
            sleep_mode=sleep_mode if isinstance(sleep_mode, bool) else None,
            num_workers=(_num_workers(parallel) or self._world_size(url),),
            parallel_config=parallel if isinstance(parallel, dict) else None,
        )

    def _world_size(self, url: str) -> int | None:
        with contextlib.suppress(ServerRequestError):
            answer = self.request(url, "GET", "/get_world_size")
            size = answer.get("world_size") if isinstance(answer, dict) else None
            return size if isinstance(size, int) else None
        return None

    def _metrics(self, url: str) -> str:
        status, text = self.fetch(url, "GET", "/metrics")
        return text if status == 200 else ""

    def _field(self, answer: Any, name: str) -> Any:
        if not isinstance(answer, dict) or name not in answer:
            raise ValueError(f"expected a server's answer with {name!r}, got {answer!r}")
        return answer[name]


def _sleep_state(metrics: str) -> bool | None:
    """Whether any engine's weights are offloaded or discarded, from Prometheus text; None if it does not tell."""
    states = re.findall(
        r'^vllm:engine_sleep_state\{[^}]*sleep_state="(\w+)"[^}]*\}\s+([0-9.e+]+)\s*$', metrics, re.MULTILINE
    )
    if not states:
        return None
    return any(state in ("weights_offloaded", "discard_all") and float(value) > 0 for state, value in states)


def _verdict(answer: Any) -> bool | None:
    success = answer.get("success") if isinstance(answer, dict) else answer
    return success if isinstance(success, bool) else None


def _num_workers(parallel: Any) -> int | None:
    """Workers that one server's weight-transfer call reaches, from its parallel configuration."""
    if not isinstance(parallel, dict):
        return None
    try:
        world_size = int(parallel["world_size"])
        outside = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
        engines = int(parallel["data_parallel_size_local" if outside else "data_parallel_size"])
    except (KeyError, TypeError, ValueError):
        return None
    return world_size * engines
