"""Experts sharded over an `ep` axis, held as plain shards, or spread over the ranks as modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.experts import HALVES
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.metadata import ParamMeta
from fsdp_ipc.naming import naming_for
from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.replicas import check_replicas
from fsdp_ipc.source import DTensorSource
from fsdp_ipc.union import place_tensors, unite
from tests.runner import run_ranks
from tests.sharded import Transfer, assert_same, change, expected, several_buckets

EXPERTS, WIDTH, INNER = 8, 6, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.mlp.experts.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def moe() -> Moe:
    torch.manual_seed(2)
    return Moe()


def experts_of(model: Moe) -> list[tuple[nn.Module, str]]:
    return [(layer.mlp.experts, key) for layer in model.layers for key in ("gate_up_proj", "down_proj")]


def unfused(reference: Moe, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Per-expert tensors, gate rows before up rows."""
    wanted = {}
    for name, tensor in reference.state_dict().items():
        kept = dtype is None or name.endswith("gate.weight")
        tensor = tensor if kept else tensor.to(dtype)
        prefix = name.rpartition(".")[0]
        for expert in range(EXPERTS if "experts" in name else 0):
            if name.endswith("gate_up_proj"):
                wanted[f"{prefix}.{expert}.gate_proj.weight"] = tensor[expert, :INNER]
                wanted[f"{prefix}.{expert}.up_proj.weight"] = tensor[expert, INNER:]
            else:
                wanted[f"{prefix}.{expert}.down_proj.weight"] = tensor[expert]
        if "experts" not in name:
            wanted[name] = tensor
    return wanted


def _check_both_namings(model: Moe, reference: Moe, group: TrainerGroup, **source_args: Any) -> None:
    for dtype in (None, torch.bfloat16):
        fused = DTensorSource(model, dtype=dtype, **source_args)
        single = DTensorSource(model, dtype=dtype, naming=naming_for(model, experts=HALVES), **source_args)
        for source, wanted in ((fused, expected(reference)), (single, unfused(reference, dtype))):
            if source is fused:
                wanted = {
                    n: t if "gate.weight" in n or dtype is None else t.to(dtype) for n, t in wanted.items()
                }
            items, tensors = unite(source.items(), source.tensors(), group)
            check_replicas(items, tensors, group)
            for limits in (several_buckets(items), PlanLimits(packed=False)):
                move = Transfer(items, tensors, limits=limits, group=group)
                group.vote("plan", same=[move.plan.digest])
                assert_same(
                    move.run(place_tensors(items, source.items(), source.tensors())), wanted, order=False
                )


def _torchtitan(rank: int, world: int) -> None:
    """Experts on (efsdp, ep), everything else on the flat mesh."""
    group = TrainerGroup(dist.group.WORLD)
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    sibling = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("efsdp", "ep"))
    for dim in (0, 1):
        reference, model = moe(), moe()
        for experts, key in experts_of(model):
            held = distribute_tensor(getattr(experts, key).detach(), sibling["ep"], [Shard(0)])
            setattr(experts, key, nn.Parameter(held))
        for layer in model.layers:
            fully_shard(
                layer.mlp.experts, mesh=sibling["efsdp"], shard_placement_fn=lambda p, dim=dim: Shard(dim)
            )
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
        experts, key = experts_of(model)[0]
        kinds = [type(p).__name__ for p in getattr(experts, key).placements]
        assert kinds == (["_StridedShard", "Shard"] if dim == 0 else ["Shard", "Shard"])
        _check_both_namings(model, reference, group)
        change(model)
        change(reference)
        _check_both_namings(model, reference, group)


def test_field_D7_experts_sharded_twice_on_dim_0_or_on_two_dims() -> None:
    """https://github.com/pytorch/torchtitan/pull/1561."""
    run_ranks(_torchtitan, 4)


def _metadata(rank: int, world: int) -> list[ParamMeta]:
    model = moe()
    flat = init_device_mesh("cpu", (world,))
    sibling = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "ep"))
    ignored = set()
    for experts, key in experts_of(model):
        held = distribute_tensor(getattr(experts, key).detach(), sibling, [Replicate(), Shard(0)])
        setattr(experts, key, nn.Parameter(held))
        ignored.add(getattr(experts, key))
    fully_shard(model, mesh=flat, ignored_params=ignored)
    model.register_buffer("bias", torch.zeros(3))
    with CommDebugMode() as counted:
        metas = DTensorSource(model, naming=naming_for(model, experts=HALVES)).metadata()
    assert counted.get_total_counts() == 0
    return metas


def test_owners_mesh_and_placements_are_known_on_every_rank() -> None:
    first, *others = run_ranks(_metadata, 4)
    assert all(metas == first for metas in others)
    by_name = {meta.name: meta for meta in first}
    expert = by_name["layers.1.mlp.experts.7.up_proj.weight"]
    assert (expert.owners, expert.mesh_shape, expert.placements) == ((0, 1, 2, 3), (2, 2), ("R", "S(0)"))
    norm = by_name["layers.0.norm.weight"]
    assert (norm.owners, norm.mesh_shape, norm.placements) == ((0, 1, 2, 3), (4,), ("S(0)",))
    bias = by_name["bias"]
    assert (bias.owners, bias.mesh_shape, bias.placements) == ((), (), ())
    assert json.loads(json.dumps(expert.to_json()))["mesh_shape"] == [2, 2]


