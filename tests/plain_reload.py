"""A layer-wise reload like vLLM's for plain torch modules, and modules with loaders like vLLM's.

The reload keeps incoming tensors until it is finished, then loads each layer into fresh memory, processes it, and copies
the result over the live tensors. Pure torch: the tests that use it need no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_ipc.vllm_plugin.loader import LoadCounts, NamedTensors
from fsdp_ipc.vllm_plugin.scattered import Scattered

Loader = Callable[..., None]


def parameter(*shape: int, dtype: torch.dtype = torch.float32, loader: Loader | None = None) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    param.weight_loader = loader or (lambda target, source: target.data.copy_(source))
    return param


class QuantMethod:
    """What vLLM calls after loading; does nothing unless given something to do."""

    def __init__(self, process: Callable[[nn.Module], None] = lambda layer: None) -> None:
        self.process = process

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.process(layer)


class Layer(nn.Module):
    """A leaf layer: parameters, and the names that are loaded into them.

    Args:
        names: Name -> (own parameter, extra arguments for its loader).
        params: The parameters.
    """

    def __init__(
        self, names: dict[str, tuple[Any, ...]], method: QuantMethod | None = None, **params: Any
    ) -> None:
        super().__init__()
        self.names = names
        if method is not None:
            self.quant_method = method
        for name, param in params.items():
            self.register_parameter(name, param)
        # vLLM notes the format of the checkpoint when the layer is made, before anything is processed.
        self.made = {name: (param.shape, param.dtype, param.weight_loader) for name, param in params.items()}


class Model(nn.Module):
    """Layers and vLLM's entry point for weights."""

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.targets = {
            name: (layer, *target) for layer in layers.values() for name, target in layer.names.items()
        }
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            if name not in self.targets:
                continue
            layer, param_name, *args = self.targets[name]
            param = getattr(layer, param_name)
            param.weight_loader(param, tensor, *args)


class PlainReload:
    """The reference loader of these tests. Same seam as the plugin's `LayerwiseLoader`."""

    def __init__(self, part: nn.Module, seen: Callable[[str, torch.Tensor], None] | None) -> None:
        self.part = part
        self.seen = seen
        self.open: dict[
            Layer, tuple[dict[str, nn.Parameter], list[tuple[str, torch.Tensor, tuple[Any, ...]]]]
        ] = {}

    def start(self, plan_key: str) -> None:
        del plan_key
        for layer in self.part.modules():
            if not isinstance(layer, Layer):
                continue
            live, waiting = dict(layer._parameters), []
            self.open[layer] = (live, waiting)
            for name, (shape, dtype, loader) in layer.made.items():
                stand_in = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
                stand_in.weight_loader = self._keeping(name, loader, waiting)
                layer.register_parameter(name, stand_in)

    def _keeping(self, name: str, loader: Loader, waiting: list[Any]) -> Loader:
        def keep(param: nn.Parameter, tensor: torch.Tensor, *args: Any) -> None:
            loader(param, tensor, *args)  # on meta, as vLLM does to count the elements
            waiting.append((name, tensor, args))

        return keep

    def load(self, bucket: int, tensors: NamedTensors, *, keep_alive: bool) -> None:
        del bucket

        def handed() -> Iterable[tuple[str, torch.Tensor]]:
            for name, sent in tensors:
                tensor = sent.whole() if isinstance(sent, Scattered) else sent
                given = tensor if keep_alive else tensor.clone()
                if self.seen is not None:
                    self.seen(name, given)
                yield name, given

        with torch.no_grad():
            self.part.load_weights(handed())

    @torch.no_grad()
    def finish(self) -> LoadCounts:
        count = 0
        for layer, (live, waiting) in self.open.items():
            if waiting:
                for name, (shape, dtype, loader) in layer.made.items():
                    fresh = nn.Parameter(
                        torch.empty_strided(shape, _strides(shape), dtype=dtype), requires_grad=False
                    )
                    fresh.weight_loader = loader
                    layer.register_parameter(name, fresh)
                for name, tensor, args in waiting:
                    param = getattr(layer, name)
                    param.weight_loader(param, tensor, *args)
                waiting.clear()
                if hasattr(layer, "quant_method"):
                    layer.quant_method.process_weights_after_loading(layer)
                for name, param in live.items():
                    param.data.copy_(getattr(layer, name))
                    count += 1
            for name in list(layer._parameters):
                delattr(layer, name)
            for name, param in live.items():
                layer.register_parameter(name, param)
        self.open.clear()
        return LoadCounts(loader_params=count)

    def abort(self) -> None:
        for _, waiting in self.open.values():
            waiting.clear()
        self.finish()


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return strides


# Loaders like vLLM's.


def shard_loader(offsets: dict[str, tuple[int, int]]) -> Loader:
    """Merged rows: qkv, gate and up."""

    def load(param: nn.Parameter, tensor: torch.Tensor, shard: str) -> None:
        start, rows = offsets[shard]
        param.data.narrow(0, start, rows).copy_(tensor)

    return load


def columns_loader(start: int, columns: int) -> Loader:
    """A row-parallel worker's part: some columns of what comes in."""
    return lambda param, tensor: param.data.copy_(tensor.narrow(1, start, columns))


def vocab_loader(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """A padded vocabulary."""
    param[: tensor.shape[0]].data.copy_(tensor)
    param[tensor.shape[0] :].data.fill_(0)


def expert_loader(param: nn.Parameter, tensor: torch.Tensor, expert: int, shard: str) -> None:
    """One expert's gate, up or down."""
    data = param.data[expert]
    if shard != "down":
        half = data.shape[0] // 2
        data = data.narrow(0, 0 if shard == "gate" else half, half)
    data.copy_(tensor)


def fused_loader(param: nn.Parameter, tensor: torch.Tensor, halves: bool, transposed: bool = False) -> None:
    """All experts in one tensor; gate and up one after the other."""
    if transposed:
        tensor = tensor.transpose(-1, -2)
    if halves:
        half = param.shape[1] // 2
        for i, part in enumerate(tensor.chunk(2, dim=1)):
            param.data.narrow(1, i * half, half).copy_(part)
    else:
        param.data.copy_(tensor.contiguous())


def transposing_loader(param: nn.Parameter, tensor: torch.Tensor) -> None:
    param.data.copy_(tensor.t())


def computing_loader(param: nn.Parameter, tensor: torch.Tensor) -> None:
    param.data.copy_(tensor + 1)


def unseen_permutation(layer: nn.Module) -> None:
    """Reverses every parameter's rows the way a raw kernel does: no operator call shows it."""
    for param in layer.parameters():
        values = param.data.numpy()
        values[...] = values[::-1].copy()
