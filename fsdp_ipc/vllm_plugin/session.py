"""What a worker keeps from one handshake to the next: the plans that it knows, and the trainer's memory that is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.handles import IpcHandle, OpenedBuffer, open_handle
from fsdp_ipc.vllm_plugin.endpoint import Claim
from fsdp_ipc.vllm_plugin.loader import NamedTensors
from fsdp_ipc.vllm_plugin.payload import UpdateInfo
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow, check_bounds
from fsdp_ipc.vllm_plugin.scattered import Scattered


@dataclass
class KnownPlan:
    """A plan that passed every check, and its views of the allocations that are open now."""

    buckets: list[list[TensorRow]]
    packed: bool
    casts: dict[str, torch.dtype]
    examined: bool = False
    views: list[NamedTensors] | None = None


@dataclass
class Session:
    """What lives from one handshake to the next."""

    session: str
    claim: Claim
    control: ControlBlock
    timeout_s: float
    plans: dict[str, KnownPlan] = field(default_factory=dict)
    epoch: int | None = None
    handles: Mapping[str, tuple[IpcHandle, ...]] = field(default_factory=dict)
    """By device key, the allocations of the trainer rank there."""
    buffers: dict[tuple[str, int], OpenedBuffer] = field(default_factory=dict)
    """Those that are open, by device key and number."""
    last_sync: int = 0
    repeatable: UpdateInfo | None = None
    """What the last sync was, if it went well and the next one can go like it."""

    @property
    def device(self) -> str:
        """The key under which this worker's memory is sent."""
        return self.claim.endpoint.device

    def close_buffers(self) -> None:
        """Unmap the trainer's memory."""
        for plan in self.plans.values():
            plan.views = None
        self.repeatable = None
        buffers, self.buffers, self.handles, self.epoch = self.buffers, {}, {}, None
        for buffer in buffers.values():
            buffer.close()

    def views(self, info: UpdateInfo, plan: KnownPlan, device: torch.device) -> list[NamedTensors]:
        """A plan's tensors by bucket, in memory that is opened now where it was not; no data is moved.

        Raises:
            ValueError: Memory is missing, of another device or too small.
        """
        if info.allocations is None and self.epoch != info.epoch:
            raise ValueError(
                f"fsdp_ipc: allocations of epoch {info.epoch} are not open here (open: {self.epoch}); "
                "send them along."
            )
        if info.allocations is None and plan.views is not None:
            return plan.views
        handles = self.handles if info.allocations is None else info.allocations
        _check_handles(handles, self.device, device.type)
        sizes = {key: [handle.nbytes for handle in given] for key, given in handles.items()}
        used = check_bounds(plan.buckets, sizes, self.device)
        # The sender repeats them with each new plan. An export may be opened and released once only.
        if (info.epoch, handles) != (self.epoch, self.handles):
            self.close_buffers()
            self.epoch, self.handles = info.epoch, handles
        if plan.views is None:
            for where, number in sorted(used - self.buffers.keys()):
                handle = self.handles[where][number]
                peer = where != self.device
                self.buffers[where, number] = open_handle(handle, device, peer=peer)
            plan.views = [[(row.name, self._view(row, device)) for row in rows] for rows in plan.buckets]
        return plan.views

    def _view(self, row: TensorRow, device: torch.device) -> torch.Tensor | Scattered:
        if row.shards < 0:
            memory = self.buffers[self.device, row.allocation].bytes
            return memory[row.offset : row.offset + row.nbytes].view(row.held).view(row.shape)
        parts = []
        for part in row.parts:
            memory = self.buffers[part.device, part.allocation].bytes
            parts.append((memory[part.offset : part.offset + part.nbytes].view(row.held), part.distance))
        return Scattered(row.shape, row.held, device, tuple(parts))


def _check_handles(allocations: Mapping[str, tuple[IpcHandle, ...]], device: str, device_type: str) -> None:
    if device not in allocations:
        raise ValueError(f"fsdp_ipc: no allocation for device {device}. Sent for: {sorted(allocations)}.")
    wanted = "cuda" if device_type == "cuda" else "shm"
    for handle in chain.from_iterable(allocations.values()):
        if handle.kind != wanted:
            raise ValueError(
                f"fsdp_ipc: this worker runs on {device_type} and needs {wanted!r} handles, got {handle.kind!r}."
            )
