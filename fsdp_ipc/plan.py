"""Which tensor lies where, in which bucket: pure, linear in the number of names, the same on every rank.

A plan is made from metadata alone, so it can be made for a thousand ranks on a laptop. Its digest covers every name,
shape, dtype, owner and offset; ranks compare it before the first gather, which is what catches ranks that iterate
in different orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_ipc.delivery import LocalDelivery, Readers, local_deliveries
from fsdp_ipc.metadata import Layout, StreamItem
from fsdp_ipc.pieces import Piece, align, clusters_of, cut, cut_local, local_piece, units_of, whole_piece
from fsdp_ipc.recipe import Emit
from fsdp_ipc.rows import Holders, Reach, TensorRow, chunk_rows_of, local_rows, whole_rows

DEFAULT_BUCKET_BYTES = 2 << 30
"""Slot size when the caller names none; the largest tensor makes it grow (Qwen3-8B's embedding has 1.16 GiB)."""


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What the wire and the settings ask of a plan.

    Attributes:
        bucket_bytes: Size of a staging slot; None sizes it to the largest tensor, at least 2 GiB unless all fits in less.
        num_slots: Staging slots that the buckets take in turn.
        packed: Buckets in slots; False gives every item an allocation of its own and one bucket.
        alignment: Every training tensor starts at a multiple of it, in bytes; checkpoint tensors that are slices of
            one lie where they lie in it, at a multiple of their item size.
        back_to_back: Tensors lie without gaps, widest dtype first, as the stock wire needs, which has no offsets;
            `alignment` does not count then.
    """

    bucket_bytes: int | None = None
    num_slots: int = 2
    packed: bool = True
    alignment: int = 256
    back_to_back: bool = False


@dataclass(frozen=True)
class Segment:
    """Where an item of the stream, or a piece of it, is put together.

    Attributes:
        item: Index of the stream item.
        allocation: Index of the allocation: a slot, or one of the single allocations after the slots.
        offset: First byte in the allocation.
        nbytes: Bytes reserved there, the tail of an in-place gather included.
        in_place: The training tensor is gathered right here; else it is made in scratch and copied.
        emits: The checkpoint tensors that lie here; where each rank puts its own (`local`), those of all ranks.
        emit_offsets: First byte of each in the allocation; empty where each rank puts its own.
        rows: Range of rows of every rank's chunk that is gathered here; None for all of the tensor.
        local: Only this rank's own piece is put here: for the worker beside it (rank-local delivery), or for all, which
            then read every rank's.
        table: Of who holds which chunk, if all read it; -1 otherwise.
    """

    item: int
    allocation: int
    offset: int
    nbytes: int
    in_place: bool
    emits: tuple[Emit, ...]
    emit_offsets: tuple[int, ...]
    rows: tuple[int, int] | None = None
    local: bool = False
    table: int = -1


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
        holders: Who holds which chunk of a tensor that workers read from several ranks; rows name theirs (`TensorRow.shards`).
        slot_bytes: Size of a slot; 0 when there is none.
        num_slots: Number of slots in use.
        allocation_bytes: Sizes of the single allocations (unpacked mode); they come after the slots.
        digest: Hex digest of everything above.
    """

    buckets: tuple[Bucket, ...]
    rows: tuple[TensorRow, ...]
    local_rows: tuple[tuple[TensorRow, ...], ...]
    resident: tuple[int, ...]
    holders: tuple[Holders, ...]
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
    group_ranks: Sequence[int] | None = None,
    resident: Collection[int] = (),
    wanted: Readers | None = None,
    reads: Sequence[Collection[int]] | None = None,
    atomic: Sequence[Collection[str]] = (),
) -> TransferPlan:
    """Lay the stream out.

    Args:
        items: The stream, in layer order.
        limits: What the wire and the settings ask.
        group_ranks: Global ranks of the trainer group, in group order; None if the plan is for one rank or for a look.
        resident: Indices of the items whose own memory can be exported, so that they need no slot; the same on every
            rank. Where it is held in another dtype, the rows say so. Shards stay in place as `reads` allows, and if they
            need no cast: before they travel they are cast.
        wanted: Which workers hold which experts, None if every worker reads everything. Experts are delivered
            rank-locally where every worker that holds one sits beside a trainer rank that owns it.
        reads: By group rank, the group ranks whose memory the worker beside it can read; None if workers know nothing of
            shards. Shards are not gathered if every worker can read all chunks that it needs: those that can't stay where
            they are, each rank puts into its own slot.
        atomic: Sets of checkpoint names that must reach the server in one bucket (a weight and its scale).

    Returns:
        The plan, equal on every rank that was given equal arguments.

    Raises:
        ValueError: A tensor or an atomic set is larger than the `bucket_bytes` that the caller named, or a tensor
            is sharded over ranks outside the group.
    """
    ranks = (0,) if group_ranks is None else tuple(group_ranks)
    if group_ranks is not None:
        _check_meshes(items, ranks)
    local = local_deliveries(items, ranks, wanted, back_to_back=limits.back_to_back)
    clusters = clusters_of(items, atomic)
    reach = Reach(ranks, reads) if reads is not None else None
    tables = _tables(items, local, reach)
    readable = {*tables, *local} if reach is not None else set()
    kept = [i for i in sorted(resident) if i not in clusters and _stays(items[i], i in readable, i in local)]
    leave = set(kept)
    staged = [i for i in range(len(items)) if i not in leave]

    layout = _Layout(items, limits, local, tables, clusters)
    segments: list[list[Segment]]
    slot_bytes = num_slots = 0
    allocation_bytes: list[int] = []
    if limits.packed:
        slot_bytes, parts = layout.packed(staged)
        num_slots = min(limits.num_slots, len(parts))
        segments = [
            [layout.segment(piece, k % num_slots, at) for piece, at in part] for k, part in enumerate(parts)
        ] or [[]]
    else:
        segments = [[]]
        for i in staged:
            segments[0].append(layout.segment(layout.piece(i), len(allocation_bytes), 0))
            allocation_bytes.append(max(segments[0][-1].nbytes, limits.alignment))
    first = num_slots + len(allocation_bytes)
    exported = [layout.segment(layout.piece(i), first + n, 0) for n, i in enumerate(kept)]

    rows: list[TensorRow] = []
    own_rows: list[list[TensorRow]] = [[] for _ in ranks]
    for bucket, inside in enumerate([*segments, exported]):
        at, in_place = (bucket, False) if bucket < len(segments) else (0, True)
        for s in inside:
            item = items[s.item]
            if s.item in local:
                delivery = local[s.item]
                for rank, row in local_rows(
                    item, s.emits, delivery, at, s.allocation, s.offset, s.rows, exported=in_place
                ):
                    own_rows[rank].append(row)
                continue
            if s.table >= 0:
                rows += chunk_rows_of(item, s.emits, s.table, at, s.allocation, s.offset, s.rows)
            else:
                rows += whole_rows(item, s.emits, s.emit_offsets, at, s.allocation, exported=in_place)
    holders = tuple(reach.tables) if reach is not None else ()
    digest = _digest(
        items, limits, local, [*segments, exported], (slot_bytes, kept, holders, allocation_bytes, ranks)
    )
    return TransferPlan(
        buckets=tuple(Bucket(k, tuple(inside)) for k, inside in enumerate(segments)),
        rows=tuple(rows),
        local_rows=tuple(tuple(r) for r in own_rows),
        resident=tuple(kept),
        holders=holders,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        allocation_bytes=tuple(allocation_bytes),
        packed=limits.packed,
        digest=digest,
    )


