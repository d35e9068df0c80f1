"""The plan of the moment, bound to memory: made again when the stream, the memory or the receivers change.

All of it happens before the server hears of a sync, so what can't work is refused with nothing half-done.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_ipc import handles
from fsdp_ipc.cuda_ipc import expandable_segments_requested
from fsdp_ipc.delivery import ExpertPlacement, HeldExperts
from fsdp_ipc.dtypes import num_bytes
from fsdp_ipc.full import Held
from fsdp_ipc.gather import Gatherer
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import IpcHandle, SharedBuffer
from fsdp_ipc.layout import LocalTensors, local_of
from fsdp_ipc.metadata import StreamItem, TensorSpec
from fsdp_ipc.plan import PlanLimits, TransferPlan, build_plan
from fsdp_ipc.replicas import check_replicas
from fsdp_ipc.rows import peer_bytes
from fsdp_ipc.source import WeightSource, read
from fsdp_ipc.staging import StagingBuffer
from fsdp_ipc.union import place_tensors, unite

logger = logging.getLogger(__name__)


class Stage:
    """Plan, staging memory and gatherer of one sender, kept from sync to sync.

    Args:
        source: Where the weights come from.
        group: The trainer ranks.
        device: Device of the staging memory.
        key: Device key of this rank (see `handles.device_key`).
        limits: What the wire and the settings ask of a plan.
        export_parameters: Whether memory of the model's own that needs no cast is exported as it is: what is whole on
            every rank, and shards as far as the workers can read them where they lie.
        cast_on_arrival: Whether memory that needs a cast is exported, too, and the worker casts.
        keep_together: Sets of checkpoint names that must lie in one bucket.
    """

    def __init__(
        self,
        source: WeightSource,
        group: TrainerGroup,
        device: torch.device,
        key: str,
        limits: PlanLimits,
        *,
        export_parameters: bool,
        cast_on_arrival: bool = False,
        keep_together: Sequence[Collection[str]] = (),
    ) -> None:
        self._keep_together = tuple(frozenset(names) for names in keep_together)
        self._source, self._group, self._device, self._key, self._limits = source, group, device, key, limits
        self._export_parameters = export_parameters and not (
            device.type == "cuda" and expandable_segments_requested()
        )
        self._cast_on_arrival = cast_on_arrival
        self._own_items: tuple[StreamItem, ...] = ()
        self._items: tuple[StreamItem, ...] = ()
        self._wanted: HeldExperts | ExpertPlacement | None = None
        self._reads: Sequence[Collection[int]] | None = None
        self._slots: StagingBuffer | None = None
        self._singles: list[SharedBuffer] = []
        self._resident_pointers: tuple[int, ...] = ()
        self._at: list[int] = []
        self._seen: list[Any] = []
        self._locals = LocalTensors(())
        self._gatherer: Gatherer | None = None
        self._tensors: Sequence[Held] = ()
        self._plan: TransferPlan | None = None
        self.handles: list[IpcHandle] = []
        self._memory: list[torch.Tensor] = []
        self.epoch = 0
        self.num_tensors = self.wire_bytes = self.resident_bytes = self.peer_bytes = 0

    @property
    def plan(self) -> TransferPlan:
        """The plan of the moment."""
        assert self._plan is not None
        return self._plan

    @property
    def gatherer(self) -> Gatherer:
        """The plan bound to memory."""
        assert self._gatherer is not None
        return self._gatherer

    @property
    def memory(self) -> list[torch.Tensor]:
        """All that is exported, uint8 by allocation; made anew, since parameters are not to be kept alive from here."""
        return [*self._memory, *(local_of(tensor).view(-1).view(torch.uint8) for tensor in self._seen)]

    @property
    def tensors(self) -> Sequence[Held]:
        """This rank's tensors of this sync, in the order that the gatherer wants."""
        return self._tensors

    def refresh(
        self,
        wanted: HeldExperts | ExpertPlacement | None,
        agree: Sequence[object],
        reads: Sequence[Collection[int]] | None = None,
    ) -> bool:
        """All ranks, collective: bring plan and memory up to date before a sync.

        1) (all ranks) read the source; 2) (all ranks) vote, and go on only if something changed anywhere;
        3) (all ranks) plan, and agree on its digest; 4) (all ranks) allocate and export.

        Args:
            wanted: The experts that each worker holds, or how the server spreads them; None for delivery to all (see
                `build_plan`).
            agree: What must be equal on all ranks to begin with (the version, the number of the sync).
            reads: By group rank, the group ranks whose memory the worker beside it can read (see `build_plan`); the same
                on every rank.

        Returns:
            Whether handles changed on any rank, so that they must be exchanged.

        Raises:
            WeightSyncError: A rank could not do its part, or the ranks disagree.
        """
        error: Exception | None = None
        changed = moved = False
        items, tensors = self._own_items, self._tensors
        try:
            items, tensors = read(self._source)
            changed = items is not self._own_items or self._plan is None
            changed = changed or wanted != self._wanted or reads != self._reads
            if not changed:
                self._tensors = place_tensors(self._items, self._own_items, tensors)
                moved = self._pointers() != self._resident_pointers
                changed = moved and not all(map(_is_exportable, map(local_of, self._seen)))
        except Exception as caught:  # noqa: BLE001  the others must hear of it before anybody raises
            error = caught
        news = self._group.vote("metadata", error, same=agree, flag=changed or moved)
        if not news and self._limits.packed:
            return False
        if news and self._group.vote("metadata", flag=changed):
            self._replan(items, tensors, wanted, reads)
        self._allocate()
        self.epoch += 1
        return True

    def release_unpacked(self) -> None:
        """After the barrier of a sync: give the single allocations of unpacked mode back."""
        if self._singles:
            self._gatherer, self._memory = None, []
        singles, self._singles = self._singles, []
        for buffer in singles:
            try:
                buffer.close()
            except Exception as error:  # noqa: BLE001  all ranks have voted: the weights have arrived whatever happens here
                logger.warning("could not give memory of the sync back: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """This rank: give all memory back. Idempotent."""
        self.release_unpacked()
        if self._slots is not None:
            self._slots.close()
        self._slots, self._gatherer, self._plan = None, None, None
        self._seen, self._locals = [], LocalTensors(())
        self._tensors, self.handles, self._memory = (), [], []

    def _measure(self, plan: TransferPlan, items: Sequence[StreamItem]) -> None:
        """What a sync moves, counted once for a plan."""
        rank = self._group.rank
        rows = (*plan.rows, *plan.local_rows[rank])
        self.num_tensors = len(rows)
        self.wire_bytes = sum(num_bytes(row.dtype, row.shape) for row in rows)
        self.resident_bytes = sum(items[i].inputs[0].nbytes for i in plan.resident)
        sizes = [num_bytes(row.held or row.dtype, row.shape) for row in rows]
        self.peer_bytes = peer_bytes(rows, plan.holders, rank, sizes)

    def _replan(
        self,
        items: tuple[StreamItem, ...],
        tensors: Sequence[Held],
        wanted: HeldExperts | ExpertPlacement | None,
        reads: Sequence[Collection[int]] | None,
    ) -> None:
        group = self._group
        with group.together("plan") as agreed:
            united, tensors = unite(items, tensors, group)
            check_replicas(united, tensors, group)
            resident = self._resident(united, tensors)
            readers = wanted.held(united) if isinstance(wanted, ExpertPlacement) else wanted
            plan = build_plan(
                united,
                self._limits,
                group_ranks=group.ranks,
                resident=resident,
                wanted=readers,
                reads=reads,
                atomic=self._keep_together,
            )
            agreed.append(plan.digest)
            self._measure(plan, united)
        self._tensors = tensors
        self._own_items, self._items, self._plan = items, united, plan
        self._wanted, self._reads = wanted, reads
        self._at = [united[i].index for i in plan.resident]

    def _resident(self, items: Sequence[StreamItem], tensors: Sequence[Held]) -> frozenset[int]:
        """Items whose memory every rank can export as it is: contiguous, on the device, in a dtype that will do."""
        if not self._export_parameters:
            return frozenset()
        mine = {
            i
            for i, item in enumerate(items)
            if item.is_direct
            and item.inputs[0].layout.kind in ("whole", "shard")
            and _exportable(tensors[item.index], item, self._device, cast=self._cast_on_arrival)
        }
        everybody = self._group.gather_objects(mine, "plan")
        return frozenset(set.intersection(*everybody))

    def _pointers(self) -> tuple[int, ...]:
        """Where the exported tensors lie; 0 for one that no longer lies in one piece."""
        if self._plan is None:
            return ()
        # Thousands of tensors at every sync: no loop of Python's while they are the same objects.
        held: list[Any] = list(map(self._tensors.__getitem__, self._at))
        if len(held) != len(self._seen) or not all(map(operator.is_, held, self._seen)):
            self._seen, self._locals = held, LocalTensors(held)
        own = self._locals.now()
        whole = map(torch.Tensor.is_contiguous, own)
        return tuple(map(operator.mul, map(torch.Tensor.data_ptr, own), whole))

    def _allocate(self) -> None:
        plan = self.plan
        with self._group.together("allocation"):
            self.release_unpacked()
            self._reuse_or_allocate_slots()
            for nbytes in plan.allocation_bytes:
                self._singles.append(handles.allocate(max(nbytes, 1), self._device, key=self._key))
        with self._group.together("export"):
            slots = self._slots
            memory = [slots.slot(k) for k in range(plan.num_slots)] if slots else []
            memory += [buffer.bytes for buffer in self._singles]
            self._gatherer = Gatherer(plan, self._items, self._tensors, memory, self._group.broadcast)
            self.handles = list(slots.handles[: plan.num_slots]) if slots else []
            self.handles += [buffer.handle for buffer in self._singles]
            pointers = self._pointers()
            self.handles += [handles.export(local_of(tensor), key=self._key) for tensor in self._seen]
            self._memory = memory
            self._resident_pointers = pointers

    def _reuse_or_allocate_slots(self) -> None:
        plan, slots = self.plan, self._slots
        if slots is not None and slots.num_slots >= plan.num_slots and slots.slot_bytes == plan.slot_bytes:
            return
        if slots is not None:
            self._gatherer = None
            slots.close()
            self._slots = None
        if plan.num_slots:
            self._slots = StagingBuffer(
                num_slots=plan.num_slots, slot_bytes=plan.slot_bytes, device=self._device, key=self._key
            )


def _is_exportable(local: torch.Tensor) -> bool:
    return local.is_contiguous() and handles.is_exportable(local)


_CAST_ON_ARRIVAL = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}
"""Held and wire dtype: what the worker's kernel rounds as torch does."""


def _exportable(held: Held, item: StreamItem, device: torch.device, *, cast: bool) -> bool:
    if not isinstance(held, torch.Tensor):
        return False
    local = local_of(held)
    spec = item.inputs[0]
    return (
        local.device == device
        and local.dtype == spec.dtype
        and (local.dtype == item.wire_dtype or (cast and (local.dtype, item.wire_dtype) in _CAST_ON_ARRIVAL))
        and local.numel() > 0
        and tuple(local.shape) == _held_shape(spec, held)
        and _is_exportable(local)
    )


def _held_shape(spec: TensorSpec, held: torch.Tensor) -> tuple[int, ...]:
    """What this rank's piece looks like if it is a plain chunk of dim 0, or all of it."""
    if spec.layout.kind != "shard" or not isinstance(held, DTensor):
        return spec.shape
    return (spec.rows_in_chunk(held.device_mesh.get_local_rank(spec.layout.axis)), *spec.shape[1:])
