"""Names, shapes and bytes of transformers models equal the files that `save_pretrained` writes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ipc.experts import INTERLEAVED
from fsdp_ipc.naming import Naming, naming_for
from fsdp_ipc.recipe import EntryInfo
from fsdp_ipc.source import DTensorSource
from tests import models
from tests.runner import run_ranks
from tests.sharded import several_buckets, transfer

pytest.importorskip("transformers", reason="needs transformers: its models are the subject")


def entries_of(state: Mapping[str, torch.Tensor]) -> dict[str, EntryInfo]:
    return {name: EntryInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in state.items()}


def ties_of(module: nn.Module) -> list[Sequence[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def stream(
    naming: Naming, module: nn.Module, state: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """What the recipes make of the full state, tensor by tensor, as a sender would."""
    state = module.state_dict() if state is None else state
    made: dict[str, torch.Tensor] = {}
    for recipe in naming.recipes(entries_of(state), ties_of(module)):
        tensors = []
        for fqn in recipe.inputs:
            merge = recipe.merge_of(fqn)
            tensors.append(state[fqn] if merge is None else merge.apply(state))
        for emit, tensor in zip(recipe.emits, recipe.apply(tensors), strict=True):
            assert tensor.shape == emit.shape
            assert emit.name not in made
            made[emit.name] = tensor
    return made


def assert_same(made: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert sorted(made) == sorted(wanted)
    for name, tensor in wanted.items():
        assert made[name].dtype == tensor.dtype, name
        assert torch.equal(made[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", models.FACTORIES)
def test_stream_equals_saved_files(name: str, dtype: torch.dtype) -> None:
    model = models.build(name).to(dtype)
    assert_same(stream(naming_for(model), model), models.saved(model))


@pytest.mark.parametrize("name", models.FACTORIES)
def test_stream_of_a_loaded_model_equals_saved_files(name: str, tmp_path: Path) -> None:
    """Loaded models remember how their checkpoint was named, which decides how they are saved."""
    model = models.build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        model.save_pretrained(tmp_path)  # type: ignore[operator]
        loaded = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert_same(stream(naming_for(loaded), loaded), models.saved(loaded))


def test_fused_experts_are_kept_whole_on_request() -> None:
    for name, stem in (
        ("qwen3_moe", "mlp.experts"),
        ("mixtral", "block_sparse_moe.experts"),
        ("gpt_oss", "mlp.experts"),
    ):
        model = models.build(name)
        made = stream(naming_for(model, experts="fused"), model)
        experts = model.model.layers[1].mlp.experts  # type: ignore[union-attr, index]
        assert torch.equal(made[f"model.layers.1.{stem}.gate_up_proj"], experts.gate_up_proj)
        assert torch.equal(made[f"model.layers.1.{stem}.down_proj"], experts.down_proj)
        assert not any(".experts.0." in key for key in made)


def test_field_D2_gpt_oss_experts_can_be_unfused() -> None:
    """https://github.com/thinking-machines-lab/tinker-cookbook/pull/459: its gate and up rows alternate."""
    model = models.build("gpt_oss")
    made = stream(naming_for(model, experts=INTERLEAVED), model)
    experts = model.model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    for i in range(3):
        prefix = f"model.layers.0.mlp.experts.{i}"
        assert torch.equal(made[f"{prefix}.gate_proj.weight"], experts.gate_up_proj[i, :, ::2].T)
        assert torch.equal(made[f"{prefix}.up_proj.weight"], experts.gate_up_proj[i, :, 1::2].T)
        assert torch.equal(made[f"{prefix}.down_proj.weight"], experts.down_proj[i].T)
        assert torch.equal(made[f"{prefix}.up_proj.bias"], experts.gate_up_proj_bias[i, 1::2])
        assert torch.equal(made[f"{prefix}.down_proj.bias"], experts.down_proj_bias[i])


def _sharded_streams(rank: int, world_size: int, files: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    failed = []
    for name, wanted in files.items():
        model = models.build(name)
        # Submodels, too: FSDP2 gives each sharded module a class of its own, by which transformers can't find it.
        # Not those that hold one end of a tie: it has to lie in one group.
        tied = {fqn for group in ties_of(model) for fqn in group}
        for path, module in reversed(list(model.named_modules())):
            is_unit = type(module).__name__.endswith(("Layer", "Block", "Model"))
            if is_unit and path and not any(fqn.startswith(f"{path}.") for fqn in tied):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        source = DTensorSource(model)
        items, tensors = source.items(), source.tensors()
        for way, made in (
            ("one by one", dict(source)),
            ("in buckets", transfer(items, tensors, limits=several_buckets(items))),
        ):
            if sorted(made) != sorted(wanted):
                failed.append(f"{name} {way}: names {sorted(set(made) ^ set(wanted))}")
            elif wrong := [key for key in wanted if not torch.equal(made[key], wanted[key])]:
                failed.append(f"{name} {way}: bytes of {wrong}")
    return failed


def test_sharded_stream_equals_saved_files() -> None:
    files = {name: models.saved(models.build(name)) for name in models.FACTORIES}
    assert run_ranks(_sharded_streams, 2, files, timeout_s=180) == [[], []]
