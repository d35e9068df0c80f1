"""Whether live tensors are where they were: looked at in every sync, so with no loop of Python's.

What writing needs is seen while the GPU waits: that the tensors that we hold still have the memory that they had. The rest,
whether they are what the model computes with, takes several times as long, and is seen while the GPU copies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

_PARAMETERS, _BUFFERS, _SHAPE, _DTYPE = map(
    operator.attrgetter, ("_parameters", "_buffers", "shape", "dtype")
)


class LivePlaces:
    """The places of live parameters and buffers at the moment when this is made.

    Args:
        held: Each tensor under each of its names: the module that owns it, its name there, the tensor.
    """

    def __init__(self, held: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        params = [each for each in held if each[1] in each[0]._parameters]
        buffers = [each for each in held if each[1] not in each[0]._parameters]
        # Looked up anew each time: a module can get another registry.
        self._owners = [
            (registry, [module for module, _, _ in some], [name for _, name, _ in some])
            for registry, some in ((_PARAMETERS, params), (_BUFFERS, buffers))
        ]
        self._tensors = [tensor for _, _, tensor in (*params, *buffers)]
        self._places = self._now()

    def reachable(self) -> bool:
        """Whether every tensor still has its memory, so that writing there can hurt nobody else."""
        return self._pointers() == self._places[0]

    def held(self) -> bool:
        """Whether every tensor still is the one under its names, in the same memory, shape, stride and dtype."""
        current = chain.from_iterable(
            map(dict.get, map(registry, modules), names) for registry, modules, names in self._owners
        )
        return all(map(operator.is_, current, self._tensors)) and self._now() == self._places

    def _pointers(self) -> list[int]:
        # vLLM's parameters would send each look at them through Python.
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(torch.Tensor.data_ptr, self._tensors))

    def _now(self) -> list[list[Any]]:
        tensors = self._tensors
        pointers = self._pointers()
        with torch._C.DisableTorchFunctionSubclass():
            return [
                pointers,
                # Numbers instead of tuples, which Python's collector would count.
                list(map(hash, map(_SHAPE, tensors))),
                list(map(hash, map(torch.Tensor.stride, tensors))),
                list(map(_DTYPE, tensors)),
            ]
