"""What a server wants done around a sync: paused and resumed, old keys and values dropped, its version read back."""

from __future__ import annotations

from typing import Any, Literal

from fsdp_ipc.callbacks.base import Sync, SyncCallback
from fsdp_ipc.clients.base import ServerRequestError
from fsdp_ipc.stats import TransferStats


class PauseServer(SyncCallback):
    """Pauses generation for the time of a sync, and resumes it afterwards, also after a failed one.

    A server that was paused already stays so. Put it first in the list, so that everything else is done in between.

    Args:
        mode: `"keep"` freezes running requests, which go on with the new weights over the keys and values of the old;
            `"wait"` lets them finish first, which must take less than `Timeouts.control_s`; `"abort"` ends them.
    """

    __module__ = "fsdp_ipc.callbacks"
    required = True

    def __init__(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        if mode not in ("keep", "wait", "abort"):
            raise ValueError(f"mode={mode!r}: expected 'keep', 'wait' or 'abort'")
        self._mode = mode
        self._paused = False

    def on_sync_start(self, sync: Sync) -> None:
        """Sender: pause."""
        if not sync.is_sender:
            return
        client = _able(sync, "pause", "resume", "is_paused")
        if not client.is_paused():
            # Before the request: one that timed out may still have paused the server.
            self._paused = True
            client.pause(self._mode)

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Sender: resume."""
        del stats
        self._resume(sync)

    def on_sync_error(self, sync: Sync, error: BaseException) -> None:
        """Sender: resume, with the weights of before; unless `on_failure="pause"` wants the server to stay paused."""
        if getattr(error, "server_paused", False):
            self._paused = False
        self._resume(sync)

    def _resume(self, sync: Sync) -> None:
        if self._paused:
            self._paused = False
            _able(sync, "resume").resume()


class ResetPrefixCache(SyncCallback):
    """Drops the keys and values of the old weights after each sync, which an update leaves in the server's prefix cache.

    A server that refuses, or says that it could not (requests were running), is told of in the log.

    Args:
        reset_running_requests: Also drop the blocks of running requests, which then start anew.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, *, reset_running_requests: bool = False) -> None:
        self._reset_running_requests = reset_running_requests

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Sender: reset, once."""
        del stats
        if not sync.is_sender:
            return
        client = _able(sync, "reset_prefix_cache")
        done = (
            client.reset_prefix_cache(reset_running_requests=True)
            if self._reset_running_requests
            else client.reset_prefix_cache()
        )
        if done is False:
            raise RuntimeError(
                "the server did not drop its prefix cache, most likely because requests are running: prompts that it has "
                "seen are answered from keys and values of the old weights. Pause it for the sync with "
                "PauseServer('abort') or PauseServer('wait'), or use ResetPrefixCache(reset_running_requests=True)"
            )


class CheckVersion(SyncCallback):
    """Reads the published version back after each sync, from every server.

    Needs vLLM 0.27 or later, and a `version` given to `send`; without one it checks nothing.
    """

    __module__ = "fsdp_ipc.callbacks"
    required = True

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Sender: compare."""
        if not sync.is_sender or stats.version is None:
            return
        try:
            published = _able(sync, "weight_version").weight_version()
        except ServerRequestError as error:
            if error.status in (404, 405):
                raise RuntimeError(
                    "this server does not publish a weight version, which vLLM does from release 0.27 on: leave "
                    "CheckVersion out"
                ) from error
            raise
        if published != stats.version:
            raise RuntimeError(
                f"the server publishes version {published!r}, expected {stats.version!r}: does another trainer push into it?"
            )


def _able(sync: Sync, *methods: str) -> Any:
    """The client, if it has the methods."""
    missing = [name for name in methods if not callable(getattr(sync.client, name, None))]
    if missing:
        raise TypeError(
            f"{type(sync.client).__name__} has no {', '.join(missing)}: use a client that has, such as HTTPWeightSyncClient"
        )
    return sync.client
