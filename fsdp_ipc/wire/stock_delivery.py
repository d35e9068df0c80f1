"""The stock `ipc` backend of vLLM: one request a chunk, gathering the next chunk while the request is out.

The order of one sync:

1) (all ranks) bring plan and memory up to date; (sender) start;
2) (all ranks) for each chunk: learn that the request which read its slot last is answered, load, vote, gather,
   export, exchange handles; (sender) post the chunk from a thread;
3) (sender) finish, after every request is answered; vote. Only now may anything be overwritten or freed.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fsdp_ipc.clients.base import WeightSyncClient, refuse_asleep
from fsdp_ipc.cuda_ipc import collect
from fsdp_ipc.delivery import ExpertPlacement
from fsdp_ipc.dtypes import dtype_from_name
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import stock_rebuild_args
from fsdp_ipc.metadata import ParamMeta
from fsdp_ipc.rows import TensorRow
from fsdp_ipc.stage import Stage
from fsdp_ipc.stats import StageTimer
from fsdp_ipc.wire.base import Timeouts, on_stream, outcome, quietly
from fsdp_ipc.wire.stock import RebuildArgs, StockWire, merge_handles
from fsdp_ipc.wire.stock_experts import PlacementStrategy, stock_placement
from fsdp_ipc.wire.stock_verify import ReplicaCheck

logger = logging.getLogger(__name__)


class StockDelivery:
    """The backend `ipc` of an unchanged vLLM, in the dialect of its release.

    Args:
        stage: Plan and memory of the sender; its limits must ask for `back_to_back` chunks if packed.
        client: Used on the sender rank only.
        group: The trainer ranks.
        device: A CUDA device.
        key: Device key of this rank, the GPU's UUID.
        wire: Dialect and payloads.
        timeouts: See `Timeouts`.
        expert_placement: How the server spreads experts over its workers, if each shall get its own only.
    """

    backend = "ipc"

    def __init__(
        self,
        stage: Stage,
        client: WeightSyncClient | None,
        group: TrainerGroup,
        device: torch.device,
        key: str,
        wire: StockWire,
        timeouts: Timeouts,
        *,
        expert_placement: PlacementStrategy | None = None,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._replicas = replicas
        self._expert_placement = expert_placement
        self._placement: ExpertPlacement | None = None
        self._stage, self._client, self._group, self._key = stage, client, group, key
        self._wire, self._timeouts = wire, timeouts
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="fsdp_ipc") if group.is_sender else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._connected = False
        self._in_update = False

    def connect(self) -> None:
        """All ranks, collective: the handshake, which carries the `packed` flag where the release wants it there."""
        if self._connected:
            return
        keys = self._group.gather_objects(self._key, "connect")
        with self._group.together("connect"):
            merge_handles([{key: ()} for key in keys])
            if self._client is not None and self._group.is_sender:
                self._placement = stock_placement(
                    self._expert_placement, self._wire.dialect, self._client, self._group.size
                )
                self._client.init_weight_transfer_engine(self._wire.init_info())
        if self._expert_placement is not None:
            self._placement = self._group.broadcast_object(self._placement, "connect")
        self._connected = True

    def deliver(self, version: str | None, sync: int, timer: StageTimer) -> dict[str, Any] | None:
        """All ranks, collective: one sync. See the module's text.

        Raises:
            WeightSyncError: On every rank.
        """
        group, stage = self._group, self._stage
        with timer.stage("prepare"):
            self.connect()
            stage.refresh(self._placement, agree=(f"version {version!r}", f"sync {sync}"))
        with timer.stage("start"):
            self._start()
        requests: list[Future[None]] = []
        try:
            self._send_chunks(timer, requests)
        except BaseException as caught:  # noqa: BLE001  raised again below
            error = group.tell("gather", caught)
            self._drain(requests)
            if isinstance(error, WeightSyncError):
                # Every rank is here, and none may free memory that a request which is still out makes a worker read.
                with contextlib.suppress(WeightSyncError):
                    group.vote("drain")
            raise error from error.__cause__
        with timer.stage("finish"):
            # Its vote is the barrier after which references may go: unpacked tensors are read until finish.
            with group.together("finish"):
                if self._client is not None and group.is_sender:
                    self._finish(self._client, self._wire.weight_version(version))
            stage.release_unpacked()
            collect()
        return None

    def recover(self, reason: str) -> None:
        """Sender: close the half-open update, so that the next start is accepted and finds whole layers.

        An update that raised has closed vLLM's session but left layers half open; only a finish resets those.
        """
        self._connected = False
        if self._in_update and self._client is not None and self._group.is_sender:
            logger.info("closing the failed update on the server: %s", reason)
            self._in_update = False
            if not quietly(lambda client: client.finish_weight_update(), self._client):
                quietly(lambda client: client.start_weight_update(), self._client)
                quietly(lambda client: client.finish_weight_update(), self._client)
        # Last, because the finish above still reads tensors that were sent unpacked.
        self._stage.close()

    def close(self) -> None:
        """This rank: end the thread."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._connected = False

    def _finish(self, client: WeightSyncClient, version: str | None) -> None:
        """Sender: close the update and publish the version; with verification only if all replicas agree."""
        client.finish_weight_update(version if self._replicas is None else None)
        self._in_update = False
        if self._replicas is not None:
            self._replicas.compare()
            if version is not None:
                self._replicas.publish(version)

    def _drain(self, requests: list[Future[None]]) -> None:
        """Sender: take back what has not been sent yet, and wait for what has."""
        for request in reversed(requests):
            request.cancel()
        for request in requests:
            if not request.cancelled():
                outcome(request, self._timeouts.request_s)

    def _start(self) -> None:
        client = self._client
        with self._group.together("start"):
            if client is not None and self._group.is_sender:
                refuse_asleep(client)
                try:
                    client.start_weight_update()
                except Exception as open_error:
                    # Left open by a trainer that was killed; what it half-loaded is overwritten by this sync.
                    if "already active" not in str(open_error):
                        raise
                    quietly(lambda c: c.finish_weight_update(), client)
                    client.start_weight_update()
                self._in_update = True

    def _send_chunks(self, timer: StageTimer, requests: list[Future[None]]) -> None:
        stage, group = self._stage, self._group
        plan = stage.plan
        slots = max(plan.num_slots, 1)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for bucket in range(plan.num_buckets):
            with timer.stage("request", bucket):
                answered = bucket >= slots and bool(requests)
                group.vote(
                    "update",
                    outcome(requests[bucket - slots], self._timeouts.transfer_s) if answered else None,
                )
            with group.together("gather"), timer.stage("load", bucket), on_stream(self._stream):
                stage.gatherer.load(bucket, stage.tensors)
            with timer.stage("gather", bucket), on_stream(self._stream):
                stage.gatherer.gather(bucket)
                if self._stream is not None:
                    # The event that torch records at the first export does not cover later writes.
                    self._stream.synchronize()
            with timer.stage("export", bucket):
                payload = self._payload(bucket)
            if self._threads is not None and self._client is not None:
                requests.append(self._threads.submit(self._client.update_weights, payload))
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        with timer.stage("request"):
            failed = [o for r in requests if (o := outcome(r, self._timeouts.transfer_s)) is not None]
            group.vote("update", failed[0] if failed else None)

    def _payload(self, bucket: int) -> dict[str, Any] | list[dict[str, Any]]:
        """All ranks, collective: the chunk's names, and the handles of every rank by GPU.

        One payload for all workers, or where some tensors are for one worker only, one for each worker: worker i sits
        on the GPU of group rank i, and refuses an entry that has no handle of its own GPU.
        """
        stage, group, plan = self._stage, self._group, self._stage.plan
        rows = self._rows(bucket, group.rank)
        mine: list[RebuildArgs] = []
        with group.together("export"):
            if plan.packed:
                mine = [stock_rebuild_args(stage.memory[bucket % plan.num_slots])]
            else:
                memory = stage.memory
                mine = [stock_rebuild_args(_view(memory[row.allocation], row)) for row in rows]
        everybody = group.gather_objects({self._key: mine}, "handles")
        if not group.is_sender:
            return {}
        if any(plan.local_rows):
            entries = [self._entry(self._rows(bucket, rank), [own]) for rank, own in enumerate(everybody)]
            return self._wire.list_payload(entries, world_size=group.size)
        return self._entry(rows, everybody)

    def _rows(self, bucket: int, rank: int) -> list[TensorRow]:
        """What the worker beside a group rank reads of a bucket, in the order in which it lies there."""
        plan = self._stage.plan
        rows = [r for r in (*plan.rows, *plan.local_rows[rank]) if r.bucket == bucket]
        return sorted(rows, key=lambda row: (row.allocation, row.offset))

    def _entry(self, rows: list[TensorRow], exports: list[dict[str, list[RebuildArgs]]]) -> dict[str, Any]:
        packed = self._stage.plan.packed
        merged = [
            merge_handles([{key: args[n] for key, args in rank.items()} for rank in exports])
            for n in range(1 if packed else len(rows))
        ]
        metas = [ParamMeta(row.name, dtype_from_name(row.dtype), row.shape) for row in rows]
        return self._wire.update_info(metas, merged[0] if packed else merged)


def _view(memory: torch.Tensor, row: TensorRow) -> torch.Tensor:
    dtype = dtype_from_name(row.dtype)
    numel = 1
    for size in row.shape:
        numel *= size
    return memory[row.offset : row.offset + numel * dtype.itemsize].view(dtype).view(row.shape)
