"""What every rank knows about every tensor before any byte moves: names, wire dtypes, full shapes, owners.

All of it is read locally, without a collective, and is the same on every rank of the trainer group, except where
a rank-local module says otherwise (`source`); the plan's digest (`plan`) proves it before the first gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fsdp_ipc.recipe import ParamRecipe

LayoutKind = Literal["whole", "shard", "general", "owned"]


@dataclass(frozen=True)
class Layout:
    """How the trainer ranks hold one training tensor.

    Attributes:
        kind: `"whole"`: every rank holds all of it (replicated DTensor, plain tensor, one-rank mesh).
            `"shard"`: dim 0 is chunked over one mesh axis and whole along the others: one all-gather, in place.
            `"general"`: any other layout that DTensor can redistribute (`Shard(1)`, `_StridedShard`, 2-D sharding).
            `"owned"`: only the ranks in `ranks` hold it, each of them whole; the first broadcasts.
        ranks: Global ranks of the mesh, row-major, or of the owners; empty for `"whole"` plain tensors.
        mesh_shape: Shape of the mesh; empty for plain tensors.
        placements: Placements as torch prints them, one per mesh axis.
        axis: Mesh axis that is gathered for `"shard"`, else -1.
    """

    kind: LayoutKind
    ranks: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()
    axis: int = -1

    @property
    def num_shards(self) -> int:
        """Number of chunks along dim 0 for `"shard"`, else 1."""
        return self.mesh_shape[self.axis] if self.kind == "shard" else 1


WHOLE = Layout("whole")


@dataclass(frozen=True)
class ParamMeta:
    """One checkpoint tensor as it goes over the wire.

    Attributes:
        name: Checkpoint name.
        dtype: Wire dtype.
        shape: Full shape.
        owners: Global ranks that hold a piece of it; empty when every rank of the group holds all of it.
        mesh_shape: Shape of the mesh that holds what it is made of; empty for plain tensors.
        placements: Placements there as torch prints them, one per mesh axis.
    """

    __module__ = "fsdp_ipc"

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Plain dict of JSON types."""
        return {
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "owners": list(self.owners),
            "mesh_shape": list(self.mesh_shape),
            "placements": list(self.placements),
        }


@dataclass(frozen=True)
class TensorSpec:
    """One training tensor: how the trainer holds it and in which dtype it leaves.

    Attributes:
        fqn: Path of the parameter or buffer in the module.
        shape: Full (unsharded) shape.
        dtype: Dtype that the trainer holds.
        wire_dtype: Dtype that is sent.
        layout: How the ranks hold it.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor in wire dtype."""
        return math.prod(self.shape) * self.wire_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along dim 0 in wire dtype."""
        return math.prod(self.shape[1:]) * self.wire_dtype.itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows along dim 0 of every chunk but the last ones, split as `torch.chunk` and `Shard(0)` do; all if it is not split."""
        return -(-self.shape[0] // self.layout.num_shards)

    def rows_in_chunk(self, index: int) -> int:
        """Rows that a chunk really has: fewer at the end, or none."""
        return max(0, min(self.chunk_rows, self.shape[0] - index * self.chunk_rows))

    @property
    def gathered_bytes(self) -> int:
        """Bytes that an in-place all-gather of equal chunks writes: `nbytes` rounded up to whole chunks."""
        if self.layout.kind != "shard":
            return self.nbytes
        return self.chunk_rows * self.layout.num_shards * self.row_bytes


@dataclass(frozen=True)
class StreamItem:
    """One step of the stream: training tensors and the checkpoint tensors that they become.

    Attributes:
        inputs: The training tensors that the recipe needs in full, all of one wire dtype.
        recipe: How they become checkpoint tensors.
        index: Position of the first input among the tensors of the source; the inputs follow each other.
    """

    inputs: tuple[TensorSpec, ...]
    recipe: ParamRecipe
    index: int

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of every emitted tensor."""
        return self.inputs[0].wire_dtype

    @property
    def is_direct(self) -> bool:
        """Whether the full training tensor, as it lies, holds every emitted tensor as a contiguous slice."""
        return self.recipe.transform is None and all(emit.stride is None for emit in self.recipe.emits)

    def metas(self) -> list[ParamMeta]:
        """The checkpoint tensors of this item."""
        held = self.inputs[0].layout
        held_as = (held.ranks, held.mesh_shape, held.placements)
        return [ParamMeta(emit.name, self.wire_dtype, emit.shape, *held_as) for emit in self.recipe.emits]