class _Layout:
    """Turns items into pieces and fills the slots with them."""

    def __init__(
        self,
        items: Sequence[StreamItem],
        limits: PlanLimits,
        local: dict[int, LocalDelivery],
        tables: dict[int, int],
        clusters: dict[int, tuple[int, ...]],
    ) -> None:
        self._items, self._limits, self._clusters = items, limits, clusters
        self._tables = tables
        self._own = local.keys() | tables.keys()
        self._alignment = 1 if limits.back_to_back else limits.alignment

    def piece(self, index: int) -> Piece:
        """The item in one piece."""
        if index in self._own:
            return local_piece(self._items[index], index)
        back_to_back = self._limits.back_to_back
        return whole_piece(self._items[index], index, self._alignment, back_to_back=back_to_back)

    def segment(self, piece: Piece, allocation: int, offset: int) -> Segment:
        """The piece at its place."""
        offsets = tuple([offset + at for at in piece.offsets])
        return Segment(
            piece.item,
            allocation,
            offset,
            piece.nbytes,
            piece.in_place,
            piece.emits,
            offsets,
            piece.rows,
            piece.item in self._own,
            self._tables.get(piece.item, -1),
        )

    def packed(self, staged: Sequence[int]) -> tuple[int, list[list[tuple[Piece, int]]]]:
        """Size of a slot, and by bucket its pieces and their offsets; all decided before anything is gathered."""
        together: list[list[Piece]] = []
        for i in staged:
            members = self._clusters.get(i, (i,))
            if members[0] == i:
                together.append([self.piece(m) for m in members])
        slot_bytes = self._slot_bytes(together)
        buckets: list[list[Piece]] = []
        used = 0
        for pieces in together:
            parts = [pieces]
            if self._extent(pieces) > slot_bytes:  # never so for a cluster: the slot was sized for it
                parts = [[piece] for piece in self._cut(pieces[0].item, slot_bytes)]
            for part in parts:
                if not buckets or align(used, self._alignment) + self._extent(part) > slot_bytes:
                    buckets.append([])
                    used = 0
                buckets[-1].extend(part)
                used = align(used, self._alignment) + self._extent(part)
        return slot_bytes, [self._placed(pieces) for pieces in buckets]

    def _placed(self, pieces: list[Piece]) -> list[tuple[Piece, int]]:
        if self._limits.back_to_back:
            # No offsets on that wire: widest first keeps every view aligned.
            pieces = sorted(pieces, key=lambda piece: -self._items[piece.item].wire_dtype.itemsize)
        placed, end = [], 0
        for piece in pieces:
            at = align(end, self._alignment)
            placed.append((piece, at))
            end = at + piece.nbytes
        return placed

    def _extent(self, pieces: list[Piece]) -> int:
        end = 0
        for piece in pieces:
            end = align(end, self._alignment) + piece.nbytes
        return end

    def _units(self, index: int) -> list[tuple[int, int]]:
        return units_of(self._items[index], back_to_back=self._limits.back_to_back)

    def _cut(self, index: int, slot_bytes: int) -> list[Piece]:
        item, units = self._items[index], self._units(index)
        if index in self._own:
            return cut_local(item, index, units, slot_bytes)
        return cut(item, index, units, slot_bytes)

    def _smallest(self, pieces: list[Piece]) -> int:
        """The room that they need at least: all of it, or the largest unit of an item that may be cut."""
        if pieces[0].item in self._clusters:
            return self._extent(pieces)
        units = self._units(pieces[0].item)
        if not units:
            return pieces[0].nbytes
        spec = self._items[pieces[0].item].inputs[0]
        copies = 1 if pieces[0].item in self._own else spec.layout.num_shards
        return min(pieces[0].nbytes, max(end - first for first, end in units) * spec.row_bytes * copies)

    def _slot_bytes(self, together: list[list[Piece]]) -> int:
        if not together:
            return 0
        limit = self._limits.bucket_bytes
        total = sum(align(self._extent(pieces), self._alignment) for pieces in together)
        free = limit if limit is not None else min(DEFAULT_BUCKET_BYTES, total)
        needs = [(self._smallest(p), p) for p in together if self._extent(p) > free]
        need, pieces = max(needs, key=lambda pair: pair[0], default=(0, together[0]))
        if limit is None:
            return align(max(need, free, 1), self._limits.alignment)
        if need > limit:
            names = [emit.name for piece in pieces for emit in self._items[piece.item].recipe.emits]
            what = f"tensor {names[0]!r}"
            if len(pieces) > 1:
                what = f"the set of {names}, which must stay together,"
            raise ValueError(
                f"{what} needs {need} bytes, which exceeds bucket_bytes={limit}. "
                f"Set bucket_bytes={need} or more, or leave it out: the slots are then sized to the largest tensor"
            )
        return limit


