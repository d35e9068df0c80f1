"""Whether live tensors are where they were: looked at in every sync while the GPU waits, so with no loop of Python's."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_SHAPE, _DTYPE = map(operator.attrgetter, ("shape", "dtype"))


class LivePlaces:
    """The places of live parameters and buffers at the moment when this is made.

    Args:
        held: Each tensor under each of its names: the module that owns it, its name there, the tensor.
    """

    def __init__(self, held: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        self._registries = [_registry(module, name) for module, name, _ in held]
        self._names = [name for _, name, _ in held]
        self._tensors = [tensor for _, _, tensor in held]
        self._places = self._now()

    def held(self) -> bool:
        """Whether every tensor still is the one under its names, in the same memory, shape, stride and dtype."""
        current = map(dict.get, self._registries, self._names)
        return all(map(operator.is_, current, self._tensors)) and self._now() == self._places

    def _now(self) -> list[list[Any]]:
        tensors = self._tensors
        # vLLM's parameters would send each look at them through Python.
        with torch._C.DisableTorchFunctionSubclass():
            return [
                list(map(torch.Tensor.data_ptr, tensors)),
                # Numbers instead of tuples, which Python's collector would count.
                list(map(hash, map(_SHAPE, tensors))),
                list(map(hash, map(torch.Tensor.stride, tensors))),
                list(map(_DTYPE, tensors)),
            ]


def _registry(module: nn.Module, name: str) -> dict[str, Any]:
    return module._parameters if name in module._parameters else module._buffers
