"""How a plan tells workers where each checkpoint tensor lies: pure, for `plan`.

Most tensors lie in one piece in the memory of the trainer rank beside the worker. Shards that no rank has to gather are
told as what they are: the tensor, counted from its first byte as if it lay in one piece, and who holds which chunk of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from fsdp_ipc.delivery import LocalDelivery
from fsdp_ipc.dtypes import dtype_name
from fsdp_ipc.metadata import Layout, StreamItem
from fsdp_ipc.recipe import Emit

Holders = tuple[tuple[int, ...], ...]
"""By the group rank beside a worker, the group ranks from which it reads chunk 0, 1, ..."""


class TensorRow(NamedTuple):
    """One checkpoint tensor as a worker finds it: bytes `[offset, offset + nbytes)` of an allocation.

    Memory of the trainer's own may be of another dtype than the tensor that is meant: `held` then names it, and the
    worker casts to `dtype`, as the trainer would have, while it copies.

    Where `shards` is not -1 the bytes are those of the whole training tensor, of which every rank's allocation of that
    number holds one chunk of `chunk_bytes` (the last may be shorter), whose first byte is at `base`, or would be if all of
    it lay there; `TransferPlan.holders[shards]` says which rank holds which.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    allocation: int
    offset: int
    held: str = ""
    shards: int = -1
    chunk_bytes: int = 0
    base: int = 0