def _check_meshes(items: Sequence[StreamItem], group_ranks: Sequence[int]) -> None:
    members, checked = set(group_ranks), set()
    for item in items:
        for spec in item.inputs:
            if id(spec.layout) in checked:
                continue
            checked.add(id(spec.layout))
            if spec.layout.kind != "whole" and (outside := sorted(set(spec.layout.ranks) - members)):
                raise ValueError(
                    f"{spec.fqn} is held by global ranks {outside[:8]}, which are not in the trainer group "
                    f"{list(group_ranks)[:8]}: pass a group that has every rank of the model's meshes"
                )


def _tables(
    items: Sequence[StreamItem], local: Mapping[int, LocalDelivery], reach: Reach | None
) -> dict[int, int]:
    """By item, the table of its chunks, for those that every worker reads from several ranks."""
    if reach is None:
        return {}
    found = ((i, reach.table_of(item)) for i, item in enumerate(items) if i not in local)
    return {i: table for i, table in found if table >= 0}


def _stays(item: StreamItem, readable: bool, local: bool) -> bool:
    """Whether memory that can be exported needs no slot: whole, or read by those who can read it where it lies."""
    spec = item.inputs[0]
    return spec.layout.kind == "whole" or (readable and (local or spec.dtype == spec.wire_dtype))


def _digest(
    items: Sequence[StreamItem],
    limits: PlanLimits,
    local: dict[int, LocalDelivery],
    segments: Iterable[Iterable[Segment]],
    rest: object,
) -> str:
    digest = hashlib.sha256(repr((limits, rest)).encode())
    # A layout names all ranks of its mesh: each one is written out once, not once a tensor.
    numbers: dict[int, int] = {}
    by_value: dict[Layout, int] = {}
    for item in items:
        for spec in item.inputs:
            number = numbers.get(id(spec.layout))
            if number is None:
                known = len(by_value)
                number = numbers[id(spec.layout)] = by_value.setdefault(spec.layout, known)
                if number == known:
                    digest.update(repr(spec.layout).encode())
            text = f"{spec.fqn}|{spec.shape}|{spec.dtype}|{spec.wire_dtype}|{number};"
            digest.update(text.encode())
        for emit in item.recipe.emits:
            digest.update(f"{emit.name}|{emit.shape}|{emit.start}|{emit.stride};".encode())
    for inside in segments:
        for s in inside:
            place = f"{s.item}|{s.allocation}|{s.offset}|{s.nbytes}|{s.in_place}|{s.rows}|{s.local}|{s.table}|{s.emit_offsets}"
            digest.update(place.encode())
        digest.update(b"/")
    for i, delivery in local.items():
        digest.update(f"{i}|{delivery.readers}|{delivery.chunks};".encode())
    return digest.hexdigest()
