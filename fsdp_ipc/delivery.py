"""Which items each worker gets from the trainer rank on its own GPU, so that they never travel between ranks.

Pure, for `plan`. An expert tensor is delivered rank-locally where every worker that holds it sits on the GPU of a
trainer rank that holds it, too. Whatever does not fit is delivered to all workers, which is always right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fsdp_ipc.metadata import Layout, StreamItem


@dataclass(frozen=True)
class LocalDelivery:
    """Who gets what of one item.

    Attributes:
        readers: By emit, the group ranks whose workers hold it.
        chunks: By emit, the chunk of dim 0 that it lies in; 0 for a tensor that its owners hold whole.
    """

    readers: tuple[tuple[int, ...], ...]
    chunks: tuple[int, ...]


class Readers(Protocol):
    """Who reads an expert tensor."""

    def readers(self, name: str) -> tuple[int, ...]:
        """Group ranks whose workers hold the checkpoint tensor; none if it is no expert tensor."""


class HeldExperts:
    """The experts that each worker says it holds.

    Args:
        experts: By group rank, for the worker on its GPU: prefix of a layer's experts in checkpoint names, such as
            `model.layers.0.mlp.experts`, to the global ids that it holds.
    """

    def __init__(self, experts: Sequence[Mapping[str, Sequence[int]]]) -> None:
        self._experts = [{prefix: list(ids) for prefix, ids in held.items()} for held in experts]
        readers: dict[tuple[str, str], list[int]] = {}
        for rank, held in enumerate(self._experts):
            for prefix, ids in held.items():
                for expert in ids:
                    readers.setdefault((prefix, str(expert)), []).append(rank)
        self._readers = {key: tuple(ranks) for key, ranks in readers.items()}

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HeldExperts) and self._experts == other._experts)

    __hash__ = None  # type: ignore[assignment]

    def readers(self, name: str) -> tuple[int, ...]:
        """Group ranks whose workers hold the checkpoint tensor; none if it is no expert tensor."""
        prefix, _, rest = name.partition(".experts.")
        return self._readers.get((f"{prefix}.experts", rest.partition(".")[0]), ())


@dataclass(frozen=True)
class ExpertPlacement:
    """How a server spreads the experts of every layer over its workers, where the workers themselves can't be asked.

    Attributes:
        strategy: `"linear"` (neighbours together, the first workers get what is left over) or `"round_robin"`.
        num_workers: Expert-parallel workers; worker i is the one beside group rank i.
    """

    strategy: Literal["linear", "round_robin"]
    num_workers: int

    def held(self, items: Sequence[StreamItem]) -> HeldExperts:
        """What each worker holds of the experts that the stream names one by one.

        A layer is left out, and so delivered to all, unless its experts are numbered from 0 without a gap.
        """
        numbers: dict[str, set[int]] = {}
        for item in items:
            for emit in item.recipe.emits:
                prefix, dot, rest = emit.name.partition(".experts.")
                if dot and (number := rest.partition(".")[0]).isdecimal():
                    numbers.setdefault(f"{prefix}.experts", set()).add(int(number))
        held: list[dict[str, range]] = [{} for _ in range(self.num_workers)]
        for prefix, found in numbers.items():
            if found == set(range(len(found))):
                for worker in range(self.num_workers):
                    held[worker][prefix] = self._experts(worker, len(found))
        return HeldExperts(held)

    def _experts(self, worker: int, number: int) -> range:
        if self.strategy == "round_robin":
            return range(worker, number, self.num_workers)
        share, left = divmod(number, self.num_workers)
        first = worker * share + min(worker, left)
        return range(first, first + share + (worker < left))


def local_deliveries(
    items: Sequence[StreamItem], group_ranks: Sequence[int], wanted: Readers | None, *, back_to_back: bool
) -> dict[int, LocalDelivery]:
    """By item index, the items that can be delivered rank-locally; linear in the names and their readers.

    Args:
        items: The stream.
        group_ranks: Global ranks of the trainer group, in group order.
        wanted: Who reads which expert tensor, None if every worker reads everything.
        back_to_back: The wire has no offsets, so each rank's part must be filled from end to end.
    """
    if wanted is None:
        return {}
    holdings: dict[int, list[int | None]] = {}
    deliveries = {}
    for index, item in enumerate(items):
        layout = item.inputs[0].layout
        if not item.is_direct or layout.kind not in ("shard", "owned") or item.inputs[0].nbytes == 0:
            continue
        readers = []
        for emit in item.recipe.emits:
            readers.append(wanted.readers(emit.name))
            if not readers[-1]:
                break  # no expert, or one that no worker asks for: it would vanish silently
        if not readers or not readers[-1]:
            continue
        held = holdings.get(id(layout))
        if held is None:
            held = holdings[id(layout)] = _chunks_of(layout, group_ranks)
        delivery = _delivery(item, tuple(readers), held)
        if delivery is not None and not (back_to_back and _has_holes(item, delivery, held)):
            deliveries[index] = delivery
    return deliveries


def _delivery(
    item: StreamItem, readers: tuple[tuple[int, ...], ...], held: list[int | None]
) -> LocalDelivery | None:
    spec = item.inputs[0]
    rows = spec.chunk_rows if spec.layout.kind == "shard" else 0
    chunks = []
    for emit, ranks in zip(item.recipe.emits, readers, strict=True):
        chunk = 0
        if rows:
            first, end = emit.rows(spec.shape)
            chunk = first // rows
            if max(first, end - 1) // rows != chunk:
                return None
        if any(held[rank] != chunk for rank in ranks):
            return None
        chunks.append(chunk)
    return LocalDelivery(readers, tuple(chunks))


def _has_holes(item: StreamItem, delivery: LocalDelivery, held: list[int | None]) -> bool:
    """Whether some rank's part would not be filled from end to end by what its worker reads."""
    spec = item.inputs[0]
    if spec.layout.kind != "shard" or spec.gathered_bytes != spec.nbytes or None in held:
        return True
    filled = [0] * len(held)
    for emit, readers in zip(item.recipe.emits, delivery.readers, strict=True):
        for rank in readers:
            filled[rank] += emit.numel * item.wire_dtype.itemsize
    return any(nbytes != spec.nbytes // spec.layout.num_shards for nbytes in filled)


def _chunks_of(layout: Layout, group_ranks: Sequence[int]) -> list[int | None]:
    """By group rank, the chunk that it holds; None where it holds none."""
    position = {rank: index for index, rank in enumerate(layout.ranks)}
    if layout.kind == "owned":
        return [0 if rank in position else None for rank in group_ranks]
    after = 1
    for size in layout.mesh_shape[layout.axis + 1 :]:
        after *= size
    size = layout.mesh_shape[layout.axis]
    return [position[rank] // after % size if rank in position else None for rank in group_ranks]