class Reach:
    """Which shards each worker can read where they lie.

    Args:
        group_ranks: Global ranks of the trainer group, in group order.
        reads: By group rank, the group ranks whose memory the worker beside it can read.

    Attributes:
        tables: The holders of the chunks of every layout that was asked for, by the number that rows name.
    """

    def __init__(self, group_ranks: Sequence[int], reads: Sequence[Collection[int]]) -> None:
        self._ranks = {rank: index for index, rank in enumerate(group_ranks)}
        self._reads = [frozenset(ranks) for ranks in reads]
        self._numbers: dict[int, tuple[Layout, int]] = {}
        self.tables: list[Holders] = []

    def table_of(self, item: StreamItem) -> int:
        """The number of the table that says from where each worker reads each chunk; -1 if there is a worker that can't."""
        spec = item.inputs[0]
        # Ranks that shard a tensor over meshes of their own, each over another one, have no common list of holders.
        if spec.layout.kind != "shard" or not spec.layout.ranks or not item.is_direct or spec.nbytes == 0:
            return -1
        if id(spec.layout) not in self._numbers:
            table = self._table(spec.layout)
            if table is not None and table not in self.tables:
                self.tables.append(table)
            self._numbers[id(spec.layout)] = spec.layout, -1 if table is None else self.tables.index(table)
        return self._numbers[id(spec.layout)][1]

    def _table(self, layout: Layout) -> Holders | None:
        ranks = [self._ranks[rank] for rank in layout.ranks]
        places = {rank: index for index, rank in enumerate(ranks)}
        after = 1
        for size in layout.mesh_shape[layout.axis + 1 :]:
            after *= size
        chunks = layout.mesh_shape[layout.axis]
        firsts = [i for i in range(len(ranks)) if i // after % chunks == 0]
        table = []
        for reader, reads in enumerate(self._reads):
            own = places.get(reader, 0)
            # Any replica of a shard will do; the reader's own comes first, so that replicas share the reading.
            for first in chain((own - own // after % chunks * after,), firsts):
                held = tuple([ranks[first + chunk * after] for chunk in range(chunks)])
                if reads.issuperset(held):
                    table.append(held)
                    break
            else:
                return None
        return tuple(table)


def whole_rows(
    item: StreamItem,
    emits: Sequence[Emit],
    offsets: Sequence[int],
    bucket: int,
    allocation: int,
    *,
    exported: bool,
) -> Iterator[TensorRow]:
    """Rows of tensors that every worker reads in one piece.

    Args:
        item: What they are made of.
        emits: The tensors.
        offsets: First byte of each, in wire dtype.
        bucket: With which they are complete.
        allocation: In which they lie.
        exported: It is memory of the trainer's own, in the dtype that it holds.
    """
    dtype, (held, scale) = dtype_name(item.wire_dtype), _held(item) if exported else ("", 1)
    for emit, offset in zip(emits, offsets, strict=True):
        yield TensorRow(emit.name, dtype, emit.shape, bucket, allocation, offset * scale, held)


def chunk_rows_of(
    item: StreamItem,
    emits: Sequence[Emit],
    table: int,
    bucket: int,
    allocation: int,
    offset: int,
    rows: tuple[int, int] | None,
) -> Iterator[TensorRow]:
    """Rows of tensors that every worker reads from several ranks, each of which has its own chunk in wire dtype.

    Args:
        item: What they are made of.
        emits: The tensors.
        table: Number of the table of who holds which chunk.
        bucket: With which they are complete.
        allocation: In which each rank's chunk lies.
        offset: First byte of it.
        rows: Range of rows of every rank's chunk that lies there; None for all of it.
    """
    spec, dtype = item.inputs[0], dtype_name(item.wire_dtype)
    size = spec.chunk_rows
    base = offset - (rows[0] * spec.row_bytes if rows is not None else 0)
    for emit in emits:
        first = emit.start * item.wire_dtype.itemsize
        where = (bucket, allocation, first, "", table, size * spec.row_bytes, base)
        yield TensorRow(emit.name, dtype, emit.shape, *where)


def local_rows(
    item: StreamItem,
    emits: Sequence[Emit],
    delivery: LocalDelivery,
    bucket: int,
    allocation: int,
    offset: int,
    rows: tuple[int, int] | None,
    *,
    exported: bool,
) -> Iterator[tuple[int, TensorRow]]:
    """Rows of tensors that lie in each rank's own piece, each with the group rank whose worker reads it.

    Args:
        item: What they are made of.
        emits: The tensors, of all ranks.
        delivery: Who reads which.
        bucket: With which they are complete.
        allocation: In which the piece lies.
        offset: First byte of the piece.
        rows: Range of rows of every rank's chunk that lies there; None for all of it.
        exported: It is memory of the trainer's own, in the dtype that it holds.
    """
    spec = item.inputs[0]
    dtype, (held, scale) = dtype_name(item.wire_dtype), _held(item) if exported else ("", 1)
    size = spec.chunk_rows if spec.layout.kind == "shard" else 0
    here = {emit.name for emit in emits}
    for emit, readers, chunk in zip(item.recipe.emits, delivery.readers, delivery.chunks, strict=True):
        if emit.name not in here:
            continue
        skipped = chunk * size + (rows[0] if rows is not None else 0)
        into = emit.start * item.wire_dtype.itemsize - skipped * spec.row_bytes
        at = offset + (into * scale if emit.numel else 0)
        for rank in readers:
            yield rank, TensorRow(emit.name, dtype, emit.shape, bucket, allocation, at, held)


def peer_bytes(
    rows: Sequence[TensorRow], holders: Sequence[Holders], rank: int, nbytes: Sequence[int]
) -> int:
    """Bytes that the worker beside a group rank reads from other ranks' memory, for rows of so many bytes in memory."""
    total = 0
    for row, size in zip(rows, nbytes, strict=True):
        if row.shards >= 0:
            for chunk, holder in enumerate(holders[row.shards][rank]):
                first, end = chunk * row.chunk_bytes, (chunk + 1) * row.chunk_bytes
                if holder != rank:
                    total += max(0, min(end, row.offset + size) - max(first, row.offset))
    return total


def _held(item: StreamItem) -> tuple[str, int]:
    """Dtype in memory, where it is not the wire's, and how many times as wide its elements are."""
    held, wire = item.inputs[0].dtype, item.wire_dtype
    return ("", 1) if held == wire else (dtype_name(held), held.itemsize // wire.itemsize)
