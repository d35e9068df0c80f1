"""Sharded pieces to full tensors in the wire dtype, written straight into the staging memory.

What is cheapest for each tensor is decided once, when a plan is bound to its memory:

- whole on this rank, delivered rank-locally, or read by all from every rank: one cast-and-copy, all of a bucket in one `_foreach_copy_`;
- large, dim 0 in chunks: this rank's chunk is cast into its place and the all-gather's output *is* the tensor;
- small, dim 0 in chunks: all of a bucket in one all-gather through a small scratch;
- owned by some ranks: the first owner copies it into its place and broadcasts it, neighbours in one go;
- any other layout: DTensor's own `redistribute`, which knows strided and uneven shards (`full`).

Shards are cast before they travel: half the bytes for fp32 masters. All ranks call these functions in the same
order; each says how many collectives it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_ipc.full import Broadcast, Held, Part, as_bytes, assemble, now, part_of
from fsdp_ipc.group import all_gather
from fsdp_ipc.layout import local_of
from fsdp_ipc.metadata import StreamItem, TensorSpec
from fsdp_ipc.pieces import SMALL_BYTES
from fsdp_ipc.plan import Segment, TransferPlan

_GAP_BYTES = 512
"""Neighbours with less padding than this between them are broadcast together, padding included."""


@dataclass
class _Copy:
    """One of this rank's own tensors, or some rows of it, that goes to its place without a collective."""

    tensor: int
    target: torch.Tensor
    rows: tuple[int, int] | None = None


@dataclass
class _Large:
    """One in-place gather: `out` is the reserved memory in wire dtype, `own` this rank's part of it."""

    tensor: int
    out: torch.Tensor
    own: torch.Tensor
    group: dist.ProcessGroup
    rows: tuple[int, int] | None


@dataclass
class _Small:
    """A tensor that travels in a scratch: `target` is its place, as bytes, `chunk_bytes` what each rank sends at most."""

    tensor: int
    target: torch.Tensor
    dtype: torch.dtype
    chunk_bytes: int


