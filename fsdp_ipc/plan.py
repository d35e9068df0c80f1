"""Which tensor lies where, in which bucket: pure, linear in the number of names, the same on every rank.

A plan is made from metadata alone, so it can be made for a thousand ranks on a laptop. Its digest covers every name,
shape, dtype, owner and offset; ranks compare it before the first gather, which is what catches ranks that iterate
in different orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_ipc.metadata import Layout, StreamItem, chunk_rows
from fsdp_ipc.recipe import Emit

DEFAULT_BUCKET_BYTES = 1 << 30
"""Slot size when the caller names none; the largest tensor makes it grow (Qwen3-8B's embedding has 1.16 GiB)."""


class TensorRow(NamedTuple):
    """One checkpoint tensor as a worker finds it: bytes `[offset, offset + nbytes)` of an allocation."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    allocation: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What the wire and the settings ask of a plan.

    Attributes:
        bucket_bytes: Size of a staging slot; None sizes it to the largest tensor, at least 1 GiB unless all fits in less.
        num_slots: Staging slots that the buckets take in turn.
        packed: Buckets in slots; False gives every item an allocation of its own and one bucket.
        alignment: Every tensor starts at a multiple of it, in bytes.
        back_to_back: Tensors lie without gaps, widest dtype first, as the stock wire needs, which has no offsets.
    """

    bucket_bytes: int | None = None
    num_slots: int = 2
    packed: bool = True
    alignment: int = 256
    back_to_back: bool = False


@dataclass(frozen=True)
class Segment:
    """Where one item of the stream is put together.

    Attributes:
        item: Index of the stream item.
        allocation: Index of the allocation: a slot, or one of the single allocations after the slots.
        offset: First byte in the allocation.
        nbytes: Bytes reserved there, the tail of an in-place gather included.
        in_place: The full training tensor is gathered right here; else it is made in scratch and copied.
        emit_offsets: First byte of every emitted tensor in the allocation.
        local: Only this rank's own piece is put here (rank-local delivery).
    """

    item: int
    allocation: int
    offset: int
    nbytes: int
    in_place: bool
    emit_offsets: tuple[int, ...]
    local: bool = False


@dataclass(frozen=True)
class Bucket:
    """What is gathered, announced and loaded as one."""

    index: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class TransferPlan:
    """The whole transfer.

    Attributes:
        buckets: In the order in which they are gathered; bucket k lies in slot `k % num_slots`.
        rows: Checkpoint tensors that every worker reads.
        local_rows: By group rank, the tensors that only the worker on that rank's GPU reads.
        resident: Items whose own memory is exported, in the order of their allocations after the slots.
        slot_bytes: Size of a slot; 0 when there is none.
        num_slots: Number of slots in use.
        allocation_bytes: Sizes of the single allocations (unpacked mode); they come after the slots.
        digest: Hex digest of everything above.
    """

    buckets: tuple[Bucket, ...]
    rows: tuple[TensorRow, ...]
    local_rows: tuple[tuple[TensorRow, ...], ...]
    resident: tuple[int, ...]
    slot_bytes: int
    num_slots: int
    allocation_bytes: tuple[int, ...]
    packed: bool
    digest: str = field(compare=False)

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.buckets)