def _sibling_meshes(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD)
    flat = init_device_mesh("cpu", (world,))
    sibling = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "ep"))
    for mesh, placements in (
        (sibling, [Replicate(), Shard(0)]),
        (sibling["ep"], [Shard(0)]),  # a mesh of its own for each half of the ranks
    ):
        reference, model = moe(), moe()
        ignored = set()
        for experts, key in experts_of(model):
            held = nn.Parameter(distribute_tensor(getattr(experts, key).detach(), mesh, placements))
            setattr(experts, key, held)
            ignored.add(held)
        fully_shard(model, mesh=flat, ignored_params=ignored)
        _check_both_namings(model, reference, group)
    # Halves that have drifted apart are no replicas: refused, by name.
    source = DTensorSource(model)
    if rank >= 2:
        change(model.layers[1].mlp.experts)
    items, tensors = unite(source.items(), source.tensors(), group)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj .*\(rank 0 against rank 2"):
        check_replicas(items, tensors, group)


def test_field_D6_experts_on_a_sibling_mesh() -> None:
    """https://github.com/huggingface/accelerate/issues/4200, https://github.com/pytorch/torchtitan/pull/2281."""
    run_ranks(_sibling_meshes, 4)


def _plain_halves(rank: int, world: int) -> None:
    """Experts of this rank as a plain tensor: same name, same shape, other contents."""
    group = TrainerGroup(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (world,))
    reference, model = moe(), moe()
    own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    for experts, key in experts_of(model):
        setattr(experts, key, nn.Parameter(getattr(experts, key).detach()[own].clone()))
    ignored = {getattr(experts, key) for experts, key in experts_of(model)}
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    _check_both_namings(model, reference, group, plain_shards={"*.experts.*": (mesh, [Shard(0)])})
    # Undeclared, they look like replicas: what a gather would make of them must not be sent.
    source = DTensorSource(model)
    items, tensors = unite(source.items(), source.tensors(), group)
    with pytest.raises(ValueError, match=r"4 tensors .*gate_up_proj.*rank 0 against rank 1.*plain_shards"):
        check_replicas(items, tensors, group)


def test_field_0e_and_D5_undeclared_experts_of_each_rank_are_refused() -> None:
    """https://github.com/huggingface/transformers/pull/45662."""
    run_ranks(_plain_halves, 2)


def _buffers(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD)

    def build(bias: float) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6))
        model[0].register_buffer("e_score_correction_bias", torch.full((8,), bias))
        model[0].register_buffer("inv_freq", torch.ones(3), persistent=False)
        return model

    for bias in (0.5, float(rank)):  # constants: an exclusive or over the elements would be 0 for both
        model, reference = build(bias), build(bias)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        source = DTensorSource(model, dtype=torch.bfloat16)
        wanted = expected(reference, torch.bfloat16)
        assert wanted["0.e_score_correction_bias"].dtype == torch.float32
        assert_same(Transfer(source.items(), source.tensors()).run(source.tensors()), wanted)
        if bias == 0.5:
            check_replicas(source.items(), source.tensors(), group)
    with pytest.raises(ValueError, match=r"1 tensors .*0\.e_score_correction_bias.*rank 0 against rank 1"):
        check_replicas(source.items(), source.tensors(), group)
    left_out = DTensorSource(model, naming=naming_for(model, drop=["*correction_bias"]))
    assert "0.e_score_correction_bias" not in dict(left_out)


def test_field_D21_buffers_persistent_ones_only_and_differing_ones_flagged() -> None:
    """https://github.com/huggingface/accelerate/issues/3898, https://github.com/nvidia-cosmos/cosmos-rl/pull/146."""
    run_ranks(_buffers, 2)


def _reading_fails(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD)
    source = DTensorSource(nn.Linear(2, 2))
    tensors = source.tensors()
    if rank == 1:
        tensors = [torch.empty(2, 2, device="meta"), *tensors[1:]]
    with pytest.raises(WeightSyncError) as caught:
        check_replicas(source.items(), tensors, group)
    assert set(caught.value.failures) == {1}


def test_a_rank_that_cannot_read_its_tensors_fails_all() -> None:
    run_ranks(_reading_fails, 2)


def _differences(rank: int, world: int) -> None:
    """Every kind of difference of a plain tensor is seen, whatever its dtype and size."""
    group = TrainerGroup(dist.group.WORLD)
    base = torch.arange(5_000_003, dtype=torch.float32)
    swapped = base.clone()
    swapped[[1, 4_999_999]] = swapped[[4_999_999, 1]]
    last = base.clone()
    last[-1] += 1
    pairs: list[Sequence[torch.Tensor]] = [
        (base, swapped),
        (base, last),
        (torch.zeros(7, dtype=torch.bool), torch.eye(7, dtype=torch.bool)[3]),
        (torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2, dtype=torch.bfloat16)),
        (torch.tensor(1.0), torch.tensor(-1.0)),
        (torch.zeros(3), -torch.zeros(3)),
        (torch.ones(3, 5).t(), torch.ones(3, 5).t() * torch.tensor([1, 1, 3.0])),
        (torch.zeros(9, dtype=torch.float8_e4m3fn), torch.ones(9).to(torch.float8_e4m3fn)),
    ]
    for pair in pairs:
        module = nn.Module()
        module.same = nn.Parameter(torch.ones(3))
        module.register_buffer("odd", pair[0].clone())
        check_replicas(DTensorSource(module).items(), DTensorSource(module).tensors(), group)
        module.odd = pair[rank].clone()
        source = DTensorSource(module)
        with pytest.raises(ValueError, match=r"1 tensors .*odd"):
            check_replicas(source.items(), source.tensors(), group)


def test_every_difference_is_seen() -> None:
    run_ranks(_differences, 2)
