"""Our own wire: plain JSON, one update request a sync, and a control block between each rank and its worker.

The order of one sync:

1) (all ranks) bring plan and memory up to date (`stage`); exchange handles if any changed; from the second sync on
   (sender) posts start meanwhile;
2) (sender) posts start, if it has not, and update from a thread; the workers wait at their control blocks;
3) (all ranks) for each bucket: wait for its slot, load, vote, gather, announce it to the worker. Where workers read from
   several ranks, a slot is free when all of them have read it, and a bucket is announced when all ranks have it;
4) (sender) the update request returns when every worker has loaded everything; vote;
5) (sender) finish, which publishes the version; vote. Only now may anything be overwritten or freed.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fsdp_ipc import handles
from fsdp_ipc.clients.base import WeightSyncClient, refuse_asleep
from fsdp_ipc.control import ControlBlock
from fsdp_ipc.delivery import HeldExperts
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import IpcHandle, SharedBuffer
from fsdp_ipc.peers import PROBE_BYTES, probe_bytes
from fsdp_ipc.rows import TensorRow
from fsdp_ipc.stage import Stage
from fsdp_ipc.stats import StageTimer
from fsdp_ipc.verify import SentVerifier
from fsdp_ipc.wire.base import Timeouts, on_stream, outcome, quietly

logger = logging.getLogger(__name__)

PROTOCOL = 1
TOKEN_ENV = "FSDP_IPC_TOKEN"

_LOOK_AROUND_S = 0.25
"""How often a rank that waits for its worker looks whether the request or another rank has failed."""

_DEVICE_POLL_S = 2e-5
"""How long a rank that has nothing to do but wait for the device lets other threads run between two looks."""

_LOOK_S = 0.0001
"""How often a rank that waits for its worker looks whether the device has finished the next bucket."""


class NativeDelivery:
    """The backend `fsdp_ipc`: see the module's text for the order of calls.

    Args:
        stage: Plan and memory of the sender.
        client: Used on the sender rank only.
        group: The trainer ranks.
        device: Device of the staging memory.
        key: Device key of this rank.
        timeouts: See `Timeouts`.
        rank_local_experts: Deliver experts rank-locally where the layouts on both sides allow it.
        peer_reads: Let workers read the shards of other ranks where they lie, if every worker can.
        publishes: The server's release publishes a weight version (vLLM 0.27 and later).
        verifier: Digests what is sent, for the workers to compare with what they hold.
    """

    backend = "fsdp_ipc"

    def __init__(
        self,
        stage: Stage,
        client: WeightSyncClient | None,
        group: TrainerGroup,
        device: torch.device,
        key: str,
        timeouts: Timeouts,
        *,
        rank_local_experts: bool = True,
        peer_reads: bool = True,
        publishes: bool = True,
        verifier: SentVerifier | None = None,
    ) -> None:
        self._verifier = verifier
        self._stage, self._client, self._group = stage, client, group
        self._device, self._key = device, key
        self._timeouts, self._rank_local_experts = timeouts, rank_local_experts
        self._peer_reads = peer_reads and group.size > 1
        self._probe: SharedBuffer | None = None
        self._reads: list[frozenset[int]] = [frozenset([rank]) for rank in range(group.size)]
        self._control: ControlBlock | None = None
        self._session = ""
        self._connected = False
        self._known_plan = ""
        self._handles: dict[str, list[dict[str, Any]]] = {}
        self._experts: list[dict[str, list[int]] | None] = [None] * group.size
        self._has_worker = False
        self._publishes = publishes
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="fsdp_ipc") if group.is_sender else None
        # One stream for the life of the sender: a stream a sync strands allocator caches (vllm#52950).
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._gathering: deque[tuple[int, torch.cuda.Event]] = deque()
        self._in_update = False

    def connect(self) -> None:
        """All ranks, collective: give every worker the name of the control block that it shares with a rank."""
        if self._connected:
            return
        group = self._group
        with group.together("connect"):
            if self._control is not None:
                self._control.close()
            self._control = ControlBlock.create()
            endpoint: dict[str, Any] = {"device": self._key, "control": self._control.name}
            if self._peer_reads:
                endpoint["probe"] = self._make_probe(self._control.name).to_json()
        endpoints = group.gather_objects(endpoint, "connect")
        session = group.broadcast_object(secrets.token_hex(16) if group.is_sender else None, "connect")
        with group.together("connect"):
            _check_devices([e["device"] for e in endpoints], group)
            if group.is_sender:
                assert self._client is not None
                self._client.init_weight_transfer_engine(
                    {
                        "protocol": PROTOCOL,
                        "session": session,
                        "token": os.environ.get(TOKEN_ENV),
                        "endpoints": endpoints,
                        "timeout_s": self._timeouts.request_s,
                    }
                )
        assert self._control is not None
        self._meet_workers(self._control)
        self._session, self._connected, self._known_plan = session, True, ""

    def _make_probe(self, name: str) -> IpcHandle:
        """Memory by which each worker sees whether it can read this rank's."""
        if self._probe is None:
            self._probe = handles.allocate(PROBE_BYTES, self._device, key=self._key)
        self._probe.bytes.copy_(probe_bytes(name))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._probe.handle

    def _meet_workers(self, control: ControlBlock) -> None:
        """All ranks, collective: which ranks each worker can read from, and the experts that it says it holds.

        There may be fewer workers than ranks: memory that nobody reads is written again without waiting.
        """
        group = self._group
        with group.together("connect"):
            hello = control.read_report()
        self._has_worker = hello is not None
        greetings = group.gather_objects(hello, "connect")
        alone = [rank for rank, greeting in enumerate(greetings) if greeting is None]
        if len(alone) == group.size:
            cause = (
                "the server took the handshake, but no worker of its has opened any trainer rank's control block, so nobody "
                "would read the weights: does the server have workers, and this release of the plugin?"
            )
            raise WeightSyncError("connect", dict.fromkeys(alone, cause))
        if alone and group.is_sender:
            logger.warning("no vLLM worker reads from trainer ranks %s", alone)
        # A rank that nobody reads from is asked for no experts, which does not hinder the others.
        self._experts = [{} if greeting is None else greeting.get("experts") for greeting in greetings]
        everybody = range(group.size)
        self._reads = [
            frozenset([rank, *(everybody if greeting is None else greeting.get("reads", ()))])
            for rank, greeting in enumerate(greetings)
        ]
        if self._peer_reads and group.is_sender:
            for rank, greeting in enumerate(greetings):
                for peer, why in (greeting or {}).get("unread", {}).items():
                    logger.info("the worker of rank %d can't read rank %s's memory: %s", rank, peer, why)

    def deliver(self, version: str | None, sync: int, timer: StageTimer) -> dict[str, Any] | None:
        """All ranks, collective: one sync. See the module's text.

        Raises:
            WeightSyncError: On every rank.
        """
        group, stage = self._group, self._stage
        with timer.stage("prepare"):
            self.connect()
            # Where the last sync went well, the server opens this one while the ranks look over their weights.
            started = self._start() if self._known_plan else None
            try:
                agree = (f"version {version!r}", f"sync {sync}")
                changed = stage.refresh(self._wanted(), agree, self._reads)
                if changed:
                    gathered = group.gather_objects([h.to_json() for h in stage.handles], "handles")
                    keys = group.gather_objects(self._key, "handles")
                    self._handles = dict(zip(keys, gathered, strict=True))
                if self._verifier is not None:
                    self._verifier.prepare(stage, sync)
            except BaseException:
                outcome(started, self._timeouts.request_s)  # `recover` closes it again
                raise
        started, updated = self._post(sync, changed, started)
        try:
            self._produce(sync, timer, started, updated)
            failed, same = self._verifier.publish(sync) if self._verifier is not None else (None, [])
            with timer.stage("request"):
                group.vote("update", failed or outcome(updated, self._timeouts.transfer_s), same=same)
            self._known_plan = stage.plan.digest
        except BaseException as caught:  # noqa: BLE001  raised again below
            # First the other ranks: their workers hold the request up for which `_fail` waits.
            error = group.tell("gather", caught)
            self._fail(sync, error, updated)
            raise error from error.__cause__
        with timer.stage("finish"):
            # Its vote is the barrier after which references may go: every worker has reported that it is done.
            with group.together("finish"):
                if self._client is not None and group.is_sender:
                    self._client.finish_weight_update(version if self._publishes else None)
                    self._in_update = False
            stage.release_unpacked()
        assert self._control is not None
        report = self._control.read_report()
        return report if self._verifier is None else self._verifier.told(report)

    def recover(self, reason: str) -> None:
        """Sender: close the half-open update on the server; all ranks: start anew with the next handshake."""
        self._connected = False
        # A worker that did not answer may still read this memory: it is never written again.
        self._stage.close()
        if not self._in_update or self._client is None or not self._group.is_sender:
            return
        self._in_update = False
        self._close_update(self._client, reason)

    def _close_update(self, client: WeightSyncClient, reason: str) -> None:
        quietly(lambda c: c.update_weights({"session": self._session, "abort": reason[:2000]}), client)
        quietly(lambda c: c.finish_weight_update(), client)

    def close(self) -> None:
        """This rank: end the thread, unlink the control block."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._verifier is not None:
            self._verifier.close()
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        self._connected = False

    def _wanted(self) -> HeldExperts | None:
        """The experts that each rank's worker holds; None where delivery is not rank-local."""
        if not self._rank_local_experts or any(e is None for e in self._experts):
            return None
        return HeldExperts([e or {} for e in self._experts])

    def _start(self) -> Future[None] | None:
        """Sender: open the update on the server, in the thread of the requests."""
        client = self._client
        if self._threads is None or client is None:
            return None

        def start() -> None:
            refuse_asleep(client)
            try:
                client.start_weight_update()
            except Exception as error:
                # A trainer that was killed in the middle of an update has left it open, and a handshake does not close it.
                if self._known_plan or "already active" not in str(error):
                    raise
                self._close_update(client, "left open by an earlier trainer")
                client.start_weight_update()
            self._in_update = True

        return self._threads.submit(start)

    def _post(
        self, sync: int, changed: bool, begun: Future[None] | None
    ) -> tuple[Future[None] | None, Future[None] | None]:
        client, plan, stage = self._client, self._stage.plan, self._stage
        if self._threads is None or client is None:
            return None, None
        new_plan = plan.digest != self._known_plan
        payload = {
            "session": self._session,
            "sync": sync,
            "plan_digest": plan.digest,
            "plan": _plan_json(self._stage, list(self._handles)) if new_plan else None,
            "epoch": stage.epoch,
            "allocations": self._handles if changed or new_plan else None,
        }
        if self._verifier is not None:
            payload |= self._verifier.fields(changed or new_plan)
        started = begun or self._start()
        assert started is not None

        def update() -> None:
            if started.exception() is None:
                client.update_weights(payload)

        return started, self._threads.submit(update)

    def _produce(
        self, sync: int, timer: StageTimer, started: Future[None] | None, updated: Future[None] | None
    ) -> None:
        """All ranks, collective: gather bucket after bucket, announcing each to this rank's worker."""
        stage, group, control = self._stage, self._group, self._control
        assert control is not None
        plan = stage.plan
        slots = plan.num_slots or plan.num_buckets
        heard = False
        current = torch.cuda.current_stream(self._stream.device) if self._stream is not None else None
        if self._stream is not None and current is not None:
            self._stream.wait_stream(current)
        for bucket in range(plan.num_buckets):
            if bucket >= slots and not heard:
                with timer.stage("start"):
                    group.vote("start", outcome(started, self._timeouts.transfer_s))
                heard = True
            if plan.holders:
                self._share_bucket(sync, bucket, slots, timer, updated)
            else:
                self._gather_bucket(sync, bucket, slots, timer, updated)
        if self._stream is not None and current is not None:
            with timer.stage("gather", plan.num_buckets - 1):
                self._announce(sync, wait=True)
            current.wait_stream(self._stream)
        if not heard:
            with timer.stage("start"):
                group.vote("start", outcome(started, self._timeouts.transfer_s))

    def _gather_bucket(
        self, sync: int, bucket: int, slots: int, timer: StageTimer, updated: Future[None] | None
    ) -> None:
        """All ranks, collective: make full tensors for the worker beside each rank."""
        stage, control = self._stage, self._control
        assert control is not None
        with self._group.together("gather"):
            if bucket >= slots:
                with timer.stage("wait", bucket):
                    self._wait_for_slot(sync, bucket - slots + 1, updated)
            with timer.stage("load", bucket), on_stream(self._stream):
                stage.gatherer.load(bucket, stage.tensors)
        with timer.stage("gather", bucket), on_stream(self._stream):
            stage.gatherer.gather(bucket)
            if self._verifier is not None:
                self._verifier.digest(bucket)
            if self._stream is None:
                control.produce(sync, bucket + 1)
            else:
                event = self._event(bucket % slots)
                event.record(self._stream)
                self._gathering.append((bucket, event))
        self._announce(sync)

    def _share_bucket(
        self, sync: int, bucket: int, slots: int, timer: StageTimer, updated: Future[None] | None
    ) -> None:
        """All ranks, collective: put this rank's chunks where all workers read them, and gather what can't be read so."""
        stage, group, control = self._stage, self._group, self._control
        assert control is not None
        if bucket >= slots:
            # Every rank's vote says that its own worker has read the slot, of all ranks.
            with group.together("gather"), timer.stage("wait", bucket):
                self._wait_for_slot(sync, bucket - slots + 1, updated)
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

    def _announce(self, sync: int, *, wait: bool = False) -> None:
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

    def _await(self, event: torch.cuda.Event) -> None:
        """Wait for the device; a collective that a rank has died in never ends there, so look now and then."""
        next_look = time.monotonic() + _LOOK_AROUND_S
        while not event.query():
            time.sleep(_DEVICE_POLL_S)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_AROUND_S
                if self._group.others_failed():
                    self._group.vote("gather")

    def _event(self, index: int) -> torch.cuda.Event:
        """The event of a slot; a slot's last one has been announced before it is filled again."""
        while len(self._events) <= index:
            self._events.append(torch.cuda.Event())
        return self._events[index]

    def _wait_for_slot(self, sync: int, count: int, updated: Future[None] | None) -> None:
        """Wait for this rank's worker to free a slot, looking now and then whether the request has failed."""
        assert self._control is not None
        if not self._has_worker:
            self._announce(sync, wait=True)
            return
        deadline = time.monotonic() + self._timeouts.transfer_s
        next_look = time.monotonic() + _LOOK_AROUND_S
        while True:
            self._announce(sync)
            step = _LOOK_S if self._gathering else _LOOK_AROUND_S
            try:
                self._control.wait_consumed(sync, count, step)
                return
            except TimeoutError:
                if updated is not None and updated.done():
                    updated.result()
                if time.monotonic() > deadline:
                    raise
                if time.monotonic() > next_look:
                    next_look = time.monotonic() + _LOOK_AROUND_S
                    if self._group.others_failed():
                        # The worker may never have heard of this sync: go where the others are, and fail with them.
                        self._group.vote("gather")

    def _fail(self, sync: int, error: BaseException, updated: Future[None] | None) -> None:
        """After a failure: let this rank's worker go, and wait for the request that is still out."""
        self._gathering.clear()
        if self._control is not None:
            self._control.fail(sync, f"the trainer gave up: {error}"[:4000])
        if updated is not None:
            outcome(updated, self._timeouts.request_s)


def _plan_json(stage: Stage, keys: Sequence[str]) -> dict[str, Any]:
    plan = stage.plan
    return {
        "tensors": [_row_json(row) for row in plan.rows],
        "num_buckets": plan.num_buckets,
        "packed": plan.packed,
        "local": {
            key: [_row_json(r) for r in rows] for key, rows in zip(keys, plan.local_rows, strict=True) if rows
        },
        "holders": [
            {reader: [keys[rank] for rank in ranks] for reader, ranks in zip(keys, table, strict=True)}
            for table in plan.holders
        ],
    }


def _row_json(row: TensorRow) -> list[Any]:
    return list(row) if row.shards >= 0 else list(row[:7]) if row.held else list(row[:6])


def _check_devices(keys: Sequence[str], group: TrainerGroup) -> None:
    for key in keys:
        sharing = [rank for rank, other in enumerate(keys) if other == key]
        if len(sharing) > 1:
            raise ValueError(
                f"{len(sharing)} trainer ranks (group ranks {sharing}, global ranks "
                f"{[group.ranks[r] for r in sharing]}) share GPU {key}: expected one rank a GPU, since a worker could "
                "not tell whose memory to read. Check CUDA_VISIBLE_DEVICES and torch.cuda.set_device"
            )