def build_plan(
    items: Sequence[StreamItem],
    limits: PlanLimits,
    *,
    group_ranks: Sequence[int] = (0,),
    resident: Collection[int] = (),
    wanted: Sequence[Container[str] | None] = (),
) -> TransferPlan:
    """Lay the stream out.

    Args:
        items: The stream, in layer order.
        limits: What the wire and the settings ask.
        group_ranks: Global ranks of the trainer group, in group order.
        resident: Indices of the items whose own memory is exported, so that they need no slot; the same on every rank.
        wanted: By group rank, the names of expert tensors that the worker on its GPU holds, or None for every name.
            Sharded experts are delivered rank-locally where each worker wants only what its trainer rank owns.

    Returns:
        The plan, equal on every rank that was given equal arguments.

    Raises:
        ValueError: A tensor is larger than the `bucket_bytes` that the caller named.
    """
    chunks = {i: _local_chunks(item, group_ranks, wanted) for i, item in enumerate(items)}
    local = {i: c for i, c in chunks.items() if c is not None}
    staged = [i for i in range(len(items)) if i not in resident]
    slot_bytes = slot_bytes_for(items, limits, staged, local) if limits.packed else 0
    parts = _split(items, staged, slot_bytes, local, limits) if limits.packed else []
    num_slots = min(limits.num_slots, len(parts))
    buckets = [
        [_segment(items[i], i, k % num_slots, at, local.get(i), limits) for i, at in part]
        for k, part in enumerate(parts)
    ]
    if not buckets:
        buckets = [[]]
    allocation_bytes: list[int] = []
    if not limits.packed:
        for i in staged:
            segment = _segment(items[i], i, num_slots + len(allocation_bytes), 0, local.get(i), limits)
            allocation_bytes.append(segment.nbytes)
            buckets[0].append(segment)
    kept = [i for i in range(len(items)) if i in resident]
    first = num_slots + len(allocation_bytes)
    exported = [_segment(items[i], i, first + n, 0, local.get(i), limits) for n, i in enumerate(kept)]

    rows: list[TensorRow] = []
    local_rows: list[list[TensorRow]] = [[] for _ in group_ranks]
    for bucket, segments in enumerate([*buckets, exported]):
        for segment in segments:
            at = bucket if bucket < len(buckets) else 0
            item = items[segment.item]
            owners = local.get(segment.item)
            if owners is None:
                rows.extend(_rows(item, item.recipe.emits, segment.emit_offsets, segment.allocation, at))
            else:
                _add_local_rows(local_rows, item, segment, owners, at)
    frozen = tuple(Bucket(k, tuple(segments)) for k, segments in enumerate(buckets))
    local_frozen = tuple(tuple(r) for r in local_rows)
    described = [(item.inputs, item.recipe.inputs, item.recipe.emits) for item in items]
    digest = hashlib.sha256()
    for part in (limits, slot_bytes, kept, allocation_bytes, frozen, rows, local_frozen, described):
        digest.update(repr(part).encode())
    return TransferPlan(
        buckets=frozen,
        rows=tuple(rows),
        local_rows=local_frozen,
        resident=tuple(kept),
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        allocation_bytes=tuple(allocation_bytes),
        packed=limits.packed,
        digest=digest.hexdigest(),
    )


def slot_bytes_for(
    items: Sequence[StreamItem],
    limits: PlanLimits,
    staged: Iterable[int],
    local: dict[int, list[int]] | None = None,
) -> int:
    """Size of a slot: what the caller named, or what the largest tensor needs; decided before anything is gathered.

    Raises:
        ValueError: A tensor is larger than the `bucket_bytes` that the caller named, naming both.
    """
    sizes = {i: _size(items[i], (local or {}).get(i), limits) for i in staged}
    if not sizes:
        return 0
    worst = max(sizes, key=lambda i: sizes[i])
    if limits.bucket_bytes is None:
        total = sum(_align(size, limits.alignment) for size in sizes.values())
        return _align(max(sizes[worst], min(DEFAULT_BUCKET_BYTES, total)), limits.alignment)
    if sizes[worst] > limits.bucket_bytes:
        name = items[worst].recipe.emits[0].name if items[worst].recipe.emits else items[worst].recipe.fqn
        raise ValueError(
            f"tensor {name!r} needs {sizes[worst]} bytes, which exceeds bucket_bytes={limits.bucket_bytes}. "
            f"Set bucket_bytes={sizes[worst]} or more, or leave it out: the slots are then sized to the largest tensor"
        )
    return limits.bucket_bytes


def _split(
    items: Sequence[StreamItem],
    staged: Sequence[int],
    slot_bytes: int,
    local: dict[int, list[int]],
    limits: PlanLimits,
) -> list[list[tuple[int, int]]]:
    """Fill buckets in stream order; every entry is an item and its offset in the slot."""
    parts: list[list[int]] = []
    used = slot_bytes + 1
    for i in staged:
        size = _size(items[i], local.get(i), limits)
        at = _align(used, limits.alignment)
        if at + size > slot_bytes:
            parts.append([])
            at = 0
        parts[-1].append(i)
        used = at + size
    placed = []
    for part in parts:
        if limits.back_to_back:
            # No offsets on that wire: widest first keeps every view aligned.
            part = sorted(part, key=lambda i: -items[i].wire_dtype.itemsize)
        at, row = 0, []
        for i in part:
            at = _align(at, limits.alignment)
            row.append((i, at))
            at += _size(items[i], local.get(i), limits)
        placed.append(row)
    return placed


