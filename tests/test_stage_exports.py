"""Exported parameters that moved are noticed before a sync, by what the stage remembers of them."""

from __future__ import annotations

from types import SimpleNamespace
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
    exported: list[int] = []

    def export(tensor: torch.Tensor, *, key: str) -> Any:
        del key
        if not tensor.is_contiguous():
            raise ValueError("expected a contiguous tensor")
        exported.append(tensor.data_ptr())
        return SimpleNamespace()

    handles.export = export  # type: ignore[assignment]  # CPU tensors have no handle of their own
    stage = Stage(
        DTensorSource(model),
        TrainerGroup(dist.group.WORLD, timeout_s=30.0),
        torch.device("cpu"),
        "cpu:0",
        PlanLimits(),
        export_parameters=True,
    )
    stage._export_parameters = True  # which is for GPUs only
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
    model.plain.weight.data = model.plain.weight.data.clone()
    look("plain data moved")
    weight: Any = model.sharded.weight
    weight._local_tensor = weight._local_tensor.clone()
    look("local tensor exchanged")
    look("nothing again")
    with torch.no_grad():
        model.plain.weight += 1
    look("values only")
    model.plain.bias = nn.Parameter(model.plain.bias.detach().clone())
    look("parameter exchanged")
    look("nothing at last")
    model.plain.weight.data = model.plain.weight.data.t()
    try:
        stage.refresh(None, ("same",))
        told.append(("turned in place", False))
    except Exception as error:
        told.append(("turned in place", "contiguous" in str(error)))
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
        ("turned in place", True),
    ]
