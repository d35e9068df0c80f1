"""Names, shapes and bytes of transformers models equal the files that `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from fsdp_ipc.naming import Naming, naming_for
from fsdp_ipc.recipe import EntryInfo
from tests import models
from tests.runner import run_ranks

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


def _sharded_streams(rank: int, world_size: int, files: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

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
        state = {
            fqn: t.full_tensor() if isinstance(t, DTensor) else t for fqn, t in model.state_dict().items()
        }
        made = stream(naming_for(model), model, state)
        if sorted(made) != sorted(wanted):
            failed.append(f"{name}: names {sorted(set(made) ^ set(wanted))}")
        elif wrong := [key for key in wanted if not torch.equal(made[key], wanted[key])]:
            failed.append(f"{name}: bytes of {wrong}")
    return failed


def test_sharded_stream_equals_saved_files() -> None:
    files = {name: models.saved(models.build(name)) for name in models.FACTORIES}
    assert run_ranks(_sharded_streams, 2, files, timeout_s=180) == [[], []]
