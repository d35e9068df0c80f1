"""What can't be sent is refused by name before anything moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.plan import PlanLimits, build_plan
from fsdp_ipc.source import DTensorSource
from tests.runner import run_ranks


class Tagged(torch.Tensor):
    """A tensor subclass, as quantised tensors are."""


class Packed4Bit(nn.Parameter):
    """A parameter subclass whose data is packed, as 4-bit parameters are."""


class Ragged(Placement):
    """A placement of somebody else."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return type(other) is Ragged


def _module(tensor: torch.Tensor, *, buffer: bool = False) -> nn.Module:
    module = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    if buffer:
        module["layer"].register_buffer("odd", tensor)
    else:
        module["layer"].register_parameter("odd", tensor)  # type: ignore[arg-type]
    return module


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def test_subclasses_are_refused() -> None:
    tagged = torch.randn(3, 2).as_subclass(Tagged)
    with pytest.raises(TypeError, match=r"layer\.odd: a Tagged can't be sent"):
        DTensorSource(_module(tagged, buffer=True))
    with pytest.raises(TypeError, match=r"layer\.odd: a Tagged can't be sent"):
        DTensorSource(_module(_parameter(tagged)))
    packed = Packed4Bit(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"layer\.odd: a Packed4Bit can't be sent"):
        DTensorSource(_module(packed))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_has_no_plain_bytes_is_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"layer\.odd: dtype torch\.qint8 cannot be sent"):
        DTensorSource(_module(quantised, buffer=True))
    with pytest.raises(TypeError, match=r"layer\.odd: dtype torch\.complex64 cannot be sent"):
        DTensorSource(_module(_parameter(torch.zeros(2, dtype=torch.complex64))))
    with pytest.raises(TypeError, match=r"layer\.odd: layout torch\.sparse_coo can't be sent"):
        DTensorSource(_module(torch.eye(3).to_sparse(), buffer=True))


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"layer\.odd: is on the meta device"):
        DTensorSource(_module(_parameter(torch.empty(3, 2, device="meta"))))
    with torch.device("meta"):
        lazy = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"weight: is on the meta device"):
        DTensorSource(lazy)


def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        DTensorSource(nn.ReLU())
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got dict"):
        DTensorSource({})  # type: ignore[arg-type]


def _on_two_ranks(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (world,))

    def sent_as(*placements: Any) -> None:
        local = torch.ones(2, 2)
        DTensorSource(_module(_parameter(DTensor.from_local(local, mesh, placements, run_check=False))))

    sent_as(Shard(0))
    sent_as(Replicate())
    with pytest.raises(ValueError, match=r"layer\.odd: placement Partial.*redistribute it first"):
        sent_as(Partial())

    strange = _parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False))
    strange._spec = copy.copy(strange._spec)
    strange._spec.placements = (Ragged(),)
    with pytest.raises(ValueError, match=r"layer\.odd: placement .*Ragged.* can't be sent"):
        DTensorSource(_module(strange))

    tagged = _parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False))
    tagged._local_tensor = tagged._local_tensor.as_subclass(Tagged)
    with pytest.raises(TypeError, match=r"layer\.odd: a Tagged can't be sent"):
        DTensorSource(_module(tagged))

    alone = DeviceMesh("cpu", [0])
    piece = torch.ones(2, 2) if rank == 0 else torch.empty(0)
    outside = DTensor.from_local(
        piece, alone, [Shard(0)], run_check=False, shape=torch.Size((2, 2)), stride=(2, 1)
    )
    if rank == 0:
        source = DTensorSource(_module(_parameter(outside)))
        build_plan(source.items(), PlanLimits(), group_ranks=[0, 1])
    else:
        with pytest.raises(
            ValueError, match=r"layer\.odd: this rank \(1\) is outside the tensor's mesh of ranks \[0\]"
        ):
            DTensorSource(_module(_parameter(outside)))

    sharded = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
    source = DTensorSource(_module(_parameter(sharded)))
    with pytest.raises(
        ValueError, match=r"layer\.odd is held by global ranks \[1\], which are not in the trainer group"
    ):
        build_plan(source.items(), PlanLimits(), group_ranks=[0])
    shards = {"layer.odd": (mesh, [Shard(0)])}
    with pytest.raises(ValueError, match=r"declared as a plain shard, but it is a DTensor"):
        DTensorSource(_module(_parameter(sharded)), plain_shards=shards)
    if rank == 1:
        with pytest.raises(ValueError, match=r"outside the mesh"):
            DTensorSource(
                _module(_parameter(torch.ones(2, 2))), plain_shards={"layer.odd": (alone, [Shard(0)])}
            )
    group.vote("done")


def test_placements_and_meshes_that_cannot_be_gathered_are_refused() -> None:
    run_ranks(_on_two_ranks, 2)
