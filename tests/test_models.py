"""Names, shapes and bytes of transformers models equal the files that `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from fsdp_ipc.naming import Naming, naming_for
from fsdp_ipc.recipe import EntryInfo
from tests import models

pytest.importorskip("transformers", reason="needs transformers: its models are the subject")


def entries_of(state: Mapping[str, torch.Tensor]) -> dict[str, EntryInfo]:
    return {name: EntryInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in state.items()}


def ties_of(module: nn.Module) -> list[Sequence[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def stream(naming: Naming, module: nn.Module) -> dict[str, torch.Tensor]:
    """What the recipes make of the full state, tensor by tensor, as a sender would."""
    state = module.state_dict()
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
