"""Finds tensors that a layer computes with and that are none of the model's parameters or buffers.

A quantisation method may pack weights into a closure, a kernel object or an attribute (on CPU, vLLM packs every linear
layer that way). Writing the live parameters then changes nothing. Operators that make such state are seen by
`CopyRecorder`; this search is for what no operator shows, such as kernels launched without one.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["StateWatch"]

_LIMIT = 5000  # objects looked at in one layer
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    enum.Enum,
    type,
)
_SKIPPED_MODULES = (
    "vllm.config",
    "vllm.platforms",
    "vllm.logger",
    "transformers.",
    "torch.distributed",
    "logging",
)
_MODULE_SLOTS = ("_parameters", "_buffers", "_modules")


class StateWatch:
    """Compares what layers hold besides parameters before and after a reload.

    Args:
        model: The worker's model; its modules, parameters and buffers are known state.
        layers: The layers to watch.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._modules = {id(module) for module in model.modules()}
        self._functions = {layer: dict(_functions(layer)) for layer in layers}

    def hidden(self, layer: nn.Module, live_storages: set[int]) -> str | None:
        """What kind of hidden state a layer has after the reload; None if none was found.

        Args:
            layer: One of the layers given before.
            live_storages: Storage addresses of all live parameters and buffers.
        """
        before = self._functions.get(layer, {})
        for key, function in _functions(layer):
            known = before.get(key)
            if (known is None or known() is not function()) and _carries(function()):
                return "state outside the parameters"
        return self._search(layer, live_storages)

    def _search(self, layer: nn.Module, live_storages: set[int]) -> str | None:
        todo = [(value, False) for _, value in _attributes(layer)]
        seen: set[int] = set()
        while todo:
            value, in_closure = todo.pop()
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            if len(seen) > _LIMIT:
                return "too much state to look through"
            if isinstance(value, torch.Tensor):
                known = value.untyped_storage().data_ptr() in live_storages or value.device.type == "meta"
                if (
                    not known
                    and value.numel()
                    and (in_closure or (value.is_floating_point() and value.numel() > 1))
                ):
                    return "state outside the parameters"
            elif not (isinstance(value, nn.Module) and id(value) in self._modules):
                todo.extend(_parts(value, in_closure))
        return None


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a layer, the modules in it and their quantisation methods hold besides parameters, buffers and modules."""
    for prefix, module in layer.named_modules():
        for key, value in vars(module).items():
            if key not in _MODULE_SLOTS:
                yield f"{prefix}.{key}", value
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, nn.Module):
            for key, value in getattr(method, "__dict__", {}).items():
                yield f"{prefix}.quant_method.{key}", value


def _functions(layer: nn.Module) -> Iterator[tuple[str, weakref.ref[Any]]]:
    for key, value in _attributes(layer):
        if isinstance(value, (types.FunctionType, functools.partial)):
            yield key, weakref.ref(value)


def _carries(function: Any) -> bool:
    """Whether a callable holds anything but code."""
    return isinstance(function, functools.partial) or bool(getattr(function, "__closure__", None))


def _parts(value: Any, in_closure: bool) -> Iterator[tuple[Any, bool]]:
    """What an object refers to, and whether that is reached through a callable."""
    if isinstance(value, (list, tuple, set, frozenset)):
        yield from ((item, in_closure) for item in value)
    elif isinstance(value, dict):
        yield from ((item, in_closure) for item in value.values())
    elif isinstance(value, functools.partial):
        yield from ((item, True) for item in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents, True
            except ValueError:  # an empty cell
                continue
    elif isinstance(value, types.MethodType):
        yield value.__self__, in_closure
    elif not isinstance(value, types.ModuleType) and not type(value).__module__.startswith(_SKIPPED_MODULES):
        slots = getattr(type(value), "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from ((getattr(value, name, None), in_closure) for name in names if not name.startswith("__"))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((item, in_closure) for item in own.values())
