"""What a worker looks at before it writes into live parameters again: every way in which one can have moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_ipc.vllm_plugin.copy_places import LivePlaces


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].bias  # one tensor, two names
    return model


def _places(model: nn.Module) -> LivePlaces:
    held = []
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            assert tensor is not None
            held.append((module, name, tensor))
    return LivePlaces(held)


def _restore_bigger(model: nn.Module) -> None:
    storage = model[0].weight.untyped_storage()
    keep, size = torch.empty(storage.nbytes()), storage.nbytes()
    storage.resize_(0)
    keep.fill_(1)
    storage.resize_(size + (1 << 16))


def _set_data(model: nn.Module, data: torch.Tensor) -> None:
    model[0].weight.data = data


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another parameter": lambda m: m[0].register_parameter("weight", nn.Parameter(m[0].weight.detach())),
    "a parameter less": lambda m: m[0].__delattr__("weight"),
    "one of two names": lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(4))),
    "another registry": lambda m: m[0].__dict__.update(
        _parameters={**m[0]._parameters, "weight": nn.Parameter(torch.ones(4, 4))}
    ),
    "another buffer": lambda m: setattr(m[1], "running_mean", torch.zeros(4)),
    "other memory": lambda m: _set_data(m, m[0].weight.detach().clone()),
    "other memory of the same storage object": _restore_bigger,
    "another stride": lambda m: _set_data(m, m[0].weight.detach().t()),
    "another shape": lambda m: _set_data(m, m[0].weight.detach().view(2, 8)),
    "another dtype": lambda m: setattr(m[1].running_mean, "data", m[1].running_mean.view(torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_moved_is_noticed(change: str) -> None:
    model = _model()
    places = _places(model)
    assert places.held()
    CHANGES[change](model)
    assert not places.held()
    assert places.reachable() == (change not in ("other memory", "other memory of the same storage object"))


@torch.no_grad()
def test_other_values_are_no_other_places() -> None:
    model = _model()
    places = _places(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.add_(1)
    assert places.held()
    assert places.reachable()
    assert LivePlaces([]).held()
