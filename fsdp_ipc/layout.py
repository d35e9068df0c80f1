"""How one tensor is sharded, read from the tensor itself without a collective."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_ipc.metadata import WHOLE, Layout, LayoutKind

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_of(name: str, tensor: torch.Tensor) -> Layout:
    """The layout of a parameter or buffer.

    Args:
        name: For the error.
        tensor: A `DTensor`, or a plain tensor, which counts as whole on every rank.

    Raises:
        ValueError: A placement from which no full tensor can be made (`Partial`, or one that we don't know), or this
            rank is outside the tensor's mesh.
    """
    if not isinstance(tensor, DTensor):
        return WHOLE
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if not _is_known(placement):
            raise ValueError(
                f"{name}: placement {placement!r} of {placements!r} can't be sent: expected Shard, _StridedShard or "
                "Replicate on every mesh axis (a Partial tensor has no value until it is reduced; redistribute it first)"
            )
    ranks, shape = _mesh_of(mesh)
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name}: this rank ({dist.get_rank()}) is outside the tensor's mesh of ranks {list(ranks)[:16]}: it holds "
            "no piece of it and can't take part in gathering it. Leave such a module out on this rank"
        )
    names = tuple(str(p) for p in placements)
    sharded = [i for i, p in enumerate(placements) if type(p) is not Replicate and shape[i] > 1]
    if not sharded:
        return _layout("whole", ranks, shape, names, -1)
    # isinstance(p, Shard) would not do: _StridedShard orders the rows differently.
    only = placements[sharded[0]]
    if len(sharded) == 1 and type(only) is Shard and only.dim == 0 and tensor.ndim > 0:
        return _layout("shard", ranks, shape, names, sharded[0])
    return _layout("general", ranks, shape, names, -1)


@functools.lru_cache(maxsize=64)
def _mesh_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks, row-major, and shape: one tuple for all tensors of a mesh, which may have thousands of ranks."""
    return tuple(int(r) for r in mesh.mesh.flatten().tolist()), tuple(int(n) for n in mesh.mesh.shape)


@functools.lru_cache(maxsize=1024)
def _layout(
    kind: LayoutKind, ranks: tuple[int, ...], shape: tuple[int, ...], placements: tuple[str, ...], axis: int
) -> Layout:
    """The one object for all tensors with this layout, so that what is done once a layout can go by identity."""
    return Layout(kind, ranks, shape, placements, axis)


def _is_known(placement: Placement) -> bool:
    return type(placement) in (Shard, Replicate) or type(placement).__name__ == "_StridedShard"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece, detached; an empty tensor where the rank holds none."""
    # to_local() would note an autograd step for each of hundreds of parameters.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


class LocalTensors:
    """This rank's pieces of thousands of tensors, taken anew at every sync with no loop of Python's.

    Args:
        tensors: DTensors and plain tensors; the pieces come in another order, which is always the same.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.wrapped = [t for t in tensors if isinstance(t, DTensor)]
        self._plain = [t for t in tensors if not isinstance(t, DTensor)]

    def now(self) -> list[torch.Tensor]:
        """The pieces, not detached."""
        return [*map(_LOCAL, self.wrapped), *self._plain]


_LOCAL = operator.attrgetter("_local_tensor")


def as_dtensor(name: str, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A plain tensor that the user declared to be this rank's shard, as the DTensor that it stands for.

    Raises:
        ValueError: The tensor is a DTensor already, or this rank is not in the mesh.
    """
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"{name}: declared as a plain shard, but it is a DTensor already ({tensor.placements})"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name}: this rank is outside the mesh {mesh} that it was declared on")
    return DTensor.from_local(tensor.detach(), mesh, list(placements), run_check=False)
