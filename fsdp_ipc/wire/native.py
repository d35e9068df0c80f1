"""Our own wire: plain JSON, at most one update request a sync, and a control block between each rank and its worker.

The order of one sync:

1) (all ranks) bring plan and memory up to date (`stage`); exchange handles if any changed; from the second sync on
   (sender) posts start meanwhile;
2) (sender) posts start, if it has not, and update from a thread; the workers wait at their control blocks;
3) (all ranks) for each bucket: wait for its slot, load, vote, gather, announce it to the worker. Where workers read from
   several ranks, a slot is free when all of them have read it, and a bucket is announced when all ranks have it;
4) (sender) the update request returns when every worker has loaded everything; vote;
5) (sender) finish, which publishes the version; (all ranks) wait for the worker's own word that it has finished; vote.
   Only now may anything be overwritten or freed.

A sync for which nothing has changed since the last one needs no update request: in 2) every rank offers it to its worker
at the control block, and the workers load it inside of start, if all of them have taken the offer (vote). Then
(sender) finish is posted as soon as every rank has all of its buckets ready (vote), and waits at the server for the
start before it; with a client that can't have two requests out, it follows when start has returned. If a worker has not
taken the offer, all ranks withdraw it, and the update request does the work.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from fsdp_ipc import handles
from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.control import ControlBlock, PeerError
from fsdp_ipc.delivery import HeldExperts
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import IpcHandle, SharedBuffer
from fsdp_ipc.peers import PROBE_BYTES, probe_bytes
from fsdp_ipc.stage import Stage
from fsdp_ipc.stats import StageTimer
from fsdp_ipc.verify import SentVerifier
from fsdp_ipc.wire.base import Timeouts, outcome
from fsdp_ipc.wire.native_buckets import LOOK_AROUND_S, BucketProducer
from fsdp_ipc.wire.native_requests import NativeRequests, plan_json

logger = logging.getLogger(__name__)

PROTOCOL = 3
TOKEN_ENV = "FSDP_IPC_TOKEN"

_HELLO_S = 2.0
"""How long a rank waits for its worker's greeting before it counts as one without: vLLM may have answered for the worker
before it got there (a failed call leaves answers in the queues of tensor-parallel workers, and a later call takes those)."""

_TAKE_S = 1.0
"""How long a rank waits until its worker has taken an offer; where the server is busy for longer, a request is no loss."""

_START_LOOK_S = 0.001
"""How often it looks meanwhile whether the start has ended without."""


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
        self._wanted: HeldExperts | None = None
        self._publishes = publishes
        self._requests = NativeRequests(client if group.is_sender else None)
        requests = self._requests
        # Not a way back to this object: a cycle would keep client and connections until Python's collector comes by.
        self._buckets = BucketProducer(stage, group, device, timeouts, lambda: requests.loading, verifier)

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
        self._close_probe()
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
            hello = control.wait_report(_HELLO_S)
        self._buckets.meet(control)
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
        held: list[dict[str, list[int]] | None] = [
            {} if greeting is None else greeting.get("experts") for greeting in greetings
        ]
        told = self._rank_local_experts and all(experts is not None for experts in held)
        self._wanted = HeldExperts([experts or {} for experts in held]) if told else None
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
        group, stage, requests = self._group, self._stage, self._requests
        with timer.stage("prepare"):
            self.connect()
            # Where the last sync went well, the server opens this one while the ranks look over their weights.
            early = bool(self._known_plan)
            if early:
                requests.start(None)
            try:
                agree = (f"version {version!r}", f"sync {sync}")
                changed = stage.refresh(self._wanted, agree, self._reads)
                if self._verifier is not None:
                    self._verifier.prepare(stage, sync)
                offered = early and not changed
                if early:
                    self._offer(sync, offered)
                if changed:
                    gathered = group.gather_objects([h.to_json() for h in stage.handles], "handles")
                    keys = group.gather_objects(self._key, "handles")
                    self._handles = dict(zip(keys, gathered, strict=True))
            except BaseException:
                if early:
                    outcome(requests.started, self._timeouts.request_s)  # `recover` closes it again
                raise
        if not early:
            requests.start(self._session)
        if not offered:
            self._post(sync, changed)
        try:
            inside = self._produce(sync, timer, offered)
            failed, same = self._verifier.publish(sync) if self._verifier is not None else (None, [])
            if inside:
                # A finish closes the update for good, so first all ranks must have everything ready.
                group.vote("gather", failed, same=same)
                failed, same = None, []
                if requests.overlapping:
                    self._finish(version)
            with timer.stage("request"):
                group.vote(
                    "update", failed or outcome(requests.loading, self._timeouts.transfer_s), same=same
                )
            self._known_plan = stage.plan.digest
            with timer.stage("finish"):
                if requests.finished is None:
                    self._finish(version)
                # The barrier after which references may go: every worker has reported that it is done.
                group.vote("finish", self._closed(sync))
        except BaseException as caught:  # noqa: BLE001  raised again below
            # First the other ranks: their workers hold the request up for which `_fail` waits.
            error = group.tell("gather", caught)
            self._fail(sync, error)
            raise error from error.__cause__
        with timer.stage("finish"):
            stage.release_unpacked()
        assert self._control is not None
        report = self._control.read_report()
        return report if self._verifier is None else self._verifier.told(report)

    def recover(self, reason: str) -> None:
        """Sender: close the half-open update on the server; all ranks: start anew with the next handshake."""
        self._connected = False
        # A worker that did not answer may still read this memory: it is never written again.
        self._stage.close()
        self._close_probe()
        self._requests.recover(self._session, reason)

    def close(self) -> None:
        """This rank: end the threads, unlink the control block."""
        self._requests.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._verifier is not None:
            self._verifier.close()
        self._close_probe()
        self._connected = False

    def _close_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _offer(self, sync: int, offered: bool) -> None:
        """This rank: tell the worker, which may be waiting in its start, whether this sync goes like the last one."""
        assert self._control is not None
        if offered:
            self._control.offer(sync)
        else:
            self._control.withdraw(sync)

    def _finish(self, version: str | None) -> None:
        self._requests.finish(version if self._publishes else None)

    def _post(self, sync: int, changed: bool) -> None:
        """Sender: the update request, with whatever the workers do not know yet."""
        if not self._group.is_sender:
            return
        plan, stage = self._stage.plan, self._stage
        new_plan = plan.digest != self._known_plan
        payload = {
            "session": self._session,
            "sync": sync,
            "plan_digest": plan.digest,
            "plan": plan_json(plan, list(self._handles)) if new_plan else None,
            "epoch": stage.epoch,
            "allocations": self._handles if changed or new_plan else None,
        }
        if self._verifier is not None:
            payload |= self._verifier.fields(changed or new_plan)
        self._requests.update(payload)

    def _begin(self, sync: int, timer: StageTimer, offered: bool) -> bool:
        """All ranks, collective: wait until the workers have begun.

        Returns:
            Whether all of them load what was offered, so that there is no update request.
        """
        assert self._control is not None
        with timer.stage("start"):
            if offered:
                taken, error = True, None
                try:
                    taken = self._taken(sync)
                except Exception as caught:  # noqa: BLE001  told in the vote
                    error = caught
                self._requests.may_be_open()  # whatever the other workers say
                if not self._group.vote("start", error, flag=not taken):
                    self._control.confirm(sync)
                    return True
                self._control.withdraw(sync)
                self._post(sync, changed=False)
            self._group.vote("start", outcome(self._requests.started, self._timeouts.transfer_s))
        return False

    def _taken(self, sync: int) -> bool:
        """This rank: whether its worker, if it has one, has taken the offer."""
        assert self._control is not None
        started = self._requests.started
        deadline = time.monotonic() + _TAKE_S
        next_look = time.monotonic() + LOOK_AROUND_S
        while True:
            ended = started is not None and started.done()
            taken: bool | None = True
            has_worker = self._control.has_worker
            if has_worker:
                self._buckets.announce(sync)
                taken = self._control.wait_taken(sync, self._buckets.look_s or _START_LOOK_S)
            if started is not None and ended:
                started.result()
                return bool(taken) and not has_worker
            if taken is not None:
                return taken
            now = time.monotonic()
            if now > deadline:
                return False
            if now > next_look:
                next_look = now + LOOK_AROUND_S
                if self._group.others_failed():
                    return False  # the vote tells

    def _produce(self, sync: int, timer: StageTimer, offered: bool) -> bool:
        """All ranks, collective: gather bucket after bucket, announcing each to this rank's worker.

        Returns:
            Whether the workers load them without an update request.
        """
        buckets = self._buckets
        begun = inside = False
        if offered and not self._stage.plan.num_slots:
            # There is nothing to fill meanwhile.
            begun, inside = True, self._begin(sync, timer, offered)
        buckets.begin()
        for bucket in range(self._stage.plan.num_buckets):
            if bucket >= buckets.num_slots and not begun:
                begun, inside = True, self._begin(sync, timer, offered)
            buckets.produce(sync, bucket, timer)
        if offered and not begun:
            # Not after the device's work: the workers load bucket after bucket meanwhile.
            begun, inside = True, self._begin(sync, timer, offered)
        buckets.end(sync, timer)
        return inside if begun else self._begin(sync, timer, offered)

    def _closed(self, sync: int) -> BaseException | None:
        """This rank: what went wrong with the finish, by the server's answer and by its worker's own word.

        After a failed call vLLM's multiprocess executor takes the answers that other workers left for those of the next
        one, so that a server with tensor parallelism answers before they are done.
        """
        deadline = time.monotonic() + self._timeouts.transfer_s
        error = outcome(self._requests.finished, self._timeouts.transfer_s)
        if error is None:
            try:
                self._buckets.wait_closed(sync, deadline)
            except (PeerError, TimeoutError) as caught:
                return caught
        return error

    def _fail(self, sync: int, error: BaseException) -> None:
        """After a failure: let this rank's worker go, and wait for the requests that are still out."""
        self._buckets.forget()
        if self._control is not None:
            self._control.fail(sync, f"the trainer gave up: {error}"[:4000])
        self._requests.end(self._timeouts.request_s)


def _check_devices(keys: Sequence[str], group: TrainerGroup) -> None:
    for key in keys:
        sharing = [rank for rank, other in enumerate(keys) if other == key]
        if len(sharing) > 1:
            raise ValueError(
                f"{len(sharing)} trainer ranks (group ranks {sharing}, global ranks "
                f"{[group.ranks[r] for r in sharing]}) share GPU {key}: expected one rank a GPU, since a worker could "
                "not tell whose memory to read. Check CUDA_VISIBLE_DEVICES and torch.cuda.set_device"
            )
