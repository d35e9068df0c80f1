"""Sharded pieces to full tensors in the wire dtype, written straight into the staging memory.

What is cheapest for each tensor is decided once, when a plan is bound to its memory:

- whole on this rank: one cast-and-copy, all of a bucket in one `_foreach_copy_`, no collective;
- large, dim 0 in chunks: this rank's chunk is cast into its place and the all-gather's output *is* the tensor;
- small, dim 0 in chunks: all of a bucket in one all-gather through a small scratch;
- any other layout: DTensor's own `redistribute`, which knows strided and uneven shards.

Shards are cast before they travel: half the bytes for fp32 masters. All ranks call these functions in the same
order; each says how many collectives it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fsdp_ipc.group import all_gather
from fsdp_ipc.layout import local_of
from fsdp_ipc.metadata import StreamItem, TensorSpec, chunk_rows
from fsdp_ipc.plan import Segment, TransferPlan

SMALL_BYTES = 1 << 20
"""A full tensor up to this size shares one all-gather with the other small ones of its bucket."""

Held = torch.Tensor | Callable[[], torch.Tensor]


@dataclass
class _Chunked:
    """One in-place gather: `out` is the reserved memory in wire dtype, `own` this rank's chunk of it."""

    tensor: int
    out: torch.Tensor
    own: torch.Tensor
    group: dist.ProcessGroup


