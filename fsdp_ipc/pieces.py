"""How one item of the stream lies in its allocation: its size, its tensors' offsets, and where it may be cut.

Pure arithmetic on metadata, for `plan`. An item whose checkpoint tensors are slices of the training tensor is
gathered right into its place. One that is larger than a slot (the fused experts of a layer) is cut: a piece is the
same range of rows of *every* rank's chunk, so that each piece still is one balanced all-gather.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from fsdp_ipc.metadata import StreamItem
from fsdp_ipc.recipe import Emit

SMALL_BYTES = 1 << 20
"""A full tensor up to this size shares one all-gather with the other small ones of its bucket."""


class Piece(NamedTuple):
    """An item, or a part of it, as it lies in an allocation.

    Attributes:
        item: Index of the stream item.
        nbytes: Bytes that it takes.
        in_place: The training tensor's rows lie there as they are; else the checkpoint tensors are made elsewhere.
        emits: The checkpoint tensors in it; of a piece in which each rank puts its own, those of all ranks.
        offsets: First byte of each, from the start of the piece; empty where each rank puts its own.
        rows: Range of rows of every chunk that lies here, None for all of the tensor.
    """

    item: int
    nbytes: int
    in_place: bool
    emits: tuple[Emit, ...]
    offsets: tuple[int, ...]
    rows: tuple[int, int] | None = None


def align(value: int, alignment: int) -> int:
    """Round up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


def whole_piece(item: StreamItem, index: int, alignment: int, *, back_to_back: bool) -> Piece:
    """The item in one piece."""
    emits, itemsize = item.recipe.emits, item.wire_dtype.itemsize
    if item.is_direct and (not back_to_back or _fills(item)):
        spec = item.inputs[0]
        in_place = spec.layout.kind == "shard" and spec.nbytes > SMALL_BYTES
        nbytes = spec.gathered_bytes if in_place else spec.nbytes
        return Piece(index, nbytes, True, emits, tuple(emit.start * itemsize for emit in emits))
    offsets = []
    end = 0
    for emit in emits:
        offsets.append(align(end, alignment))
        end = offsets[-1] + emit.numel * itemsize
    return Piece(index, end, False, emits, tuple(offsets))


def local_piece(item: StreamItem, index: int) -> Piece:
    """Room for one rank's own chunk; which of the tensors lie in it differs by rank."""
    spec = item.inputs[0]
    nbytes = spec.nbytes if spec.layout.kind != "shard" else spec.chunk_rows * spec.row_bytes
    return Piece(index, nbytes, True, item.recipe.emits, ())


def units_of(item: StreamItem, *, back_to_back: bool) -> list[tuple[int, int]]:
    """The smallest parts into which an item may be cut.

    Returns:
        Ranges of rows, counted from the start of each rank's chunk, in order, that no checkpoint tensor crosses; rows
        that nobody sends are in none. Empty where the item can't be cut.
    """
    spec = item.inputs[0]
    if not item.is_direct or len(item.recipe.emits) < 2 or spec.layout.kind not in ("whole", "shard"):
        return []
    if spec.row_bytes == 0 or not spec.shape:
        return []
    rows = spec.chunk_rows
    if back_to_back and (not _tiles(item) or rows * spec.layout.num_shards != spec.shape[0]):
        return []
    ranges = set()
    for emit in item.recipe.emits:
        first, end = emit.rows(spec.shape)
        if first == end:
            continue
        chunk = first // rows
        if (end - 1) // rows != chunk:
            return []
        ranges.add((first - chunk * rows, end - chunk * rows))
    units: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if units and first < units[-1][1]:
            units[-1] = (units[-1][0], max(units[-1][1], end))
        else:
            units.append((first, end))
    return units


