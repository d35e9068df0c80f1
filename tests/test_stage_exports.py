"""Exported parameters that moved are noticed before a sync, by what the stage remembers of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ipc import DTensorSource, handles
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.stage import Stage
from tests.runner import run_ranks
from tests.sharded import into_shared_memory


class Both(nn.Module):
    """Parameters that are DTensors, and some that FSDP2 was told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Linear(8, 8)
        self.plain = nn.Linear(8, 8)


def _moves(rank: int, world_size: int) -> list[tuple[str, bool]]:
    del rank
    torch.manual_seed(0)
    model = Both()
    fully_shard(model.sharded, mesh=init_device_mesh("cpu", (world_size,)))
    buffers = into_shared_memory(model)
    exported: list[int] = []
    export = handles.export

    def noting(tensor: torch.Tensor, *, key: str) -> handles.IpcHandle:
        exported.append(tensor.data_ptr())
        return export(tensor, key=key)

    handles.export = noting

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        """A copy elsewhere in memory that others can read."""
        buffers.append(handles.allocate(tensor.nbytes, torch.device("cpu"), key="cpu:0"))
        return buffers[-1].bytes.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    stage = Stage(
        DTensorSource(model),
        TrainerGroup(dist.group.WORLD, timeout_s=30.0),
        torch.device("cpu"),
        "cpu:0",
        PlanLimits(),
        export_parameters=True,
    )
    told: list[tuple[str, bool]] = []

    def look(what: str) -> None:
        exported.clear()
        changed = stage.refresh(None, ("same",))
        own = [model.sharded.weight._local_tensor, model.sharded.bias._local_tensor]  # type: ignore[union-attr]
        own += [model.plain.weight, model.plain.bias]
        assert not changed or sorted(exported) == sorted(t.data_ptr() for t in own), what
        told.append((what, changed))

    look("first")
    look("nothing")
    model.plain.weight.data = shared(model.plain.weight.data)
    look("plain data moved")
    weight: Any = model.sharded.weight
    weight._local_tensor = shared(weight._local_tensor)
    look("local tensor exchanged")
    look("nothing again")
    with torch.no_grad():
        model.plain.weight += 1
    look("values only")
    model.plain.bias = nn.Parameter(shared(model.plain.bias.detach()))
    look("parameter exchanged")
    look("nothing at last")
    model.plain.weight.data = (
        model.plain.weight.data.t()
    )  # no longer in one piece: it goes through a slot from now on
    assert stage.refresh(None, ("same",))
    assert [len(bucket.segments) for bucket in stage.plan.buckets] == [1]
    model.plain.weight.data = model.plain.weight.data.clone()
    assert not stage.refresh(None, ("same",))
    model.plain.bias.data = model.plain.bias.data.clone()  # nor this, where no other process can read it
    assert stage.refresh(None, ("same",))
    assert [len(bucket.segments) for bucket in stage.plan.buckets] == [2]
    stage.close()
    return told


def test_memory_that_moved_is_exported_again_and_no_other() -> None:
    (told,) = run_ranks(_moves, 1)
    assert told == [
        ("first", True),
        ("nothing", False),
        ("plain data moved", True),
        ("local tensor exchanged", True),
        ("nothing again", False),
        ("values only", False),
        ("parameter exchanged", True),
        ("nothing at last", False),
    ]