@dataclass
class _Together:
    """Small tensors over one group, which share one all-gather."""

    group: dist.ProcessGroup
    members: list[_Small] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, small: _Small) -> None:
        self.members.append(small)
        self.offsets.append(self.nbytes)
        self.nbytes += -(-small.chunk_bytes // 16) * 16

    def unpack(self, receive: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Targets and sources that bring every rank's pieces, uint8 `[ranks, nbytes]`, to their places."""
        targets, sources = [], []
        for small, at in zip(self.members, self.offsets, strict=True):
            full, rest = divmod(small.target.numel(), small.chunk_bytes)
            end = full * small.chunk_bytes
            targets.append(small.target[:end].view(full, small.chunk_bytes))
            sources.append(receive[:full, at : at + small.chunk_bytes])
            if rest:
                targets.append(small.target[end:])
                sources.append(receive[full, at : at + rest])
        return targets, sources


@dataclass
class _Broadcast:
    """A stretch of an allocation that one rank has and all others receive."""

    src: int
    memory: torch.Tensor
    first: int
    end: int


@dataclass
class _Made:
    """Checkpoint tensors that are made of full training tensors in scratch."""

    item: StreamItem
    targets: list[torch.Tensor]

    @property
    def is_local(self) -> bool:
        return all(spec.layout.kind == "whole" for spec in self.item.inputs)

    def put(self, full: Sequence[torch.Tensor]) -> None:
        for target, source in zip(self.targets, self.item.recipe.apply(full), strict=True):
            target.copy_(source)


@dataclass
class _BucketGather:
    """The work of one bucket; the last four fields live from `load` to `gather`."""

    copies: list[_Copy] = field(default_factory=list)
    large: list[_Large] = field(default_factory=list)
    small: list[_Together] = field(default_factory=list)
    broadcasts: list[_Broadcast] = field(default_factory=list)
    general: list[tuple[int, TensorSpec, torch.Tensor]] = field(default_factory=list)
    made: list[_Made] = field(default_factory=list)
    sends: list[torch.Tensor] = field(default_factory=list)
    packed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    made_parts: list[list[Part]] = field(default_factory=list)

    def add_small(self, small: _Small, group: dist.ProcessGroup) -> None:
        for together in self.small:
            if together.group is group:
                together.add(small)
                return
        self.small.append(_Together(group))
        self.small[-1].add(small)


class _Puts:
    """Copies of one `load`: done together, but at once for what a function makes, whose memory it may use again."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor, held: Held) -> None:
        if not isinstance(held, torch.Tensor):
            target.copy_(source)
        elif source.numel():
            self._targets.append(target)
            self._sources.append(source)

    def run(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class Gatherer:
    """A plan bound to the memory that it fills.

    Args:
        plan: The plan, the same on every rank.
        items: The stream that it was made from.
        tensors: This rank's tensors now, for their meshes; in the order of the inputs of `items`.
        allocations: This rank's memory by allocation index, uint8; those of resident items are not needed.
        broadcast: For tensors that only some ranks own.
    """

    def __init__(
        self,
        plan: TransferPlan,
        items: Sequence[StreamItem],
        tensors: Sequence[Held],
        allocations: Sequence[torch.Tensor],
        broadcast: Broadcast | None = None,
    ) -> None:
        self._broadcast = broadcast
        self._scratch: dict[int, torch.Tensor] = {}
        self._buckets = []
        for bucket in plan.buckets:
            work = _BucketGather()
            last: Segment | None = None
            for segment in bucket.segments:
                item, memory = items[segment.item], allocations[segment.allocation]
                kind = item.inputs[0].layout.kind
                if not segment.in_place:
                    if item.recipe.emits:
                        work.made.append(_made(item, segment, memory))
                elif item.inputs[0].nbytes == 0:
                    pass
                elif kind == "owned":
                    _bind_owned(work, segment, item, memory, last)
                elif kind == "general":
                    target = _typed(memory, segment.offset, item.inputs[0].shape, item.wire_dtype)
                    work.general.append((item.index, item.inputs[0], target))
                elif kind == "whole":
                    _bind_whole(work, segment, item, memory)
                else:
                    _bind_sharded(work, segment, item, now(tensors[item.index]), memory)
                last = segment
            self._buckets.append(work)

    def is_local(self, bucket: int) -> bool:
        """Whether `load` completes the bucket: nothing of it is gathered."""
        work = self._buckets[bucket]
        return not (work.large or work.small or work.broadcasts or work.general) and all(
            made.is_local for made in work.made
        )

    @torch.no_grad()
    def load(self, bucket: int, tensors: Sequence[Held]) -> None:
        """This rank's half of a bucket, on the current stream: casts and copies its own pieces. Not collective.

        What can fail on one rank alone (a copy, an allocation, a merged adapter) fails here, so that the ranks can
        tell each other before `gather` joins them in a collective.

        Args:
            bucket: Index of the bucket.
            tensors: This rank's tensors now, in the order of the inputs of the items.
        """
        work, puts = self._buckets[bucket], _Puts()
        for copy in work.copies:
            held = tensors[copy.tensor]
            puts.add(copy.target, _rows_of(held, copy.rows), held)
        work.sends = []
        for large in work.large:
            held = tensors[large.tensor]
            local = _rows_of(held, large.rows)
            if isinstance(held, torch.Tensor) and _fits(local, large.own):
                work.sends.append(local)
            else:
                # Cast into its own place: the gather is then in place and needs no scratch.
                work.sends.append(large.own)
                puts.add(large.own[: local.shape[0]], local, held)
        work.packed = []
        for index, together in enumerate(work.small):
            send, receive = self._small_scratch(index, together)
            work.packed.append((send, receive))
            for small, offset in zip(together.members, together.offsets, strict=True):
                held = tensors[small.tensor]
                local = _rows_of(held, None)
                puts.add(_typed(send, offset, tuple(local.shape), small.dtype), local, held)
        puts.run()
        work.parts = [part_of(spec, tensors[index], target.device) for index, spec, target in work.general]
        work.made_parts = []
        for made in work.made:
            device = made.targets[0].device
            parts = [
                part_of(spec, tensors[made.item.index + n], device) for n, spec in enumerate(made.item.inputs)
            ]
            if made.is_local:
                made.put([part.local for part in parts])
                parts = []
            work.made_parts.append(parts)

    @torch.no_grad()
    def gather(self, bucket: int) -> None:
        """All ranks, collective, after `load` of the same bucket: make its tensors whole on the current stream.

        One all-gather for each group that small tensors are sharded over, one for each large tensor, one broadcast
        for each stretch of tensors that one rank owns, none for what is whole on this rank.
        """
        work = self._buckets[bucket]
        for large, send in zip(work.large, work.sends, strict=True):
            all_gather(as_bytes(large.out), as_bytes(send), large.group)
        for together, (send, receive) in zip(work.small, work.packed, strict=True):
            all_gather(receive.view(-1), send, together.group)
            torch._foreach_copy_(*together.unpack(receive))
        for stretch in work.broadcasts:
            if self._broadcast is None:
                raise ValueError(
                    f"tensors that only some ranks own (rank {stretch.src} sends) need the trainer group"
                )
            self._broadcast(stretch.memory[stretch.first : stretch.end], stretch.src)
        for (_, spec, target), part in zip(work.general, work.parts, strict=True):
            target.copy_(assemble(spec, part, self._broadcast))
        for made, parts in zip(work.made, work.made_parts, strict=True):
            if parts:
                made.put(
                    [assemble(s, p, self._broadcast) for s, p in zip(made.item.inputs, parts, strict=True)]
                )
        work.sends, work.packed, work.parts, work.made_parts = [], [], [], []

    def _small_scratch(self, index: int, together: _Together) -> tuple[torch.Tensor, torch.Tensor]:
        """Send and receive memory, kept between buckets and syncs, one for each group of a bucket."""
        ranks, device = together.group.size(), together.members[0].target.device
        nbytes = together.nbytes
        need = nbytes * (ranks + 1)
        held = self._scratch.get(index)
        if held is None or held.numel() < need:
            held = self._scratch[index] = torch.empty(need, dtype=torch.uint8, device=device)
        return held[:nbytes], held[nbytes:need].view(ranks, nbytes)


def _made(item: StreamItem, segment: Segment, memory: torch.Tensor) -> _Made:
    places = zip(segment.emit_offsets, item.recipe.emits, strict=True)
    return _Made(item, [_typed(memory, offset, emit.shape, item.wire_dtype) for offset, emit in places])


def _bind_whole(work: _BucketGather, segment: Segment, item: StreamItem, memory: torch.Tensor) -> None:
    shape, rows = item.inputs[0].shape, segment.rows
    if rows is not None:
        shape = (rows[1] - rows[0], *shape[1:])
    work.copies.append(_Copy(item.index, _typed(memory, segment.offset, shape, item.wire_dtype), rows))


def _bind_owned(
    work: _BucketGather, segment: Segment, item: StreamItem, memory: torch.Tensor, last: Segment | None
) -> None:
    spec = item.inputs[0]
    owners, me = spec.layout.ranks, dist.get_rank()
    if me in owners if segment.local else me == owners[0]:
        work.copies.append(
            _Copy(item.index, _typed(memory, segment.offset, spec.shape, spec.wire_dtype), segment.rows)
        )
    if segment.local:
        return
    end = segment.offset + segment.nbytes
    stretch = work.broadcasts[-1] if work.broadcasts else None
    if (
        stretch is not None
        and last is not None
        and last.allocation == segment.allocation
        and last.offset + last.nbytes == stretch.end
        and stretch.src == owners[0]
        and 0 <= segment.offset - stretch.end < _GAP_BYTES
        and stretch.memory is memory
    ):
        stretch.end = end
    else:
        work.broadcasts.append(_Broadcast(owners[0], memory, segment.offset, end))


def _bind_sharded(
    work: _BucketGather, segment: Segment, item: StreamItem, held: torch.Tensor, memory: torch.Tensor
) -> None:
    if not isinstance(held, DTensor):
        raise TypeError(f"{item.recipe.fqn}: planned as a DTensor, is a {type(held).__name__} now")
    spec, axis = item.inputs[0], item.inputs[0].layout.axis
    chunks, rank = spec.layout.num_shards, held.device_mesh.get_local_rank(axis)
    rows = spec.chunk_rows
    first, end = segment.rows or (0, rows)
    if segment.local:
        own = min(end, spec.rows_in_chunk(rank)) - first
        if own > 0:
            target = _typed(memory, segment.offset, (own, *spec.shape[1:]), spec.wire_dtype)
            work.copies.append(_Copy(item.index, target, segment.rows))
        return
    group = held.device_mesh.get_group(axis)
    if segment.rows is None and spec.nbytes <= SMALL_BYTES:
        target = memory[segment.offset : segment.offset + spec.nbytes]
        work.add_small(_Small(item.index, target, spec.wire_dtype, rows * spec.row_bytes), group)
        return
    out = _typed(memory, segment.offset, (chunks, end - first, *spec.shape[1:]), spec.wire_dtype)
    work.large.append(_Large(item.index, out, out[rank], group, segment.rows))


def _rows_of(held: Held, rows: tuple[int, int] | None) -> torch.Tensor:
    local = local_of(now(held))
    return local if rows is None else local[rows[0] : rows[1]]


def _fits(local: torch.Tensor, own: torch.Tensor) -> bool:
    return (
        local.dtype == own.dtype
        and local.device == own.device
        and local.shape == own.shape
        and local.is_contiguous()
    )


def _typed(memory: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    numel = 1
    for size in shape:
        numel *= size
    return memory[offset : offset + numel * dtype.itemsize].view(dtype).view(tuple(shape))
