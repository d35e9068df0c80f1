"""What a sender needs from an inference server: vLLM's four verbs, its errors with the cure in them, and facts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from fsdp_ipc.cuda_ipc import hint as cuda_hint


@runtime_checkable
class WeightSyncClient(Protocol):
    """The control plane of one or several inference servers; only the sender rank calls it.

    The same four methods as vLLM's own trainer-side clients, so an object written for those fits. All are
    synchronous, take plain dicts, return only when every server is done, and raise if any of them is not.

    Any client gets one call at a time, unless it is an `OverlappingClient`.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand the backend's handshake to every worker."""

    def start_weight_update(self) -> None:
        """Open a weight update on every worker."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Deliver one payload to every worker, or (a list, vLLM >= 0.29) one entry to each worker."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on every worker and publish `weight_version` if one is given."""


@runtime_checkable
class OverlappingClient(WeightSyncClient, Protocol):
    """A client of which two calls may be out at the same time, and which need not wait for their answers.

    As all of a client it is called on the sender rank only, and nothing of it is collective. The calls that end in `_soon` do
    not raise what becomes of the request: it is the future's error, the one that the verb of that name would raise.
    """

    @property
    def surely_awake(self) -> bool:
        """Whether it is known without a request that the servers' weights do not sleep."""

    def start_weight_update_soon(self) -> Future[None]:
        """As `start_weight_update`, but the request is only sent; what becomes of it is told later."""

    def finish_weight_update_soon(self, weight_version: str | None = None) -> Future[None]:
        """As `finish_weight_update`, in the same way; the server takes it after the start that is still out."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What the servers behind a client say about themselves.

    Attributes:
        version: vLLM's release, for example `"0.32.0"`; the same on every server.
        backend: The server's weight-transfer backend (`"ipc"`, `"fsdp_ipc"`, ...); None if there is none
            or the server does not tell, see `backend_known`.
        backend_known: Whether `backend` was read from the server, so that None means "none configured".
        dev_mode: Whether the development routes, the weight-transfer routes among them, are there.
        sleep_mode: Whether the server can sleep (`--enable-sleep-mode`); None where it does not tell.
        num_workers: Workers that one call reaches, by server, in the order of the URLs; None where the server
            does not tell.
        parallel_config: How the first server spreads its model, as it tells it itself; None where it does not.
    """

    version: str
    backend: str | None = None
    backend_known: bool = False
    dev_mode: bool = True
    sleep_mode: bool | None = None
    num_workers: tuple[int | None, ...] = (None,)
    parallel_config: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def world_size(self) -> int | None:
        """Workers over all servers, or None if one of them does not tell."""
        known = [count for count in self.num_workers if count is not None]
        return sum(known) if len(known) == len(self.num_workers) else None


class ServerRequestError(RuntimeError):
    """A server refused a request, answered nonsense, or did not answer.

    Attributes:
        url: Base URL (or other name) of the server.
        route: What was called, for example `"POST /update_weights"`.
        status: HTTP status, or None if no answer came.
        body: The server's own words, or the transport's error.
        hint: What to do about it, or None.
        others: The failures of further servers in the same call.
    """

    __module__ = "fsdp_ipc.clients"

    def __init__(
        self,
        url: str,
        route: str,
        *,
        status: int | None,
        body: str,
        hint: str | None = None,
        others: Sequence[ServerRequestError] = (),
    ) -> None:
        self.url = url
        self.route = route
        self.status = status
        self.body = body
        self.hint = hint
        self.others = tuple(others)
        super().__init__("; and ".join(error._describe() for error in (self, *self.others)))

    def _describe(self) -> str:
        outcome = "" if self.status is None else f"status {self.status}: "
        text = f"{self.route} at {self.url}: {outcome}{self.body or '(empty body)'}"
        return f"{text} [{self.hint}]" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.url, self.route, self.status, self.body, self.hint, self.others)
        return _rebuild_error, state


def _rebuild_error(
    url: str,
    route: str,
    status: int | None,
    body: str,
    hint: str | None,
    others: tuple[ServerRequestError, ...],
) -> ServerRequestError:
    return ServerRequestError(url, route, status=status, body=body, hint=hint, others=others)