def _segment(
    item: StreamItem, index: int, allocation: int, offset: int, owners: list[int] | None, limits: PlanLimits
) -> Segment:
    in_place = _in_place(item, limits)
    if in_place:
        offsets = tuple(offset + emit.start * item.wire_dtype.itemsize for emit in item.recipe.emits)
    else:
        offsets = _emit_offsets(item, offset, limits)
    size = _size(item, owners, limits)
    return Segment(index, allocation, offset, size, in_place, offsets, local=owners is not None)


def _in_place(item: StreamItem, limits: PlanLimits) -> bool:
    if not item.is_direct:
        return False
    if not limits.back_to_back:
        return True
    # Back to back there is no room for the tail of an uneven gather, and what is not sent may not lie between.
    at = 0
    for emit in item.recipe.emits:
        if emit.start != at:
            return False
        at += emit.numel
    spec = item.inputs[0]
    return spec.gathered_bytes == spec.nbytes == at * spec.wire_dtype.itemsize


def _emit_offsets(item: StreamItem, offset: int, limits: PlanLimits) -> tuple[int, ...]:
    offsets = []
    for emit in item.recipe.emits:
        offset = _align(offset, limits.alignment)
        offsets.append(offset)
        offset += emit.numel * item.wire_dtype.itemsize
    return tuple(offsets)


def _size(item: StreamItem, owners: list[int] | None, limits: PlanLimits) -> int:
    """Bytes that an item takes in its allocation."""
    if owners is not None:
        spec = item.inputs[0]
        return chunk_rows(spec.shape[0], spec.layout.num_shards) * spec.row_bytes
    if _in_place(item, limits):
        return item.inputs[0].gathered_bytes
    if not item.recipe.emits:
        return 0
    last = item.recipe.emits[-1]
    return _emit_offsets(item, 0, limits)[-1] + last.numel * item.wire_dtype.itemsize


def _rows(
    item: StreamItem, emits: Iterable[Emit], offsets: Iterable[int], allocation: int, bucket: int
) -> Iterable[TensorRow]:
    dtype = str(item.wire_dtype).removeprefix("torch.")
    for emit, offset in zip(emits, offsets, strict=True):
        yield TensorRow(emit.name, dtype, emit.shape, bucket, allocation, offset)


def _local_chunks(
    item: StreamItem, group_ranks: Sequence[int], wanted: Sequence[Container[str] | None]
) -> list[int] | None:
    """By group rank, which chunk of dim 0 it owns, if this item can be delivered rank-locally; else None."""
    spec = item.inputs[0]
    if not wanted or any(w is None for w in wanted) or not item.is_direct or spec.layout.kind != "shard":
        return None
    rows = chunk_rows(spec.shape[0], spec.layout.num_shards)
    row_of: dict[str, int] = {}
    for emit in item.recipe.emits:
        first, end = emit.rows(spec.shape)
        if end - first != 1:
            return None
        row_of[emit.name] = first
    chunks = []
    asked: set[str] = set()
    for rank, names in zip(group_ranks, wanted, strict=True):
        chunk = _chunk_of(spec.layout, rank)
        if chunk is None or names is None:
            return None
        held = [name for name in row_of if name in names]
        if any(row_of[name] // rows != chunk for name in held):
            return None
        asked.update(held)
        chunks.append(chunk)
    # Experts that no worker asks for would vanish silently.
    return chunks if len(asked) == len(row_of) else None


def _chunk_of(layout: Layout, rank: int) -> int | None:
    if rank not in layout.ranks:
        return None
    index = layout.ranks.index(rank)
    for size in reversed(layout.mesh_shape[layout.axis + 1 :]):
        index //= size
    return index % layout.mesh_shape[layout.axis]


def _add_local_rows(
    local_rows: list[list[TensorRow]], item: StreamItem, segment: Segment, owners: list[int], bucket: int
) -> None:
    spec = item.inputs[0]
    rows = chunk_rows(spec.shape[0], spec.layout.num_shards)
    for rank, chunk in enumerate(owners):
        own = [e for e in item.recipe.emits if e.rows(spec.shape)[0] // rows == chunk]
        skipped = chunk * rows * spec.row_bytes
        offsets = [segment.offset + e.start * item.wire_dtype.itemsize - skipped for e in own]
        local_rows[rank].extend(_rows(item, own, offsets, segment.allocation, bucket))


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
