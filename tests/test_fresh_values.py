"""The values of this step, whatever state a forward or an optimizer left the module in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.source import DTensorSource
from tests.runner import run_ranks
from tests.sharded import Toy, Transfer, assert_same, expected, several_buckets, toy

TOKENS = torch.tensor([[1, 2, 3, 10], [0, 4, 4, 7]])


def _build(world: int, **kwargs: Any) -> tuple[Toy, Toy]:
    reference, model = toy(), toy()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, ignored_params={model.scale}, **kwargs)
    return reference, model


def _backward(model: nn.Module) -> None:
    model(TOKENS).float().square().mean().backward()


def _full_gradients(reference: Toy) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn(p.shape) for name, p in reference.named_parameters()}


def _step(model: Toy, gradients: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()
    optimizer.zero_grad()


def _train_and_push(reference: Toy, model: Toy, *, evaluate: bool, dtype: torch.dtype | None = None) -> None:
    source = DTensorSource(model, dtype=dtype)
    items = source.items()
    moves = [
        Transfer(items, source.tensors(), limits=limits)
        for limits in (several_buckets(items), PlanLimits(packed=False))
    ]
    # lr=1 and plain SGD: one exact subtraction an element, alike for vector and scalar code.
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (reference, model)]
    for _ in range(2):
        _backward(model)
        if evaluate:
            with torch.no_grad():
                model(TOKENS)
        gradients = _full_gradients(reference)
        _step(reference, gradients, optimizers[0])
        # The optimizer steps the sharded parameters, which it holds; the module may show other tensors.
        _step_held(model, gradients, optimizers[1])
        if evaluate:
            with torch.no_grad():
                model(TOKENS)
        for move in moves:
            assert_same(move.run(source.tensors()), expected(reference, dtype))
        assert source.items() is items  # nothing looked different, so nothing is planned anew


def _step_held(model: Toy, gradients: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """As `_step`, but leaves the module in whatever state it is."""
    names = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = state()._fsdp_param_group if state is not None else None
        for parameter in group.fsdp_params if group is not None else ():
            names[id(parameter.sharded_param)] = parameter._param_fqn
    for held in optimizer.param_groups[0]["params"]:
        name = names.get(id(held))
        if name is None:
            held.grad = gradients["scale"]
            continue
        full = gradients[name]
        rank, chunk = held.device_mesh.get_local_rank(), -(-held.shape[0] // held.device_mesh.size())
        own = full[rank * chunk : (rank + 1) * chunk].contiguous()
        held.grad = DTensor.from_local(
            own, held.device_mesh, held.placements, shape=full.shape, stride=full.stride()
        )
    optimizer.step()
    optimizer.zero_grad()


def _eval_forward(rank: int, world: int) -> None:
    reference, model = _build(world)
    _train_and_push(reference, model, evaluate=True)
    # The fault itself, so that the test is known to see it: the root's parameters are unsharded now.
    with torch.no_grad():
        model(TOKENS)
    assert not isinstance(model.embed.weight, DTensor)


def test_field_0a_and_A20_eval_forward_before_the_push() -> None:
    """https://github.com/pytorch/pytorch/issues/144289, https://github.com/pytorch/pytorch/issues/131965."""
    run_ranks(_eval_forward, 2)


def _no_reshard(rank: int, world: int) -> None:
    reference, model = _build(world)
    model.set_reshard_after_backward(False)
    _backward(model)
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    _train_and_push(reference, model, evaluate=False)
    _train_and_push(reference, model, evaluate=True)


def test_field_0b_set_reshard_after_backward_false() -> None:
    """Every parameter read through `named_parameters()` would be stale after the step."""
    run_ranks(_no_reshard, 2)


def _mixed_policy(rank: int, world: int) -> None:
    reference, model = _build(world, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    source = DTensorSource(model)
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    _train_and_push(reference, model, evaluate=True)
    with torch.no_grad():
        model(TOKENS)
    assert model.embed.weight.dtype == torch.bfloat16
    got = Transfer(source.items(), source.tensors()).run(source.tensors())
    assert [(name, t.dtype, tuple(t.shape)) for name, t in got.items()] == declared
    assert got["embed.weight"].dtype == torch.float32
    _train_and_push(reference, model, evaluate=True, dtype=torch.bfloat16)


def test_field_0c_mixed_precision_does_not_change_what_is_sent() -> None:
    """An eval forward makes the root's fp32 DTensors bf16 plain tensors; metadata and stream must still agree."""
    run_ranks(_mixed_policy, 2)


def _offload(rank: int, world: int) -> None:
    reference, model = _build(world, offload_policy=CPUOffloadPolicy(pin_memory=False))
    source = DTensorSource(model)
    assert all(t.device.type == "cpu" for t in source.tensors() if isinstance(t, torch.Tensor))
    assert_same(Transfer(source.items(), source.tensors()).run(source.tensors()), expected(reference))
    with torch.no_grad():
        model(TOKENS)
    assert_same(Transfer(source.items(), source.tensors()).run(source.tensors()), expected(reference))


def test_field_C11_shards_offloaded_to_the_cpu() -> None:
    """https://github.com/huggingface/accelerate/pull/3544, https://github.com/THUDM/slime/pull/847."""
    run_ranks(_offload, 2)


def _one_fp32_norm(rank: int, world: int) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(7, 10), nn.LayerNorm(10), nn.Linear(10, 13)).to(torch.bfloat16)
        model[1].to(torch.float32)
        return model

    reference, model = build(), build()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    source = DTensorSource(model)
    got = Transfer(source.items(), source.tensors()).run(source.tensors())
    assert_same(got, expected(reference))
    assert got["1.weight"].dtype == torch.float32
    assert {m.name: m.dtype for m in source.metadata()} == {n: t.dtype for n, t in got.items()}
    # Cast while training: what is live counts, not what was there at first.
    for module in (reference, model):
        module[1].to(torch.bfloat16)
    got = Transfer(source.items(), source.tensors()).run(source.tensors())
    assert_same(got, expected(reference))


