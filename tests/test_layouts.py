"""Every way of sharding × {packed in several buckets, back to back, unpacked} × {same dtype, cast}, twice in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.replicas import check_replicas
from fsdp_ipc.source import DTensorSource
from fsdp_ipc.union import unite
from tests.runner import run_ranks
from tests.sharded import Toy, Transfer, assert_same, change, expected, several_buckets, toy


def _fully_shard(model: Toy, **kwargs: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, ignored_params={model.scale}, **kwargs)


def fsdp(model: Toy, world: int) -> None:
    _fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def fsdp_root_only(model: Toy, world: int) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params={model.scale})


def fsdp_dim_1(model: Toy, world: int) -> None:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % world == 0 else None

    _fully_shard(model, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=place)


def hsdp(model: Toy, world: int) -> None:
    _fully_shard(
        model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    )


def fsdp_frozen(model: Toy, world: int) -> None:
    model.blocks[0].requires_grad_(False)
    model.row.requires_grad_(False)
    fsdp(model, world)


def fsdp_ignored(model: Toy, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    plain = {model.scale, model.row, *model.blocks[1].parameters()}
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=plain)


def fsdp_cpu_offload(model: Toy, world: int) -> None:
    _fully_shard(
        model, mesh=init_device_mesh("cpu", (world,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )


def fsdp_mixed_policy(model: Toy, world: int) -> None:
    _fully_shard(
        model, mesh=init_device_mesh("cpu", (world,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    )


def _tensor_parallel(model: Toy, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp(model: Toy, world: int) -> None:
    _tensor_parallel(model, init_device_mesh("cpu", (world,)))


def fsdp_tp(model: Toy, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    _tensor_parallel(model, mesh["tp"])
    _fully_shard(model, mesh=mesh["dp_shard"])


def ddp_tp(model: Toy, world: int) -> None:
    """Each replica has a mesh of its own, which does not cover all ranks."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])


def fsdp_on_sub_meshes(model: Toy, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    _fully_shard(model, mesh=mesh["dp_shard"])


def replicated(model: Toy, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.numel() and module is not model.head:
                setattr(
                    module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
                )
    model.head.weight = model.embed.weight


def fsdp_three_dtypes(model: Toy, world: int) -> None:
    """fp32 masters beside bf16 and fp8 parameters."""
    for block in model.blocks:
        block.to(torch.bfloat16)
        block.norm.to(torch.float32)
    model.blocks[1].down.weight = nn.Parameter(
        model.blocks[1].down.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
    )
    if world > 1:
        fsdp(model, world)


def plain(model: Toy, world: int) -> None:
    pass


LAYOUTS: list[tuple[Callable[[Toy, int], None], tuple[int, ...]]] = [
    (fsdp, (1, 2, 4)),
    (fsdp_root_only, (2,)),
    (fsdp_dim_1, (2, 4)),
    (hsdp, (2, 4)),
    (fsdp_frozen, (2,)),
    (fsdp_ignored, (2,)),
    (fsdp_cpu_offload, (2,)),
    (fsdp_mixed_policy, (2,)),
    (fsdp_three_dtypes, (2, 4)),
    (tp, (2, 4)),
    (fsdp_tp, (4,)),
    (ddp_tp, (4,)),
    (fsdp_on_sub_meshes, (4,)),
    (replicated, (2,)),
    (plain, (2,)),
]


def _check(shard: Callable[[Toy, int], None], group: TrainerGroup) -> None:
    reference, model = toy(), toy()
    shard(model, group.size)
    if shard is fsdp_three_dtypes:
        shard(reference, 1)
    casts: tuple[torch.dtype | None, ...] = (None, torch.bfloat16)
    sources = {dtype: DTensorSource(model, dtype=dtype) for dtype in casts}
    transfers = {}
    for dtype, source in sources.items():
        items, tensors = unite(source.items(), source.tensors(), group)
        check_replicas(items, tensors, group)
        packed = several_buckets(items)
        for name, limits in {
            "packed": packed,
            "one bucket": PlanLimits(),
            "back to back": PlanLimits(bucket_bytes=packed.bucket_bytes, back_to_back=True),
            "unpacked": PlanLimits(packed=False),
        }.items():
            transfers[dtype, name] = Transfer(items, tensors, limits=limits, group=group)
        assert transfers[dtype, "packed"].plan.num_buckets >= 4
    group.vote("plan", same=[t.plan.digest for t in transfers.values()])
    for _ in range(2):
        for (dtype, name), move in transfers.items():
            got = move.run(sources[dtype].tensors())
            # Widest first within a bucket, on a wire without offsets.
            assert_same(got, expected(reference, dtype), order=name != "back to back")
        for dtype, source in sources.items():
            assert_same(dict(source), expected(reference, dtype))
        change(reference)
        change(model)


def _job(rank: int, world: int, layouts: list[Callable[[Toy, int], None]]) -> None:
    group = TrainerGroup(dist.group.WORLD)
    for shard in layouts:
        try:
            _check(shard, group)
        except Exception as error:
            raise AssertionError(f"layout {shard.__name__}") from error


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_arrives_bit_for_bit(world: int) -> None:
    """One start of the ranks for all layouts: starting them takes longer than a layout."""
    run_ranks(_job, world, [shard for shard, worlds in LAYOUTS if world in worlds])


def _uneven_tp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for width in (3, 4, 5, 6, 7):

        def build(width: int = width) -> nn.Module:
            torch.manual_seed(width)
            return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))

        reference, model = build(), build()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_shard"])
        for dtype in (None, torch.bfloat16):
            source = DTensorSource(model, dtype=dtype)
            kinds = {item.inputs[0].layout.kind for item in source.items()}
            assert "general" in kinds  # strided shards are never joined by hand
            for limits in (PlanLimits(), PlanLimits(packed=False)):
                move = Transfer(source.items(), source.tensors(), limits=limits)
                assert_same(move.run(source.tensors()), expected(reference, dtype))


def test_field_D8_fsdp_over_tp_with_uneven_widths() -> None:
    """https://github.com/pytorch/pytorch/issues/129206, https://github.com/pytorch/pytorch/issues/168134."""
    run_ranks(_uneven_tp, 4)


def _scalars(rank: int, world: int) -> None:
    model = toy()
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(toy(), mesh=init_device_mesh("cpu", (world,)))
    fsdp(model, world)
    source = DTensorSource(model)
    got = Transfer(source.items(), source.tensors()).run(source.tensors())
    assert got["scale"].shape == () and got["shift"].shape == () and got["shift"].dtype == torch.float64
    assert got["nothing"].shape == (0, 4) and got["row"].shape == (1, 10)
    assert torch.equal(got["row"], toy().row)


def test_field_D10_scalars_empty_tensors_and_one_row_over_two_ranks() -> None:
    """https://github.com/komikndr/raylight/issues/5."""
    run_ranks(_scalars, 2)
