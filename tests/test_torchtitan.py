"""torchtitan models: the stream equals what the model's own state-dict adapter makes of its full state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from fsdp_ipc.naming import naming_for
from fsdp_ipc.recipe import EntryInfo
from fsdp_ipc.source import DTensorSource
from tests.runner import run_ranks
from tests.sharded import several_buckets, transfer

pytest.importorskip("torchtitan", reason="needs torchtitan: its models and adapters are the subject")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason=f"needs a torch that torchtitan can be imported with (2.13 is one), not {torch.__version__}",
)


def _built(config: Any, adapter: Callable[..., Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    config.layers = config.layers[:2]
    model = config.build()
    with torch.no_grad():
        for tensor in [
            *model.parameters(),
            *(b for n, b in model.named_buffers() if n.endswith("expert_bias_E")),
        ]:
            tensor.copy_(torch.randn(tensor.shape))
    return model, adapter(config, None)


def llama3() -> tuple[nn.Module, Any]:
    from torchtitan.models.llama3 import Llama3StateDictAdapter, llama3_configs

    return _built(llama3_configs["debugmodel"](attn_backend="flex"), Llama3StateDictAdapter)


def deepseek_v3() -> tuple[nn.Module, Any]:
    from torchtitan.models.deepseek_v3 import DeepSeekV3StateDictAdapter, deepseekv3_configs

    config = deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard")
    return _built(config, DeepSeekV3StateDictAdapter)


def registered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers as registered, whatever `state_dict` makes of them."""
    found = {}
    for path, child in module.named_modules():
        for key, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is not None and key not in child._non_persistent_buffers_set:
                found[f"{path}.{key}" if path else key] = tensor.detach()
    return found


def stream(model: nn.Module, adapter: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    entries = {name: EntryInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in state.items()}
    for recipe in naming_for(model, adapter=adapter).recipes(entries):
        tensors = recipe.apply([state[fqn] for fqn in recipe.inputs])
        made.update(zip([emit.name for emit in recipe.emits], tensors, strict=True))
    return made


@pytest.mark.parametrize("build", [llama3, deepseek_v3])
def test_stream_equals_to_hf(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, adapter = build()
    wanted = adapter.to_hf(model.state_dict())
    made = stream(model, adapter, registered(model))
    assert sorted(made) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor), name


def test_rope_is_permuted_and_fused_qkv_is_split() -> None:
    model, adapter = llama3()
    state = registered(model)
    entries = {name: EntryInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in state.items()}
    recipes = {recipe.fqn: recipe for recipe in naming_for(model, adapter=adapter).recipes(entries)}
    recipe = recipes["layers.0.attention.qkv_linear.wqkv.weight"]
    assert recipe.transform is not None
    assert [emit.name.rsplit(".", 2)[1] for emit in recipe.emits] == ["q_proj", "k_proj", "v_proj"]
    query = recipe.apply([state[recipe.fqn]])[0]
    assert not torch.equal(query, model.state_dict()["layers.0.attention.qkv_linear.wq.weight"])
    assert recipes["layers.0.feed_forward.w1.weight"].transform is None


def _sharded(rank: int, world_size: int) -> list[str]:
    """FSDP, and experts over `ep` and FSDP with dense weights over all ranks, as torchtitan lays them out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp_shard", "ep"))
    failed = []
    for build, expert_parallel in ((llama3, False), (deepseek_v3, False), (deepseek_v3, True)):
        model, adapter = build()
        wanted = adapter.to_hf(model.state_dict())
        for module in model.modules() if expert_parallel else ():
            if type(module).__name__ == "GroupedExperts":
                for key, parameter in list(module.named_parameters(recurse=False)):
                    sharded = distribute_tensor(parameter.detach(), grid["ep"], [Shard(0)])
                    module.register_parameter(key, nn.Parameter(sharded))
                fully_shard(module, mesh=grid["dp_shard"])
        fully_shard(model, mesh=mesh)
        two_axes = [
            n for n, t in registered(model).items() if isinstance(t, DTensor) and t.device_mesh.ndim == 2
        ]
        assert len(two_axes) == (3 if expert_parallel else 0)
        source = DTensorSource(model, naming=naming_for(model, adapter=adapter))
        items, tensors = source.items(), source.tensors()
        for way, made in (
            ("one by one", dict(source)),
            ("in buckets", transfer(items, tensors, limits=several_buckets(items))),
        ):
            wrong = sorted(set(made) ^ set(wanted)) + [
                n for n in wanted if n in made and not torch.equal(made[n], wanted[n])
            ]
            if wrong:
                failed.append(f"{build.__name__} ep={expert_parallel} {way}: {wrong[:8]}")
    return failed


def test_sharded_stream_equals_to_hf() -> None:
    """The adapter given shards of its own would name this rank's experts only; the stack is gathered first."""
    assert run_ranks(_sharded, 4, timeout_s=240) == [[], [], [], []]
