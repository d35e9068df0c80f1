"""What every rank knows about every tensor before any byte moves: names, wire dtypes, full shapes, owners.

All of it is read locally, without a collective, and is the same on every rank of the trainer group, except where
a rank-local module says otherwise (`source`); the plan's digest (`plan`) proves it before the first gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

LayoutKind = Literal["whole", "shard", "general", "owned"]
Transform = Callable[[torch.Tensor], Sequence[torch.Tensor]]


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
    """

    __module__ = "fsdp_ipc"

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] = ()

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
        }


@dataclass(frozen=True)
class Emit:
    """One checkpoint tensor that leaves a full training tensor.

    Attributes:
        name: Checkpoint name.
        shape: Full shape of the checkpoint tensor.
        start: First element, in the contiguous full training tensor, of the contiguous slice that is this tensor;
            ignored where the training tensor has a `transform`.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    """One training tensor and the checkpoint tensors that it becomes.

    Attributes:
        fqn: Path of the parameter or buffer in the module.
        shape: Full (unsharded) shape.
        dtype: Dtype that the trainer holds.
        wire_dtype: Dtype that is sent.
        layout: How the ranks hold it.
        emits: Checkpoint tensors, contiguous slices of the full tensor in wire dtype unless `transform` is set.
        transform: Full tensor (wire dtype) to checkpoint tensors, in the order of `emits`, for what is no slice.
        expert_dim0: Dim 0 counts experts, so a rank's own piece may be delivered rank-locally.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    layout: Layout
    emits: tuple[Emit, ...]
    transform: Transform | None = field(default=None, compare=False)
    expert_dim0: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor in wire dtype."""
        return self.numel * self.wire_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along dim 0 in wire dtype."""
        return math.prod(self.shape[1:]) * self.wire_dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes that an in-place all-gather of equal chunks writes: `nbytes` rounded up to whole chunks."""
        if self.layout.kind != "shard":
            return self.nbytes
        return chunk_rows(self.shape[0], self.layout.num_shards) * self.layout.num_shards * self.row_bytes

    def metas(self) -> list[ParamMeta]:
        """The checkpoint tensors of this training tensor."""
        owners = self.layout.ranks
        return [ParamMeta(e.name, self.wire_dtype, e.shape, owners) for e in self.emits]


def chunk_rows(rows: int, num_chunks: int) -> int:
    """Rows of every chunk but the last ones when dim 0 is split as `torch.chunk` and `Shard(0)` do."""
    return -(-rows // num_chunks)
