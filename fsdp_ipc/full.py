"""One sharded tensor made whole, for layouts that no in-place gather fits, and for reading a source directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fsdp_ipc.group import all_gather
from fsdp_ipc.layout import local_of
from fsdp_ipc.metadata import StreamItem, TensorSpec

Held = torch.Tensor | Callable[[], torch.Tensor]
"""A rank's DTensor or plain tensor, or a function that makes it; the function may use its memory again when called
the next time."""

Broadcast = Callable[[torch.Tensor, int], None]
"""All ranks, collective: the tensor of a global rank into everybody's (`TrainerGroup.broadcast`)."""

# Not every backend's collectives know every dtype; those that don't travel as one of the same size.
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_CARRIED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Part(NamedTuple):
    """This rank's piece of a tensor in wire dtype, and the tensor that it is a piece of."""

    local: torch.Tensor
    held: torch.Tensor


def now(held: Held) -> torch.Tensor:
    """The tensor itself."""
    return held if isinstance(held, torch.Tensor) else held()


@torch.no_grad()
def part_of(spec: TensorSpec, held: Held, device: torch.device | None = None) -> Part:
    """This rank's piece, cast and on `device` (default: its own); new memory for what a function made.

    Not collective.
    """
    tensor = now(held)
    local = local_of(tensor)
    copy = not isinstance(held, torch.Tensor)
    device = local.device if device is None else device
    return Part(local.to(device=device, dtype=spec.wire_dtype, copy=copy), tensor)


@torch.no_grad()
def assemble(spec: TensorSpec, part: Part, broadcast: Broadcast | None = None) -> torch.Tensor:
    """All ranks of the tensor's mesh, collective unless the tensor is whole: the full tensor in wire dtype.

    Args:
        spec: What the tensor is.
        part: This rank's piece.
        broadcast: For a tensor that only some ranks own.

    Returns:
        Contiguous tensor of `spec.shape`; new memory unless it is whole and fits as it is.
    """
    local, held = part
    kind = spec.layout.kind
    if spec.nbytes == 0:  # DTensor itself fails to redistribute some empty ones
        return torch.empty(spec.shape, dtype=spec.wire_dtype, device=local.device)
    if kind == "whole":
        return local.contiguous()
    if kind == "owned":
        if broadcast is None:
            raise ValueError(
                f"{spec.fqn}: a tensor that only ranks {spec.layout.ranks} own needs the trainer group"
            )
        owns = dist.get_rank() == spec.layout.ranks[0]
        full = local.contiguous() if owns else torch.empty(spec.shape, dtype=local.dtype, device=local.device)
        broadcast(as_bytes(full), spec.layout.ranks[0])
        return full
    if not isinstance(held, DTensor):
        raise TypeError(
            f"{spec.fqn}: planned as a DTensor {spec.layout.placements}, is a {type(held).__name__} now"
        )
    mesh = held.device_mesh
    if kind == "shard":
        axis, chunks = spec.layout.axis, spec.layout.num_shards
        rows = spec.chunk_rows
        out = torch.empty((chunks, rows, *spec.shape[1:]), dtype=spec.wire_dtype, device=local.device)
        own = out[mesh.get_local_rank(axis)]
        if local.numel():
            own[: local.shape[0]].copy_(local)
        all_gather(as_bytes(out), as_bytes(own), mesh.get_group(axis))
        return out.view(-1, *spec.shape[1:])[: spec.shape[0]]
    carried = local if spec.wire_dtype in _CARRIED else local.view(_CARRIERS[spec.wire_dtype.itemsize])
    piece = DTensor.from_local(
        carried, mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
    full = piece.redistribute(placements=[Replicate()] * mesh.ndim).to_local().contiguous()
    return full.view(spec.wire_dtype)


def full_tensors(item: StreamItem, held: Sequence[Held]) -> Iterator[tuple[str, torch.Tensor]]:
    """All ranks, collective: the checkpoint tensors of one item, each in memory of its own or a view of it."""
    full = [assemble(spec, part_of(spec, tensor)) for spec, tensor in zip(item.inputs, held, strict=True)]
    for emit, made in zip(item.recipe.emits, item.recipe.apply(full), strict=True):
        yield emit.name, made


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Flat bytes of a contiguous tensor: collectives then work alike for every dtype."""
    return tensor.view(-1).view(torch.uint8)