def cut(item: StreamItem, index: int, units: Sequence[tuple[int, int]], slot_bytes: int) -> list[Piece]:
    """Cut an item into pieces of at most `slot_bytes`, each as large as can be."""
    spec, itemsize = item.inputs[0], item.wire_dtype.itemsize
    chunks = spec.layout.num_shards
    rows = spec.chunk_rows
    ranges = _joined(units, slot_bytes // (chunks * spec.row_bytes))
    pieces = []
    for (first, end), members in zip(ranges, _members(item, ranges), strict=True):
        inside: list[tuple[Emit, int]] = []
        for emit in members:
            chunk = emit.rows(spec.shape)[0] // rows
            into = emit.start * itemsize - (chunk * rows + first) * spec.row_bytes
            inside.append((emit, chunk * (end - first) * spec.row_bytes + into if emit.numel else 0))
        inside.sort(key=lambda pair: pair[1])
        nbytes = chunks * (end - first) * spec.row_bytes
        emits, offsets = tuple(e for e, _ in inside), tuple(o for _, o in inside)
        pieces.append(Piece(index, nbytes, True, emits, offsets, (first, end)))
    return pieces


def cut_local(item: StreamItem, index: int, units: Sequence[tuple[int, int]], slot_bytes: int) -> list[Piece]:
    """Cut the room for one rank's own chunk into pieces of at most `slot_bytes`."""
    row_bytes = item.inputs[0].row_bytes
    ranges = _joined(units, slot_bytes // row_bytes)
    return [
        Piece(index, (part[1] - part[0]) * row_bytes, True, tuple(emits), (), part)
        for part, emits in zip(ranges, _members(item, ranges), strict=True)
    ]


def _members(item: StreamItem, ranges: Sequence[tuple[int, int]]) -> list[list[Emit]]:
    """By range of rows of every chunk, the checkpoint tensors in it; an empty one may lie in none, and comes with the first."""
    spec = item.inputs[0]
    members: list[list[Emit]] = [[] for _ in ranges]
    piece_of = {row: n for n, (first, end) in enumerate(ranges) for row in range(first, end)}
    for emit in item.recipe.emits:
        row = emit.rows(spec.shape)[0] % spec.chunk_rows
        members[piece_of.get(row, 0)].append(emit)
    return members


def clusters_of(items: Sequence[StreamItem], atomic: Sequence[Collection[str]]) -> dict[int, tuple[int, ...]]:
    """By item, all items that must lie in its bucket uncut, for the items of which an atomic set asks that.

    Raises:
        ValueError: A set names what is not sent.
    """
    if not atomic:
        return {}
    item_of = {emit.name: i for i, item in enumerate(items) for emit in item.recipe.emits}
    unknown = sorted({name for names in atomic for name in names if name not in item_of})
    if unknown:
        near = {name: get_close_matches(name, item_of, 1) for name in unknown[:8]}
        shown = ", ".join(
            f"{name!r} (did you mean {close[0]!r}?)" if close else f"{name!r}" for name, close in near.items()
        )
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise ValueError(
            f"keep_together names what is not sent: {shown}{more}. Expected checkpoint names, as the server knows them"
        )
    clusters: dict[int, tuple[int, ...]] = {}
    for names in atomic:
        members = {item_of[name] for name in names if name in item_of}
        joined = members.union(*(clusters.get(i, ()) for i in members))
        if len(joined) > 1 or any(_is_torn(items[i], names) for i in joined):
            clusters.update(dict.fromkeys(joined, tuple(sorted(joined))))
    return clusters


def _is_torn(item: StreamItem, names: Collection[str]) -> bool:
    """Whether cutting the item could part these tensors of it."""
    spec = item.inputs[0]
    units = units_of(item, back_to_back=False)
    if not units:
        return False
    rows = spec.chunk_rows
    at = {emit.rows(spec.shape)[0] % rows for emit in item.recipe.emits if emit.name in names}
    return sum(any(first <= row < end for row in at) for first, end in units) > 1


def _joined(units: Sequence[tuple[int, int]], most_rows: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for first, end in units:
        if ranges and end - ranges[-1][0] <= most_rows:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((first, end))
    return ranges


def _tiles(item: StreamItem) -> bool:
    """Whether the checkpoint tensors, in order, are the training tensor from end to end."""
    at = 0
    for emit in item.recipe.emits:
        if emit.start != at:
            return False
        at += emit.numel
    return at * item.wire_dtype.itemsize == item.inputs[0].nbytes


def _fills(item: StreamItem) -> bool:
    """Whether it can be gathered in place with nothing before, between or after its tensors."""
    spec = item.inputs[0]
    return _tiles(item) and (spec.nbytes <= SMALL_BYTES or spec.gathered_bytes == spec.nbytes)
