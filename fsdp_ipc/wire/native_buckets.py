"""The buckets of one sync on the native wire: filled, and announced to the worker when the device has finished them.

Two ways, by the plan. Where ranks make full tensors, each rank's worker reads that rank's slots alone: the host goes on to
the next bucket while the device gathers. Where workers read from several ranks, a slot is free when all of them have read
it, and a bucket is announced when all ranks have it; there is nothing to gather meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.stage import Stage
from fsdp_ipc.stats import StageTimer
from fsdp_ipc.verify import SentVerifier
from fsdp_ipc.wire.base import Timeouts, on_stream

LOOK_AROUND_S = 0.25
"""How often a rank that waits for its worker looks whether the request or another rank has failed."""

LOOK_S = 0.0001
"""How often a rank that waits for its worker looks whether the device has finished the next bucket."""

_DEVICE_POLL_S = 2e-5
"""How long a rank that has nothing to do but wait for the device lets other threads run between two looks."""


class BucketProducer:
    """This rank's side of the buckets; kept for the life of the sender.

    Args:
        stage: Plan and memory of the sender.
        group: The trainer ranks.
        device: Device of the staging memory.
        timeouts: See `Timeouts`.
        loading: The request in which the workers load, on the sender's rank.
        verifier: Digests what is sent.
    """

    def __init__(
        self,
        stage: Stage,
        group: TrainerGroup,
        device: torch.device,
        timeouts: Timeouts,
        loading: Callable[[], Future[None] | None],
        verifier: SentVerifier | None,
    ) -> None:
        self._stage, self._group, self._timeouts = stage, group, timeouts
        self._loading, self._verifier = loading, verifier
        self._control: ControlBlock | None = None
        # One stream for the life of the sender: a stream a sync strands allocator caches (vllm#52950).
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._gathering: deque[tuple[int, torch.cuda.Event]] = deque()

    @property
    def num_slots(self) -> int:
        """Buckets that can be complete before the worker has read any."""
        plan = self._stage.plan
        return plan.num_slots or plan.num_buckets

    @property
    def look_s(self) -> float | None:
        """How often to call `announce` while the host waits for something else; None if the device has nothing to do."""
        return LOOK_S if self._gathering else None

    def meet(self, control: ControlBlock) -> None:
        """After a handshake: the control block of this rank."""
        self._control = control

    def begin(self) -> None:
        """Before the first bucket: what was queued on the current stream, such as the optimizer's step, comes first."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def produce(self, sync: int, bucket: int, timer: StageTimer) -> None:
        """All ranks, collective: fill a bucket; it is announced now or by `announce`."""
        if self._stage.plan.holders:
            self._share(sync, bucket, timer)
        else:
            self._gather(sync, bucket, timer)

    def end(self, sync: int, timer: StageTimer) -> None:
        """After the last bucket: announce what is left; the current stream waits for the device's work."""
        if self._stream is not None:
            with timer.stage("gather", self._stage.plan.num_buckets - 1):
                self.announce(sync, wait=True)
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def forget(self) -> None:
        """After a failure: nothing is announced any more."""
        self._gathering.clear()

    def announce(self, sync: int, *, wait: bool = False) -> None:
        """Tell the worker of every bucket that the device has finished by now; with `wait`, of all of them.

        The host goes on queueing while the device gathers, so this is called wherever the host would otherwise wait.
        """
        assert self._control is not None
        while self._gathering:
            bucket, event = self._gathering[0]
            if wait:
                self._await(event)
            elif not event.query():
                return
            self._gathering.popleft()
            self._control.produce(sync, bucket + 1)

    def wait_closed(self, sync: int, deadline: float) -> None:
        """Wait until this rank's worker itself says that it has closed the update.

        Args:
            sync: Its number.
            deadline: As `time.monotonic` counts.

        Raises:
            PeerError: It failed, or died.
            TimeoutError: It did not say so in time.
            WeightSyncError: Another rank has failed meanwhile; every rank has it.
        """
        self._wait_for_worker(sync, self._stage.plan.num_buckets + 1, "close the update", deadline)

    def _gather(self, sync: int, bucket: int, timer: StageTimer) -> None:
        """All ranks, collective: make full tensors for the worker beside each rank."""
        stage, control = self._stage, self._control
        assert control is not None
        with self._group.together("gather"):
            if bucket >= self.num_slots:
                with timer.stage("wait", bucket):
                    self._wait_for_slot(sync, bucket)
            with timer.stage("load", bucket), on_stream(self._stream):
                stage.gatherer.load(bucket, stage.tensors)
        with timer.stage("gather", bucket), on_stream(self._stream):
            stage.gatherer.gather(bucket)
            if self._verifier is not None:
                self._verifier.digest(bucket)
            if self._stream is None:
                control.produce(sync, bucket + 1)
            else:
                event = self._event(bucket % self.num_slots)
                event.record(self._stream)
                self._gathering.append((bucket, event))
        self.announce(sync)

    def _share(self, sync: int, bucket: int, timer: StageTimer) -> None:
        """All ranks, collective: put this rank's chunks where all workers read them, and gather what can't be read so."""
        stage, group, control = self._stage, self._group, self._control
        assert control is not None
        if bucket >= self.num_slots:
            # Every rank's vote says that its own worker has read the slot, of all ranks.
            with group.together("gather"), timer.stage("wait", bucket):
                self._wait_for_slot(sync, bucket)
        local = stage.gatherer.is_local(bucket)
        with group.together("gather"):
            with timer.stage("load", bucket), on_stream(self._stream):
                stage.gatherer.load(bucket, stage.tensors)
            if local:
                with timer.stage("gather", bucket):
                    self._finish_on_device()
        if not local:
            with group.together("gather"), timer.stage("gather", bucket), on_stream(self._stream):
                stage.gatherer.gather(bucket)
                self._finish_on_device()
        control.produce(sync, bucket + 1)

    def _finish_on_device(self) -> None:
        if self._stream is not None:
            event = self._event(0)
            event.record(self._stream)
            self._await(event)

    def _await(self, event: torch.cuda.Event) -> None:
        """Wait for the device; a collective that a rank has died in never ends there, so look now and then."""
        next_look = time.monotonic() + LOOK_AROUND_S
        while not event.query():
            time.sleep(_DEVICE_POLL_S)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_AROUND_S
                if self._group.others_failed():
                    self._group.vote("gather")

    def _event(self, index: int) -> torch.cuda.Event:
        """The event of a slot; a slot's last one has been announced before it is filled again."""
        while len(self._events) <= index:
            self._events.append(torch.cuda.Event())
        return self._events[index]

    def _wait_for_slot(self, sync: int, bucket: int) -> None:
        deadline = time.monotonic() + self._timeouts.transfer_s
        self._wait_for_worker(
            sync, bucket - self.num_slots + 1, f"free the slot of bucket {bucket}", deadline
        )

    def _wait_for_worker(self, sync: int, count: int, what: str, deadline: float) -> None:
        """Wait for this rank's worker, if it has one, to count so far, looking now and then whether the request has failed."""
        control = self._control
        assert control is not None
        if not control.has_worker:
            self.announce(sync, wait=True)
            return
        next_look = time.monotonic() + LOOK_AROUND_S
        while True:
            self.announce(sync)
            step = LOOK_S if self._gathering else LOOK_AROUND_S
            try:
                control.wait_consumed(sync, count, step)
                return
            except TimeoutError:
                loading = self._loading()
                if loading is not None and loading.done():
                    loading.result()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the worker beside this rank did not {what} of sync {sync} in time (transfer_s="
                        f"{self._timeouts.transfer_s:g}): {control.worker_at()}. Is it stuck, or is the time-out too short?"
                    ) from None
                if time.monotonic() > next_look:
                    next_look = time.monotonic() + LOOK_AROUND_S
                    if self._group.others_failed():
                        # The worker may never have heard of this sync: go where the others are, and fail with them.
                        self._group.vote("gather")
