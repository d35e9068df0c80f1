"""The control block: how a trainer rank and the worker on its GPU signal each other without a request per bucket.

One small private file in `/dev/shm` on both data planes. Each side writes its own words only, so nothing needs a
lock: an aligned 64-bit store is seen whole or not at all. Progress words hold `sync << 32 | count`; with the number
of the sync in the word itself there is no reset between syncs, and so no moment at which a stale count could pass
for a new one.

The order of one sync, for `k` from 0:

1. (trainer) fills bucket `k`, synchronises its stream, `produce(sync, k + 1)`
2. (worker) `wait_produced(sync, k + 1)`, loads bucket `k`, `consume(sync, k + 1)`
3. (trainer) `wait_consumed(sync, k + 1)` before it writes to the memory of bucket `k` again

When the update is closed, its worker counts once more: of `n` buckets, `consume(sync, n + 1)`. The server's answer alone
would not do, since a server whose workers answer through queues may take an earlier call's answer for it.

A worker learns the number of a sync from the update request, except where the sync goes like the one before: then the
two sides agree on it here, and no request is needed. A worker loads only what was confirmed, and a trainer confirms
only after every rank's worker has taken the offer, so that either all workers load without the request or none does:

1. (trainer) `offer(sync)`: same plan and same allocations as last time; or `withdraw(sync)` where that is not so
2. (worker) `wait_offered(sync)` for a moment, then `take(sync)`; or `decline(sync)` where no offer came in time
3. (trainer) `wait_taken(sync)`; all ranks vote; `confirm(sync)`, or `withdraw(sync)` if a worker has not taken it
4. (worker) `wait_confirmed(sync)`, then the order above; if it was withdrawn, the update request comes after all
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fsdp_ipc import shm
from fsdp_ipc.control_layout import (
    FILE_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAX_REPORT_BYTES,
    MAX_TEXT_BYTES,
    MAX_U32,
    REPORT,
    REPORT_OFFSET,
    TRAINER,
    WORKER,
    Side,
    check_u32,
    progress_word,
    spell,
)
from fsdp_ipc.process import ProcessName, pid_namespace, start_time

_T = TypeVar("_T")

_OFFERED, _CONFIRMED, _WITHDRAWN = 1, 2, 3  # what a trainer says of a sync that goes like the one before
_TAKEN, _DECLINED = 1, 2  # what the worker says to that

_SPIN_S = 50e-6
_FIRST_SLEEP_S = 20e-6
_SHORT_SLEEP_S = 50e-6
_LAST_SLEEP_S = 1e-3
_BRISK_S = 0.1
"""So long a wait looks every `_SHORT_SLEEP_S`: a bucket takes milliseconds, and a late look is lost at each of them."""

_LIVENESS_S = 0.2


class PeerError(RuntimeError):
    """The other side failed, in its own words, or it is gone."""


class ControlBlock:
    """One side's view of a control block. One thread of each process uses it at a time.

    Attributes:
        name: Name of the file, which is what travels to the worker.
    """

    def __init__(self, name: str, fd: int, own: Side, peer: Side, file: shm.SharedFile | None) -> None:
        self.name = name
        self._own = own
        self._peer = peer
        self._file = file
        self._map = mmap.mmap(fd, FILE_BYTES)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:HEADER_BYTES].cast("Q")
        self._closed = False

    @classmethod
    def create(cls) -> ControlBlock:
        """Make a new control block (a trainer rank). Not collective.

        Raises:
            MemoryError: `/dev/shm` is full.
        """
        file = shm.create(FILE_BYTES, suffix=".ctl")
        try:
            block = cls(file.name, file.fd, TRAINER, WORKER, file)
        except BaseException:
            file.close()
            raise
        block._introduce()
        block._words[0] = MAGIC
        return block

    @classmethod
    def open(cls, name: str) -> ControlBlock:
        """Open the control block of the trainer rank that shares this worker's GPU (the worker).

        A block may be opened again after it was closed; what the worker left in it before does not count any more.

        Raises:
            ValueError: The name or the file is not that of a control block of this release.
            PermissionError: The file belongs to another user or is open to others.
            FileNotFoundError: There is no such file on this side.
        """
        fd = shm.open_checked(name, shm.CONTROL_NAME, FILE_BYTES)
        try:
            block = cls(name, fd, WORKER, TRAINER, None)
        finally:
            os.close(fd)
        if block._words[0] != MAGIC:
            block._unmap()
            raise ValueError(
                f"{name} is not a control block of this release; install one release on both sides"
            )
        block._words[REPORT] = 0
        block._introduce()
        return block

    def _introduce(self) -> None:
        words, own = self._words, self._own
        words[own.progress] = 0
        words[own.failed] = 0
        words[own.closed] = 0
        words[own.repeat] = 0
        words[own.start_time], words[own.namespace] = start_time(os.getpid()) or 0, pid_namespace()
        words[own.pid] = os.getpid()

    # Trainer side

    @property
    def has_worker(self) -> bool:
        """Whether a worker has ever opened this block (the trainer)."""
        self._check_side(TRAINER)
        return self._words[WORKER.pid] != 0

    def worker_at(self) -> str:
        """Who the worker is and how far it has come, for an error (the trainer)."""
        self._check_side(TRAINER)
        return f"it ({self._who(WORKER)}) is at {spell(self._words[WORKER.progress])}"

    def produce(self, sync: int, count: int) -> None:
        """Say that buckets 0 to `count - 1` of this sync are complete in memory (the trainer).

        On CUDA the caller has synchronised the stream that wrote them.
        """
        self._advance(TRAINER, sync, count)

    def wait_consumed(self, sync: int, count: int, timeout_s: float) -> None:
        """Wait until the worker no longer reads buckets 0 to `count - 1` of this sync (the trainer).

        Raises:
            PeerError: The worker failed this sync, went on without us, closed the block, or died.
            TimeoutError: It took longer than `timeout_s` seconds.
        """
        self._wait(WORKER, sync, count, timeout_s, "consumed")

    def offer(self, sync: int) -> None:
        """Say that this sync goes like the one before: same plan, same allocations (the trainer)."""
        self._say(TRAINER, sync, _OFFERED)

    def confirm(self, sync: int) -> None:
        """Let the worker load the sync that it has taken (the trainer, after all ranks have heard that theirs has)."""
        self._say(TRAINER, sync, _CONFIRMED)

    def withdraw(self, sync: int) -> None:
        """Say that this sync takes an update request (the trainer)."""
        self._say(TRAINER, sync, _WITHDRAWN)

    def wait_taken(self, sync: int, timeout_s: float) -> bool | None:
        """Wait until the worker has taken or declined the offer (the trainer).

        Returns:
            Whether it has taken it; None if it had not said within `timeout_s` seconds.

        Raises:
            PeerError: The worker failed this sync, closed the block, or died.
        """
        self._check_side(TRAINER)
        word = self._until(WORKER, sync, lambda: self._said(WORKER, sync), timeout_s)
        return None if word is None else word == _TAKEN

    # Worker side

    def consume(self, sync: int, count: int) -> None:
        """Say that buckets 0 to `count - 1` of this sync are no longer read (the worker).

        On CUDA the caller has synchronised the stream that read them.
        """
        self._advance(WORKER, sync, count)

    def wait_produced(self, sync: int, count: int, timeout_s: float) -> None:
        """Wait until buckets 0 to `count - 1` of this sync are complete in memory (the worker).

        Raises:
            PeerError: The trainer failed this sync, went on without us, closed the block, or died.
            TimeoutError: It took longer than `timeout_s` seconds.
        """
        self._wait(TRAINER, sync, count, timeout_s, "produced")

    def wait_offered(self, sync: int, timeout_s: float) -> bool:
        """Wait for a moment whether the trainer offers this sync; a trainer that is gone offers nothing (the worker)."""
        self._check_side(WORKER)
        try:
            return self._until(TRAINER, sync, lambda: self._said(TRAINER, sync), timeout_s) == _OFFERED
        except PeerError:
            return False

    def take(self, sync: int) -> None:
        """Take the offer: the sync will be loaded as soon as it is confirmed (the worker)."""
        self._say(WORKER, sync, _TAKEN)

    def decline(self, sync: int) -> None:
        """Say that no offer of this sync will be taken any more (the worker)."""
        self._say(WORKER, sync, _DECLINED)

    def wait_confirmed(self, sync: int, timeout_s: float) -> bool:
        """Wait until the trainer confirms or withdraws the sync that was taken (the worker).

        Returns:
            Whether it was confirmed.

        Raises:
            PeerError: The trainer failed this sync, closed the block, or died.
            TimeoutError: It took longer than `timeout_s` seconds.
        """
        self._check_side(WORKER)

        def decided() -> int | None:
            said = self._said(TRAINER, sync)
            return None if said == _OFFERED else said

        found = self._until(TRAINER, sync, decided, timeout_s)
        if found is None:
            raise TimeoutError(
                f"waited {timeout_s:g} s for the trainer ({self._who(TRAINER)}) to confirm sync {sync}; is another of "
                "its ranks stuck, or is the time-out too short?"
            )
        return found == _CONFIRMED

    # Both sides

    def fail(self, sync: int, text: str) -> None:
        """Say that this side failed the sync; the peer's waits for it raise `PeerError(text)` from now on.

        The first failure of a sync is kept, a later one of the same sync is dropped. Texts over 64 KiB are cut.
        """
        self._check_open()
        check_u32("sync", sync)
        words, own = self._words, self._own
        if words[own.failed] and words[own.failed] >> 32 == sync:
            return
        data = (text or "no reason given").encode("utf-8", "replace")[:MAX_TEXT_BYTES]
        self._bytes[own.text_offset : own.text_offset + len(data)] = data
        words[own.failed] = sync << 32 | len(data)

    def write_report(self, report: dict[str, Any]) -> None:
        """Leave a report for the trainer, in place of the one before (the worker).

        Args:
            report: JSON object of at most 1 MiB.

        Raises:
            ValueError: It is larger, or holds NaN or infinity.
            TypeError: It is not plain JSON.
        """
        self._check_side(WORKER)
        data = json.dumps(report, allow_nan=False, separators=(",", ":")).encode()
        if len(data) > MAX_REPORT_BYTES:
            raise ValueError(f"the report has {len(data)} bytes; at most {MAX_REPORT_BYTES} fit")
        self._words[REPORT] = 0
        self._bytes[REPORT_OFFSET : REPORT_OFFSET + len(data)] = data
        self._words[REPORT] = len(data)

    def read_report(self) -> dict[str, Any] | None:
        """Return the worker's latest report, None while there is none (the trainer).

        Read it after the worker has answered the request at whose end it writes; it is not locked against a writer.

        Raises:
            ValueError: What the worker left is not a JSON object.
        """
        self._check_side(TRAINER)
        length = self._words[REPORT]
        if length == 0:
            return None
        if length > MAX_REPORT_BYTES:
            raise ValueError(f"the worker's report claims {length} bytes; at most {MAX_REPORT_BYTES} fit")
        try:
            report = json.loads(bytes(self._bytes[REPORT_OFFSET : REPORT_OFFSET + length]))
        except ValueError as error:
            raise ValueError(f"the worker's report is not JSON: {error}") from error
        if not isinstance(report, dict):
            raise ValueError(f"expected the worker's report as a JSON object, got {type(report).__name__}")
        return report

    def wait_report(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the worker's report as soon as there is one, None after `timeout_s` seconds without (the trainer)."""
        deadline = time.monotonic() + timeout_s
        while (report := self.read_report()) is None and time.monotonic() < deadline:
            time.sleep(_LAST_SLEEP_S)
        return report

    def close(self) -> None:
        """Let go of the block; the peer's waits raise from now on. The trainer's side also unlinks the file."""
        if self._closed:
            return
        self._words[self._own.closed] = 1
        self._unmap()
        if self._file is not None:
            self._file.close()

    def _unmap(self) -> None:
        self._closed = True
        self._words.release()
        self._bytes.release()
        self._map.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the control block {self.name} is closed")

    def _check_side(self, side: Side) -> None:
        self._check_open()
        if self._own is not side:
            raise ValueError(
                f"this is for the {side.name}; the control block is held by the {self._own.name}"
            )

    def _advance(self, side: Side, sync: int, count: int) -> None:
        self._check_side(side)
        word = progress_word(sync, count)
        if word < self._words[side.progress]:
            raise ValueError(
                f"progress goes forward only: {spell(self._words[side.progress])} was said, now {spell(word)}"
            )
        # No fence: on CUDA the caller's stream synchronisation is one, and CPU copies end microseconds before.
        self._words[side.progress] = word

    def _say(self, side: Side, sync: int, what: int) -> None:
        self._check_side(side)
        self._words[side.repeat] = progress_word(sync, what)

    def _said(self, side: Side, sync: int) -> int | None:
        word = self._words[side.repeat]
        return word & MAX_U32 if word >> 32 == sync else None

    def _wait(self, peer: Side, sync: int, count: int, timeout_s: float, verb: str) -> None:
        self._check_side(WORKER if peer is TRAINER else TRAINER)
        target = progress_word(sync, count)
        words = self._words

        def reached() -> bool | None:
            word = words[peer.progress]
            if word >> 32 > sync:
                raise PeerError(f"the {peer.name} has gone on: {spell(word)}, waited for {spell(target)}")
            return True if word >> 32 == sync and word >= target else None

        if self._until(peer, sync, reached, timeout_s) is None:
            raise TimeoutError(
                f"waited {timeout_s:g} s for {spell(target)} to be {verb} by the {peer.name} "
                f"({self._who(peer)}), which is at {spell(words[peer.progress])}; is it stuck, or is the time-out too "
                "short?"
            )

    def _until(self, peer: Side, sync: int, look: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """Look until there is something to see; None when the time is over.

        Raises:
            PeerError: The other side failed this sync, closed the block, or died.
        """
        words = self._words
        begin = time.monotonic()
        look_at = begin + _LIVENESS_S
        sleep_s = 0.0
        while True:
            closed = words[peer.closed]  # before the look: its last word came before that
            # Failure first: what a failed side had said before is not to be used any more.
            if words[peer.failed] and words[peer.failed] >> 32 == sync:
                raise PeerError(self._failure_text(peer))
            if (found := look()) is not None:
                return found
            if closed:
                why = (
                    ": another trainer has connected to its server, or that was stopped; a send connects anew"
                    if peer is WORKER
                    else ""
                )
                raise PeerError(
                    f"the {peer.name} closed the control block at {spell(words[peer.progress])}{why}"
                )
            now = time.monotonic()
            if now - begin >= timeout_s:
                return None
            if now >= look_at:
                if not self._alive(peer):
                    raise PeerError(
                        f"the {peer.name} ({self._who(peer)}) died at {spell(words[peer.progress])}"
                    )
                look_at = now + _LIVENESS_S
            if now - begin >= _SPIN_S:
                longest = _SHORT_SLEEP_S if now - begin < _BRISK_S else _LAST_SLEEP_S
                sleep_s = min(max(_FIRST_SLEEP_S, 1.5 * sleep_s), longest)
                time.sleep(sleep_s)

    def _failure_text(self, peer: Side) -> str:
        length = min(self._words[peer.failed] & MAX_U32, MAX_TEXT_BYTES)
        return bytes(self._bytes[peer.text_offset : peer.text_offset + length]).decode("utf-8", "replace")

    def _who(self, peer: Side) -> str:
        pid = self._words[peer.pid]
        return f"pid {pid}" if pid else "it has not opened the control block"

    def _alive(self, peer: Side) -> bool:
        words = self._words
        pid, namespace = words[peer.pid], words[peer.namespace]
        # A process id of another PID namespace says nothing here; then only the time-out ends a wait.
        if pid == 0 or namespace == 0 or namespace != pid_namespace():
            return True
        return not ProcessName("", namespace, pid, words[peer.start_time]).is_dead()