def test_field_D25_dtypes_follow_the_live_parameters() -> None:
    """https://github.com/huggingface/accelerate/issues/3979, https://github.com/huggingface/accelerate/pull/4021."""
    run_ranks(_one_fp32_norm, 2)


class _Routed(nn.Module):
    """Experts as modules; which ones run depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        weights = F.softmax(self.gate(x), dim=-1)
        return x + sum(weights[:, e : e + 1] * self.experts[e](x) for e in chosen)


def _unused_expert(rank: int, world: int) -> None:
    def build() -> _Routed:
        torch.manual_seed(4)
        return _Routed()

    reference, model = build(), build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with torch.no_grad():
        model(torch.randn(3, 6), (0, 1, 2, 3) if rank == 0 else (0, 1, 2))
    source = DTensorSource(model)
    got = Transfer(source.items(), source.tensors()).run(source.tensors())
    assert_same(got, expected(reference))
    assert "experts.3.weight" in got


def test_field_B15_an_expert_that_a_rank_did_not_use_is_sent() -> None:
    """https://github.com/pytorch/pytorch/issues/126616, https://github.com/THUDM/slime/pull/1010."""
    run_ranks(_unused_expert, 2)


def _declared(rank: int, world: int) -> None:
    torch.manual_seed(6)
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(6, 4), "up": nn.Linear(6, 8)})})
    outer = nn.Sequential()
    outer.layers = nn.ModuleList([layer])
    outer.register_buffer("steps", torch.arange(4, dtype=torch.int32))
    reference = {n: t.detach().clone() for n, t in outer.state_dict().items()}
    fully_shard(outer, mesh=init_device_mesh("cpu", (world,)))
    source = DTensorSource(outer, dtype=torch.bfloat16)
    move = Transfer(source.items(), source.tensors())
    declared = {meta.name: meta.dtype for meta in source.metadata()}
    assert declared == {row.name: getattr(torch, row.dtype) for row in move.plan.rows}
    got = move.run(source.tensors())
    assert declared == {name: tensor.dtype for name, tensor in got.items()}
    assert declared["layers.0.mlp.gate.weight"] == declared["layers.0.mlp.gate.bias"] == torch.float32
    assert declared["layers.0.mlp.up.weight"] == torch.bfloat16
    assert declared["steps"] == torch.int32
    for name, tensor in reference.items():
        assert torch.equal(got[name], tensor.to(declared[name])), name


def test_field_B16_declared_dtypes_are_the_sent_ones() -> None:
    """https://github.com/areal-project/AReaL/issues/1439."""
    run_ranks(_declared, 2)


def _no_graph(rank: int, world: int) -> None:
    _, model = _build(world)
    source = DTensorSource(model, dtype=torch.bfloat16)
    with torch.enable_grad():
        move = Transfer(source.items(), source.tensors())
        got = move.run(source.tensors())
        read = dict(source)
    assert not any(t.requires_grad for t in (*got.values(), *read.values()))
    assert dist.get_world_size() == world


def test_field_0i_staging_never_requires_grad() -> None:
    """A float staging buffer that takes a `copy_` of a parameter keeps a graph alive."""
    run_ranks(_no_graph, 2)


def test_a_module_that_changes_is_seen() -> None:
    model = toy()
    source = DTensorSource(model)
    items = source.items()
    assert source.items() is items
    model.cache = torch.ones(5)  # not sent, so it counts for nothing
    assert source.items() is items
    model.row = nn.Parameter(torch.ones(1, 10))
    assert source.items() is not items
    assert torch.equal(dict(source)["row"], torch.ones(1, 10))
    model.blocks.append(nn.Linear(2, 2))
    assert "blocks.2.weight" in dict(source)
    model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    assert "more" in dict(source)
    model.more = None
    assert "more" not in dict(source)
