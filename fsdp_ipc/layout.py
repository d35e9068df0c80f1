"""How one tensor is sharded, read from the tensor itself without a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_ipc.metadata import WHOLE, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_of(name: str, tensor: torch.Tensor) -> Layout:
    """The layout of a parameter or buffer.

    Args:
        name: For the error.
        tensor: A `DTensor`, or a plain tensor, which counts as whole on every rank.

    Raises:
        ValueError: A placement from which no full tensor can be made (`Partial`, or one that we don't know).
    """
    if not isinstance(tensor, DTensor):
        return WHOLE
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if not _is_known(placement):
            raise ValueError(
                f"{name}: placement {placement} of {placements} can't be sent: expected Shard, _StridedShard or "
                "Replicate on every mesh axis (a Partial tensor has no value until it is reduced; redistribute it first)"
            )
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    shape = tuple(int(n) for n in mesh.mesh.shape)
    names = tuple(str(p) for p in placements)
    sharded = [i for i, p in enumerate(placements) if type(p) is not Replicate and shape[i] > 1]
    if not sharded:
        return Layout("whole", ranks, shape, names)
    # isinstance(p, Shard) would not do: _StridedShard orders the rows differently.
    only = placements[sharded[0]]
    if len(sharded) == 1 and type(only) is Shard and only.dim == 0 and tensor.ndim > 0:
        return Layout("shard", ranks, shape, names, axis=sharded[0])
    return Layout("general", ranks, shape, names)


def _is_known(placement: Placement) -> bool:
    return type(placement) in (Shard, Replicate) or type(placement).__name__ == "_StridedShard"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece, detached; an empty tensor where the rank holds none."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


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