@dataclass
class _Together:
    """Small tensors over one group, which share one all-gather through a scratch."""

    members: list[_Chunked] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, chunked: _Chunked) -> None:
        self.members.append(chunked)
        self.offsets.append(self.nbytes)
        self.nbytes += -(-chunked.own.nbytes // 16) * 16


@dataclass
class _BucketGather:
    """The work of one bucket; the last four fields live from `load` to `gather`."""

    whole: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    large: list[_Chunked] = field(default_factory=list)
    small: list[_Together] = field(default_factory=list)
    general: list[tuple[int, TensorSpec, torch.Tensor]] = field(default_factory=list)
    made: list[tuple[StreamItem, list[torch.Tensor]]] = field(default_factory=list)
    sends: list[torch.Tensor] = field(default_factory=list)
    packed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    made_held: list[list[torch.Tensor]] = field(default_factory=list)

    def add_small(self, chunked: _Chunked) -> None:
        for together in self.small:
            if together.members[0].group is chunked.group:
                together.add(chunked)
                return
        self.small.append(_Together())
        self.small[-1].add(chunked)


class Gatherer:
    """A plan bound to the memory that it fills.

    Args:
        plan: The plan, the same on every rank.
        items: The stream that it was made from.
        tensors: This rank's tensors now, for their meshes; in the order of the inputs of `items`.
        allocations: This rank's memory by allocation index, uint8; those of resident items are not needed.
        owner_group: Group for the broadcast of tensors that only some ranks own.
    """

    def __init__(
        self,
        plan: TransferPlan,
        items: Sequence[StreamItem],
        tensors: Sequence[Held],
        allocations: Sequence[torch.Tensor],
        owner_group: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        self._owner_group = owner_group
        self._scratch: dict[int, torch.Tensor] = {}
        self._buckets = []
        for bucket in plan.buckets:
            work = _BucketGather()
            for segment in bucket.segments:
                self._bind(work, segment, items[segment.item], tensors, allocations[segment.allocation])
            self._buckets.append(work)

    @torch.no_grad()
    def load(self, bucket: int, tensors: Sequence[Held]) -> None:
        """This rank's half of a bucket, on the current stream: casts and copies its own pieces. Not collective.

        What can fail on one rank alone (a copy, an allocation, a merged adapter) fails here, so that the ranks can
        tell each other before `gather` joins them in a collective.

        Args:
            bucket: Index of the bucket.
            tensors: This rank's tensors now, in the order of the inputs of the items.
        """
        work = self._buckets[bucket]
        targets, sources = [], []
        for index, target in work.whole:
            targets.append(target)
            sources.append(local_of(_now(tensors[index])))
        work.sends = []
        for chunked in work.large:
            local = local_of(_now(tensors[chunked.tensor]))
            fits = _fits(local, chunked.own)
            work.sends.append(local if fits else chunked.own)
            if not fits and local.numel():
                # Cast into its own place: the gather is then in place and needs no scratch.
                targets.append(chunked.own[: local.shape[0]])
                sources.append(local)
        work.packed = []
        for index, together in enumerate(work.small):
            send, receive = self._small_scratch(index, together)
            work.packed.append((send, receive))
            for chunked, offset in zip(together.members, together.offsets, strict=True):
                local = local_of(_now(tensors[chunked.tensor]))
                if local.numel():
                    targets.append(_typed(send, offset, tuple(local.shape), chunked.out.dtype))
                    sources.append(local)
        if targets:
            torch._foreach_copy_(targets, sources)
        work.held = [_now(tensors[index]) for index, _, _ in work.general]
        work.made_held = [
            [_now(tensors[item.index + n]) for n in range(len(item.inputs))] for item, _ in work.made
        ]

    @torch.no_grad()
    def gather(self, bucket: int) -> None:
        """All ranks, collective, after `load` of the same bucket: make its tensors whole on the current stream.

        One all-gather for each group that small tensors are sharded over, one for each large tensor, none for what
        is whole on this rank.
        """
        work = self._buckets[bucket]
        for chunked, send in zip(work.large, work.sends, strict=True):
            all_gather(_bytes(chunked.out), _bytes(send), chunked.group)
        for together, (send, receive) in zip(work.small, work.packed, strict=True):
            all_gather(receive.view(-1), send, together.members[0].group)
            ranks = receive.shape[0]
            torch._foreach_copy_(
                [_bytes(c.out).view(ranks, -1) for c in together.members],
                [
                    receive[:, at : at + c.own.nbytes]
                    for c, at in zip(together.members, together.offsets, strict=True)
                ],
            )
        for (_, spec, target), held in zip(work.general, work.held, strict=True):
            target.copy_(full_tensor(spec, held, target.device, self._owner_group))
        for (item, made), pieces in zip(work.made, work.made_held, strict=True):
            full = [
                full_tensor(spec, piece, made[0].device, self._owner_group)
                for spec, piece in zip(item.inputs, pieces, strict=True)
            ]
            for target, source in zip(made, item.recipe.apply(full), strict=True):
                target.copy_(source)
            del full
        work.sends, work.packed, work.held, work.made_held = [], [], [], []

    def _bind(
        self,
        work: _BucketGather,
        segment: Segment,
        item: StreamItem,
        tensors: Sequence[Held],
        memory: torch.Tensor,
    ) -> None:
        if not segment.in_place:
            if item.recipe.emits:
                work.made.append(
                    (
                        item,
                        [
                            _typed(memory, offset, emit.shape, item.wire_dtype)
                            for offset, emit in zip(segment.emit_offsets, item.recipe.emits, strict=True)
                        ],
                    )
                )
            return
        spec, index = item.inputs[0], item.index
        kind = spec.layout.kind
        if segment.local:
            held = _now(tensors[index])
            local = local_of(held)
            work.whole.append((index, _typed(memory, segment.offset, tuple(local.shape), spec.wire_dtype)))
        elif kind == "whole":
            work.whole.append((index, _typed(memory, segment.offset, spec.shape, spec.wire_dtype)))
        elif kind == "shard" and spec.nbytes > 0:
            mesh = _mesh(_now(tensors[index]))
            group = mesh.get_group(spec.layout.axis)
            chunks = spec.layout.num_shards
            rows = chunk_rows(spec.shape[0], chunks)
            out = _typed(memory, segment.offset, (chunks, rows, *spec.shape[1:]), spec.wire_dtype)
            rank = mesh.get_local_rank(spec.layout.axis)
            chunked = _Chunked(index, out, out[rank], group)
            if spec.nbytes > SMALL_BYTES:
                work.large.append(chunked)
            else:
                work.add_small(chunked)
        elif spec.nbytes > 0:
            work.general.append((index, spec, _typed(memory, segment.offset, spec.shape, spec.wire_dtype)))

    def _small_scratch(self, index: int, together: _Together) -> tuple[torch.Tensor, torch.Tensor]:
        """Send and receive memory, kept between buckets and syncs, one for each group of a bucket."""
        ranks, device = together.members[0].out.shape[0], together.members[0].out.device
        nbytes = together.nbytes
        need = nbytes * (ranks + 1)
        held = self._scratch.get(index)
        if held is None or held.numel() < need:
            held = self._scratch[index] = torch.empty(need, dtype=torch.uint8, device=device)
        return held[:nbytes], held[nbytes:need].view(ranks, nbytes)


@torch.no_grad()
def full_tensor(
    spec: TensorSpec,
    held: torch.Tensor,
    device: torch.device,
    owner_group: Callable[[], dist.ProcessGroup] | None = None,
) -> torch.Tensor:
    """All ranks of the tensor's mesh, collective unless the tensor is whole: the full tensor in wire dtype.

    Args:
        spec: What the tensor is.
        held: This rank's DTensor or plain tensor.
        device: Where the full tensor is wanted.
        owner_group: Group for the broadcast of a tensor that only some ranks own.

    Returns:
        Contiguous tensor of `spec.shape`; new memory unless it is whole and fits as it is.
    """
    local = local_of(held).to(device=device, dtype=spec.wire_dtype)
    kind = spec.layout.kind
    if kind == "whole":
        return local.contiguous()
    if kind == "owned":
        if owner_group is None:
            raise ValueError(
                f"{spec.fqn}: a tensor that only ranks {spec.layout.ranks} own needs the trainer group"
            )
        full = (
            local.contiguous()
            if local.numel()
            else torch.empty(spec.shape, dtype=spec.wire_dtype, device=device)
        )
        dist.broadcast(_bytes(full), src=spec.layout.ranks[0], group=owner_group())
        return full
    mesh = _mesh(held)
    if kind == "shard" and spec.nbytes > 0:
        axis, chunks = spec.layout.axis, spec.layout.num_shards
        rows = chunk_rows(spec.shape[0], chunks)
        out = torch.empty((chunks, rows, *spec.shape[1:]), dtype=spec.wire_dtype, device=device)
        own = out[mesh.get_local_rank(axis)]
        if local.numel():
            own[: local.shape[0]].copy_(local)
        all_gather(_bytes(out), _bytes(own), mesh.get_group(axis))
        return out.view(-1, *spec.shape[1:])[: spec.shape[0]]
    assert isinstance(held, DTensor)
    # One-byte floats travel as bytes: not every backend's collectives know them.
    as_bytes = spec.wire_dtype.is_floating_point and spec.wire_dtype.itemsize == 1
    piece = DTensor.from_local(
        local.view(torch.uint8) if as_bytes else local,
        mesh,
        held.placements,
        run_check=False,
        shape=held.shape,
        stride=held.stride(),
    )
    full = piece.redistribute(placements=[Replicate()] * mesh.ndim).to_local().contiguous()
    return full.view(spec.wire_dtype) if as_bytes else full


def full_tensors(item: StreamItem, held: Sequence[Held]) -> Iterator[tuple[str, torch.Tensor]]:
    """All ranks, collective: the checkpoint tensors of one item, each in memory of its own or a view of it."""
    now = [_now(h) for h in held]
    device = local_of(now[0]).device
    full = [full_tensor(spec, tensor, device) for spec, tensor in zip(item.inputs, now, strict=True)]
    for emit, tensor in zip(item.recipe.emits, item.recipe.apply(full), strict=True):
        yield emit.name, tensor


def _now(held: Held) -> torch.Tensor:
    return held if isinstance(held, torch.Tensor) else held()


def _mesh(held: torch.Tensor) -> torch.distributed.device_mesh.DeviceMesh:
    assert isinstance(held, DTensor)
    return held.device_mesh


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Flat bytes of a contiguous tensor: collectives then work alike for every dtype."""
    return tensor.view(-1).view(torch.uint8)
