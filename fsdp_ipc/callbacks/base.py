"""What a callback is told of a sync, and the runner that keeps a callback's own faults away from the sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.group import TrainerGroup, describe
from fsdp_ipc.stats import StageTimer, TransferStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One `send`, as a callback sees it on its own rank.

    Attributes:
        number: Number of the sync, from 1; a failed one counts.
        version: What `send` was given, as text, or None.
        rank: This rank in the trainer group.
        num_ranks: Ranks of the trainer group.
        is_sender: Whether this rank talks to the server. What is done once a job (a request, a shared file) is done here.
        client: The sender's client; None on every other rank.
        began_ns: When the sync began on this rank, in nanoseconds since the epoch.
        timer: Seconds by stage so far, and the spans of the timeline.
    """

    __module__ = "fsdp_ipc.callbacks"

    number: int
    version: str | None
    rank: int
    num_ranks: int
    is_sender: bool
    client: WeightSyncClient | None
    began_ns: int = field(default_factory=time.time_ns)
    timer: StageTimer

    @property
    def seconds(self) -> float:
        """Seconds since the sync began."""
        return self.timer.seconds()

    @property
    def spans(self) -> tuple[tuple[str, int, float, float], ...]:
        """The stages so far: name, bucket (or -1), begin and end in seconds since the sync began."""
        return tuple(self.timer.spans)


class SyncCallback:
    """Told of every sync of a `WeightSender`; the methods here do nothing, override what you need.

    The methods are called on every rank that was given the callback, in the thread that called `send`; lists may differ
    between ranks. They must not call collectives, nor the sender. Callbacks begin in the order of the list and end in
    reverse, so that one encloses those after it.

    An exception in a method never stops the sync or a callback beside it: it is caught on its rank and logged. Where
    the callback is `required`, `send` then raises `CallbackError` on *every* rank, after the workers have the weights.
    Time spent here is time of the sync: the other ranks wait at the next exchange, for `Timeouts.control_s` at most.

    Attributes:
        required: Whether a failure at the start or the end of a sync that went well must reach the caller of `send`.
    """

    __module__ = "fsdp_ipc.callbacks"

    required: bool = False

    def on_sync_start(self, sync: Sync) -> None:
        """Before anything is asked of the server or gathered."""

    def on_bucket(self, sync: Sync, bucket: int, num_buckets: int) -> None:
        """A bucket has been gathered (on a GPU: its gather has been queued); counted from 0."""

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Every worker holds the weights and the version is published."""

    def on_sync_error(self, sync: Sync, error: BaseException) -> None:
        """The sync failed, and what was half-open on the server has been closed; `send` raises `error` next."""

    def close(self) -> None:
        """The sender is closed. May come without any sync."""


class CallbackError(WeightSyncError):
    """A required callback failed; the same on every rank. The sync itself went well: the workers hold the weights.

    Attributes:
        stats: What the sync did, as this rank saw it.
    """

    __module__ = "fsdp_ipc.callbacks"

    stats: TransferStats | None = None


class CallbackRunner:
    """A sender's callbacks on this rank.

    Built on all ranks, collectively.

    Args:
        callbacks: As given to the sender.
        group: The trainer ranks.
        client: The sender's client; None elsewhere.

    Raises:
        WeightSyncError: On every rank, where one was given something else than callbacks.
    """

    def __init__(
        self, callbacks: Sequence[SyncCallback], group: TrainerGroup, client: WeightSyncClient | None
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._group = group
        self._client = client if group.is_sender else None
        self._sync: Sync | None = None
        self._failures: list[str] = []
        self._gathered = -1
        self._told: set[tuple[int, str]] = set()
        given: Sequence[object] = self._callbacks  # a caller may pass anything
        strange = [repr(c) for c in given if not isinstance(c, SyncCallback)]
        error = TypeError(f"callbacks must be SyncCallback objects, got {strange[0]}") if strange else None
        required = any(getattr(callback, "required", False) for callback in self._callbacks)
        # Lists may differ between ranks, but all ranks must vote if one of them does.
        self._votes = group.vote("callbacks", error, flag=required)

    def begin(
        self, number: int, version: str | None, timer: StageTimer, num_buckets: Callable[[], int]
    ) -> None:
        """This rank: a sync begins."""
        if not self._callbacks:
            return
        group = self._group
        self._sync = Sync(
            number=number,
            version=version,
            rank=group.rank,
            num_ranks=group.size,
            is_sender=group.is_sender,
            client=self._client,
            timer=timer,
        )
        self._failures = []
        self._gathered = -1

        def gathered(bucket: int) -> None:
            # On a GPU the wait for what was queued is a second span of the last bucket.
            if bucket > self._gathered:
                self._gathered = bucket
                self._call("on_bucket", bucket, num_buckets())

        timer.on_gathered = gathered
        self._call("on_sync_start", required=True)

    def end(self, stats: TransferStats) -> None:
        """All ranks; collective if any of them has a required callback: a sync went well.

        Raises:
            CallbackError: On every rank, where a required callback failed on one.
        """
        if self._callbacks:
            self._call("on_sync_end", stats, required=True, backwards=True)
            self._sync = None
        if not self._votes:
            return
        try:
            self._group.vote("callbacks", "; ".join(self._failures) or None)
        except WeightSyncError as error:
            ours = CallbackError(error.step, error.failures)
            ours.stats = stats
            raise ours from error

    def failed(self, error: BaseException) -> None:
        """This rank: the sync failed."""
        if self._sync is not None:
            self._call("on_sync_error", error, backwards=True)
            self._sync = None

    def close(self) -> None:
        """This rank: the sender is closed."""
        for callback in reversed(self._callbacks):
            try:
                callback.close()
            except Exception:
                logger.warning("closing %s failed", type(callback).__name__, exc_info=True)

    def _call(self, method: str, *args: Any, required: bool = False, backwards: bool = False) -> None:
        sync = self._sync
        if sync is None:
            return
        for index, callback in list(enumerate(self._callbacks))[:: -1 if backwards else 1]:
            try:
                getattr(callback, method)(sync, *args)
            except Exception as error:
                text = f"{type(callback).__name__}.{method}: {describe(error)}"
                if required and callback.required:
                    self._failures.append(text)
                # With its traceback once: one that fails in every bucket would bury everything else.
                first = (index, method) not in self._told
                self._told.add((index, method))
                logger.warning("a callback failed in sync %d: %s", sync.number, text, exc_info=first)
