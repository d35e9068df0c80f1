"""The in-process client: an `LLM` or `AsyncLLM` that lives in the sender's own process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from types import SimpleNamespace
from typing import Any

from fsdp_ipc.clients.base import ServerInfo, ServerRequestError, hint_for


class InProcessWeightSyncClient:
    """Drives a vLLM engine object of this process: `LLM`, `AsyncLLM`, or anything with their four methods.

    CUDA IPC cannot be opened by the process that exported it, so the engine's workers must be processes of their
    own: leave `VLLM_ENABLE_V1_MULTIPROCESSING` on.

    Args:
        engine: The engine.
        loop: For an engine with `async` methods: the event loop that it runs in, in another thread.
        call_timeout_s: Seconds after which an `async` call is given up. A blocking engine cannot be interrupted.

    Raises:
        TypeError: The engine lacks one of the four methods.
        ValueError: The engine is `async` and no loop was given.
    """

    __module__ = "fsdp_ipc.clients.inprocess"

    def __init__(
        self, engine: Any, *, loop: asyncio.AbstractEventLoop | None = None, call_timeout_s: float = 300.0
    ) -> None:
        missing = [name for name in _VERBS if not callable(getattr(engine, name, None))]
        if missing:
            raise TypeError(
                f"{type(engine).__name__} is no vLLM engine with weight transfer: it lacks {missing}"
            )
        if loop is None and inspect.iscoroutinefunction(engine.start_weight_update):
            raise ValueError(
                f"{type(engine).__name__} has async methods: pass loop=, the event loop that it runs in, and call "
                "send from another thread"
            )
        self.engine = engine
        self.loop = loop
        self.call_timeout_s = call_timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Hand the backend's handshake to the workers."""
        self._call("init_weight_transfer_engine", init_request(init_info))

    def start_weight_update(self) -> None:
        """Open a weight update."""
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Deliver one payload, raw handles and all."""
        self._call("update_weights", update_request(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update; `weight_version` needs vLLM >= 0.27."""
        if weight_version is None:
            self._call("finish_weight_update")
        else:
            self._call("finish_weight_update", weight_version)

    def server_info(self) -> ServerInfo:
        """Release and configuration of the engine, as far as it shows them."""
        return engine_info(self.engine)

    def reset_prefix_cache(self) -> bool | None:
        """Drop the cached keys and values of old weights; an update does not do it.

        Returns:
            Whether the engine says that it was done, None if it does not tell.
        """
        answer = self._call("reset_prefix_cache")
        return answer if isinstance(answer, bool) else None

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, as far as it tells."""
        return bool(self._call("is_sleeping")) if hasattr(self.engine, "is_sleeping") else False

    def _call(self, method: str, *args: Any) -> Any:
        name = type(self.engine).__name__
        try:
            result = getattr(self.engine, method)(*args)
            if inspect.isawaitable(result):
                result = self._await(result)
        except concurrent.futures.TimeoutError as error:
            raise ServerRequestError(
                name, method, status=None, body=f"timed out after {self.call_timeout_s:g} s"
            ) from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise ServerRequestError(
                name, method, status=None, body=text, hint=hint_for(None, text)
            ) from error
        return result

    def _await(self, awaitable: Any) -> Any:
        if self.loop is None:
            raise ValueError("the engine has async methods: pass loop=, the event loop that it runs in")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop:
            awaitable.close()
            raise RuntimeError(
                "send was called in the engine's own event loop and would block it: use a thread"
            )

        async def finish() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(finish(), self.loop).result(self.call_timeout_s)


_VERBS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def init_request(init_info: dict[str, Any]) -> Any:
    """VLLM's request object for the handshake, or a plain object like it where vLLM is not installed."""
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    except ImportError:
        return SimpleNamespace(init_info=init_info)
    return WeightTransferInitRequest(init_info=init_info)


def update_request(update_info: dict[str, Any] | list[dict[str, Any]]) -> Any:
    """VLLM's request object for an update, or a plain object like it where vLLM is not installed."""
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    except ImportError:
        return SimpleNamespace(update_info=update_info)
    return WeightTransferUpdateRequest(update_info=update_info)


def engine_info(engine: Any) -> ServerInfo:
    """Read release, backend and number of workers off an engine object.

    Args:
        engine: An `LLM`, an `AsyncLLM`, or an object that has one of them as `engine`, `llm` or `llm_engine`.

    Returns:
        The facts; an unknown release is `"unknown"`.
    """
    try:
        import vllm

        version = str(vllm.__version__)
    except ImportError:
        version = "unknown"
    config = None
    seen: list[Any] = [engine]
    for candidate in seen:
        config = getattr(candidate, "vllm_config", None)
        if config is not None:
            break
        inner = [getattr(candidate, name, None) for name in ("llm_engine", "engine", "llm")]
        seen.extend(item for item in inner if item is not None and all(item is not other for other in seen))
    if config is None:
        return ServerInfo(version=version)
    transfer = getattr(config, "weight_transfer_config", None)
    workers = getattr(getattr(config, "parallel_config", None), "world_size_across_dp", None)
    return ServerInfo(
        version=version,
        backend=getattr(transfer, "backend", None),
        backend_known=True,
        num_workers=(workers if isinstance(workers, int) else None,),
    )
