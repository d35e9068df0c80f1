"""A worker of the native wire without vLLM: reads every sync's tensors out of the trainer's memory, late if told to.

It goes through the same payload checks, handles and control block as the real engine, so that lifetime, ordering and
failure are those of the real thing; it keeps the bytes that it read instead of loading a model.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.dtypes import dtype_name, view
from fsdp_ipc.handles import OpenedBuffer, open_handle
from fsdp_ipc.vllm_plugin.endpoint import readable
from fsdp_ipc.vllm_plugin.payload import AbortInfo, InitInfo, UpdateInfo, parse_update
from fsdp_ipc.vllm_plugin.payload_plan import Plan, TensorRow, check_bounds


class NativeWorker:
    """Worker `index` behind `tests.fake_server.FakeServer(backend="fsdp_ipc", workers=[...])`.

    Args:
        index: Which endpoint it takes.
        delay_s: Seconds between being told of a bucket and reading it.
        fail_at: Bucket before which it raises, or None.
        experts: Expert map that it reports in its greeting.
        late: In unpacked mode, read only at finish.
        peers: Reads other ranks' shards where they lie, as a worker does whose GPU reaches the others'.
        offer_s: How long a start waits for an offer, as the engine's does; None: it takes none.
    """

    def __init__(
        self,
        index: int,
        *,
        delay_s: float = 0.0,
        fail_at: int | None = None,
        experts: dict[str, list[int]] | None = None,
        late: bool = False,
        peers: bool = False,
        offer_s: float | None = 1.0,
    ) -> None:
        self.peers = peers
        self.index, self.delay_s, self.fail_at, self.experts, self.late = (
            index,
            delay_s,
            fail_at,
            experts,
            late,
        )
        self.offer_s = offer_s
        self.weights: dict[str, torch.Tensor] = {}
        self.syncs: list[int] = []
        self.taken: list[int] = []
        self.num_opened = self.num_closed = 0
        self._control: ControlBlock | None = None
        self._session: InitInfo | None = None
        self._plans: dict[str, Plan] = {}
        self._buffers: dict[tuple[str, int], OpenedBuffer] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._released = False
        self._sync = 0
        self._last: UpdateInfo | None = None
        self._repeatable: UpdateInfo | None = None

    def init(self, init_info: dict[str, Any]) -> None:
        self.close()
        self._sync, self._last = 0, None
        self._session = InitInfo.from_json(init_info)
        endpoints = self._session.endpoints
        self._endpoint = endpoints[self.index % len(endpoints)]
        self._control = ControlBlock.open(self._endpoint.control)
        reads, unread = readable(endpoints, torch.device("cpu")) if self.peers else ([], {})
        hello = {"kind": "hello", "worker_index": self.index, "experts": self.experts}
        self._control.write_report({**hello, "reads": reads, "unread": unread})

    def start(self) -> None:
        if self._session is None:
            raise ValueError("no session: init first")
        control, sync, last = self._control, self._sync + 1, self._last
        if control is None:
            return
        if last is None or self.offer_s is None or not control.wait_offered(sync, self.offer_s):
            control.decline(sync)
            return
        try:
            control.take(sync)
            if control.wait_confirmed(sync, 60.0):
                self.taken.append(sync)
                self._receive(replace(last, sync=sync), control)
        except Exception as error:
            control.fail(sync, f"{type(error).__name__}: {error}")
            raise

    def update(self, update_info: dict[str, Any]) -> None:
        info = parse_update(update_info)
        assert self._session is not None and self._control is not None
        if info.session != self._session.session:
            raise ValueError(f"unknown session {info.session}")
        if isinstance(info, AbortInfo):
            raise RuntimeError(f"aborted: {info.abort}")
        try:
            self._receive(info, self._control)
        except Exception as error:
            self._control.fail(info.sync, f"{type(error).__name__}: {error}")
            raise

    def _receive(self, info: Any, control: ControlBlock) -> None:
        self._sync, self._last, self._repeatable = info.sync, None, None
        if info.plan is not None:
            self._plans[info.plan_digest] = info.plan
        plan = self._plans.get(info.plan_digest)
        if plan is None:
            raise ValueError(f"unknown plan {info.plan_digest}")
        if info.allocations is not None:
            self._close_buffers()
            for device, handles in info.allocations.items():
                if device == self._endpoint.device or plan.holders:
                    for number, handle in enumerate(handles):
                        self._buffers[device, number] = open_handle(handle, torch.device("cpu"))
            self.num_opened += len(self._buffers)
        buckets = plan.buckets_for(self._endpoint.device)
        sizes: dict[str, list[int]] = {}
        for (device, _), buffer in self._buffers.items():
            sizes.setdefault(device, []).append(buffer.bytes.numel())
        check_bounds(buckets, sizes, self._endpoint.device)
        self._pending = {}
        for bucket, rows in enumerate(buckets):
            if self.fail_at == bucket:
                raise RuntimeError(f"worker {self.index} breaks at bucket {bucket}")
            self.before_bucket(bucket)
            control.wait_produced(info.sync, bucket + 1, 60.0)
            time.sleep(self.delay_s)
            for row in rows:
                seen = self._seen(row)
                self._pending[row.name] = seen if self.late and not plan.packed else seen.clone()
            if plan.packed and rows:
                # What other workers read, too, is not this one's to ruin.
                own = {r.allocation for r in rows} - {r.allocation for r in rows if r.shards >= 0}
                self.after_bucket([self._buffers[self._endpoint.device, index].bytes for index in own])
            control.consume(info.sync, bucket + 1)
        self.sync, self._released, self._num_buckets = info.sync, not plan.packed, len(buckets)
        if plan.packed:
            digests = None if info.digests is None else {}
            self._repeatable = replace(info, plan=None, allocations=None, digests=digests)

    def _seen(self, row: TensorRow) -> torch.Tensor:
        held = dtype_name(row.held)
        if row.shards < 0:
            seen = view(
                self._buffers[self._endpoint.device, row.allocation].bytes, row.offset, held, row.shape
            )
        else:
            parts = [
                self._buffers[part.device, part.allocation].bytes[part.offset : part.offset + part.nbytes]
                for part in row.parts
            ]
            seen = view(torch.cat(parts), 0, held, row.shape)
        return seen if row.cast_from is None else seen.to(row.dtype)

    def before_bucket(self, bucket: int) -> None:
        """Called before a bucket is waited for."""

    def after_bucket(self, memory: list[torch.Tensor]) -> None:
        """Called with the slots of a packed bucket that was read, before the trainer hears that they are free."""

    def finish(self) -> None:
        time.sleep(self.delay_s if self.late else 0.0)
        self.weights = {name: seen.clone() for name, seen in self._pending.items()}
        self._pending = {}
        if self._released:
            self._close_buffers()
        self.syncs.append(self.sync)
        self._last, self._repeatable = self._repeatable, None
        assert self._control is not None
        self._control.write_report({"kind": "sync", "sync": self.sync, "num_tensors": len(self.weights)})
        self.say_closed()

    def say_closed(self) -> None:
        """Tell the trainer that all is done."""
        assert self._control is not None
        self._control.consume(self.sync, self._num_buckets + 1)

    def close(self) -> None:
        self._close_buffers()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _close_buffers(self) -> None:
        self.num_closed += len(self._buffers)
        self._pending = {}
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}