# A piece of the server's answer, and the cure. Looked through in this order, compared without case.
_HINTS: tuple[tuple[str, str], ...] = (
    (
        "refusing to deserialize",
        (
            "start the server with VLLM_ALLOW_INSECURE_SERIALIZATION=1, because the stock 'ipc' backend takes pickled "
            "handles over HTTP; or install fsdp_ipc beside vLLM and use --weight-transfer-config "
            '\'{"backend":"fsdp_ipc"}\', which needs no pickle'
        ),
    ),
    (
        "invalid weight transfer backend",
        (
            "the server does not know that backend: install fsdp_ipc in the server's environment and keep its plugin "
            "allowed (VLLM_PLUGINS unset, or with 'fsdp_ipc' in it), or start the server with "
            '--weight-transfer-config \'{"backend":"ipc"}\''
        ),
    ),
    (
        "please set weight_transfer_config",
        'start the server with --weight-transfer-config \'{"backend":"fsdp_ipc"}\' or \'{"backend":"ipc"}\'',
    ),
    (
        "ipc handle not found for gpu uuid",
        (
            "the worker's GPU is none of the trainer's GPUs. Each worker needs a trainer rank on its own GPU: compare the "
            "UUIDs in the message with `nvidia-smi -L`, and CUDA_VISIBLE_DEVICES of the server with that of the trainer "
            "(with a parent that is pinned to GPUs 4-7, local index 1 is GPU 5)"
        ),
    ),
    (
        "weight update is already active",
        (
            "an earlier update was left open, perhaps by another trainer: one trainer at a time, and a failed one must "
            "finish or abort its update"
        ),
    ),
    (
        "called without a matching start_weight_update",
        "the update was closed before, by a failed chunk or by another trainer",
    ),
    (
        "start_weight_update must be called before",
        "the update was closed before, by a failed chunk or by another trainer",
    ),
    (
        "nothing to finish: no update was received",
        "another trainer has connected to this server meanwhile, or the update was closed before: one trainer at a time",
    ),
    (
        "invalid init_info for",
        "the server's backend takes another handshake: the release or the backend is not the one that was assumed",
    ),
    (
        "invalid update_info for",
        "the server's backend takes another payload: the release or the backend is not the one that was assumed",
    ),
    (
        "list index out of range",
        (
            "if a list of payloads was sent, it had fewer entries than the server has workers over all data-parallel "
            "replicas; give the client every server, and one entry a worker"
        ),
    ),
    (
        "storage_offset() must be divisible",
        "a packed chunk holds a tensor at an offset that its dtype cannot be read from",
    ),
    (
        "enginedead",
        "the server's engine process has died, see its log; an update while the server sleeps kills it",
    ),
    (
        "enginecore encountered an issue",
        "the server's engine process has died, see its log; an update while the server sleeps kills it",
    ),
)

_NO_DEV_ROUTE = (
    "the weight-transfer, sleep and cache routes exist only if the server runs with VLLM_SERVER_DEV_MODE=1 "
    "(or this release of vLLM has no such route)"
)


def base_url_hint(url: str, route: str, status: int) -> str | None:
    """What a missing route says that every vLLM server has: the URL is not the server's base URL."""
    if status not in (404, 405) or route not in ("/version", "/health"):
        return None
    path = urlsplit(url).path
    cure = f"leave out {path!r}" if path else "is something else listening there, or a proxy in front of it?"
    return f"this is not the server's base URL: every vLLM server has {route} there; {cure}"


def hint_for(status: int | None, text: str) -> str | None:
    """Find the cure that a server's answer suggests.

    Args:
        status: HTTP status, or None outside HTTP.
        text: The server's own words.

    Returns:
        The cure, or None if nothing is known.
    """
    lowered = text.lower()
    for piece, cure in _HINTS:
        if piece in lowered:
            return cure
    if "cuda" in lowered or "pidfd_getfd" in lowered:
        return cuda_hint(text)
    return _NO_DEV_ROUTE if status in (404, 405) else None


def refuse_asleep(client: Any) -> None:
    """Raise if the weights of a server sleep: an update would kill its engine (vllm-project/vllm#57853).

    Args:
        client: Asked if it has `weights_asleep`; any other client is trusted.

    Raises:
        RuntimeError: The weights sleep, or it cannot be told.
    """
    asleep = getattr(client, "weights_asleep", None)
    if callable(asleep) and asleep():
        raise RuntimeError(
            "the server is asleep: wake its weights first, with wake_up('weights') of the client that sends. Where "
            "another process woke them, calling it once more does no harm"
        )


def error_text(body: str, limit: int = 4000) -> str:
    """Take the server's own words out of its answer: the message of vLLM's JSON error, else the body as it is.

    Args:
        body: Body of the answer.
        limit: Most characters to keep.

    Returns:
        The words, shortened in the middle if they are longer than `limit`.
    """
    text = body.strip()
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed.get("detail", parsed.get("message")))
        if isinstance(error, dict):
            error = error.get("message")
        if isinstance(error, str) and error:
            text = error
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... ({len(text) - limit} characters left out) ... {text[-limit // 2 :]}"
    return text
