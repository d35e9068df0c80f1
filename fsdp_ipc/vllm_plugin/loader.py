"""Loading a sync's tensors through vLLM's own layer-wise reload, with what that reload leaves out.

vLLM's reload puts parameters on meta, keeps each incoming tensor by reference until its layer is complete, loads the
layer into fresh memory and copies the result over the old storage. On its own it says nothing of a layer that got
nothing, fills a layer that got a part with uninitialised memory, and stays half-open when it raises
(vLLM 0.26 to 0.32, `model_executor/model_loader/reload/layerwise.py`). `LayerwiseLoader` closes these gaps.

Parameters are not always where the bytes are: on CPU, vLLM packs linear weights into closures and leaves empty
parameters behind, so a parameter's bits prove nothing there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_ipc.vllm_plugin.cpu_reload import CpuReload
from fsdp_ipc.vllm_plugin.json_fields import names_text
from fsdp_ipc.vllm_plugin.scattered import Scattered

logger = logging.getLogger(__name__)

NamedTensors = Sequence[tuple[str, torch.Tensor | Scattered]]


class IncompleteUpdateError(RuntimeError):
    """A layer got only some of its weights; the model keeps the old weights of that layer."""


@dataclass(kw_only=True)
class LoadCounts:
    """What one sync did, for the report.

    Attributes:
        num_tensors: Tensors taken from the trainer.
        replayed_params: vLLM parameters written by a proven copy plan.
        loader_params: vLLM parameters written by vLLM's own loaders.
        reasons: Why parameters went through the loaders, with how many did.
        queued: Whether finishing may have queued work on the device.
    """

    num_tensors: int = 0
    replayed_params: int = 0
    loader_params: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    queued: bool = True


class WeightLoader(Protocol):
    """What the engine drives: one `start`, one `load` a bucket, then `finish` or `abort`. Both end it.

    Attributes:
        model: The model that is loaded.
        examined: Set by the engine before `start`: whether the names were shown to fill every parameter.
        casts: Set by the engine before `start`: by name, the dtype to which a tensor must be cast first.
    """

    model: nn.Module
    examined: bool
    casts: Mapping[str, torch.dtype]

    def start(self, plan_key: str) -> None:
        """Open an update. Equal keys mean the same names at the same addresses as last time."""

    def load(self, bucket: int, tensors: NamedTensors, *, keep_alive: bool) -> None:
        """Load one bucket. With `keep_alive` the tensors stay valid until `finish`, else only during this call."""

    def finish(self) -> LoadCounts:
        """Close the update: afterwards the model serves the new weights, or this raises."""

    def abort(self) -> None:
        """Close the update without its weights; the model's structure is whole again. Idempotent."""


class LayerwiseLoader:
    """The reference loader: vLLM's layer-wise reload of the whole model.

    Args:
        model: vLLM's model on this worker.
        model_config: vLLM's `ModelConfig` of that model.
        on_incoming: Called with name and tensor for each tensor, as it is handed to vLLM (a copy when the sent
            memory will be reused). A recorder of the loaders' copies finds sources by these tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        *,
        on_incoming: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.examined = False
        """Whether `completeness.examine` proved beforehand that the names sent fill every parameter."""
        self.casts: Mapping[str, torch.dtype] = {}
        self._on_incoming = on_incoming
        self._cpu = CpuReload(model)
        self._open = False
        self._num_tensors = 0

    def start(self, plan_key: str) -> None:  # noqa: ARG002  this loader remembers nothing
        """Heal what an earlier failure left, then open vLLM's reload."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if half_open_layers(self.model):
            logger.warning(
                "An earlier weight update was left half-open; restoring the model's parameters first."
            )
            heal(self.model, self.model_config)
        self._num_tensors = 0
        self._open = True
        self._cpu.install()
        initialize_layerwise_reload(self.model)

    def load(self, bucket: int, tensors: NamedTensors, *, keep_alive: bool) -> None:  # noqa: ARG002
        """Hand the tensors to the model's `load_weights`, as vLLM's own engines do.

        vLLM holds each tensor until its layer is complete, so tensors that will be overwritten are copied, one at a
        time as vLLM asks for them: the copies of complete layers are freed on the way.
        """
        self._num_tensors += len(tensors)
        with torch.no_grad(), without_mtp_check():
            load_weights: Any = self.model.load_weights
            load_weights(self._handed_over(tensors, keep_alive))

    def _handed_over(self, tensors: NamedTensors, keep_alive: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, sent in tensors:
            tensor = sent.whole() if isinstance(sent, Scattered) else sent
            if name in self.casts:
                handed = tensor.to(self.casts[name])
            else:
                handed = tensor if keep_alive or tensor is not sent else tensor.clone()
            if self._on_incoming is not None:
                self._on_incoming(name, handed)
            yield name, handed

    def finish(self) -> LoadCounts:
        """Check that every open layer is accounted for, then let vLLM finalize.

        Raises:
            IncompleteUpdateError: A layer got nothing or a part. Its old weights are back, other layers may have new
                ones, and no version may be published; a full sync puts it right.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        waiting = half_open_layers(self.model)
        if complaints := self._unfinished(waiting):
            self.abort()
            raise IncompleteUpdateError(
                f"vLLM's parameters did not get all of their weights: {names_text(complaints)}. "
                "Send every tensor of the checkpoint."
            )
        for _, layer in waiting:
            info = layer_info(layer)
            if info.load_numel <= 0:
                # Nothing was meant for it, as found above. A total of 0 keeps vLLM from warning of it each time.
                info.load_numel_total = 0
        untouched = {id(layer) for _, layer in waiting if layer_info(layer).load_numel <= 0}
        finalize_layerwise_reload(self.model, self.model_config)
        self._open = False
        self._cpu.remove()
        self._cpu.refresh_tied_heads()
        loaded = [layer for layer in self.model.modules() if id(layer) not in untouched]
        params = {id(param) for layer in loaded for param in layer.parameters(recurse=False)}
        return LoadCounts(
            num_tensors=self._num_tensors, loader_params=len(params), reasons={"vllm loader": len(params)}
        )

    def abort(self) -> None:
        """Put the old tensors of layers that are still open back. Layers already complete keep the new ones."""
        if self._open or half_open_layers(self.model):
            heal(self.model, self.model_config)
        self._open = False
        self._cpu.remove()

    def _unfinished(self, waiting: Sequence[tuple[str, nn.Module]]) -> list[str]:
        """VLLM parameters that should have got weights and did not, by name."""
        open_ids = {id(layer) for _, layer in waiting}
        done = {
            id(param)
            for layer in self.model.modules()
            if id(layer) not in open_ids
            for param in layer.parameters(recurse=False)
        }
        complaints: list[str] = []
        for prefix, layer in waiting:
            info = layer_info(layer)
            if is_attention(layer):
                continue
            params: dict[str, torch.Tensor] = (info.kernel_tensors or ({}, {}))[0]
            arrived = {name for name, _ in info.loaded_weights}
            if info.load_numel <= 0:
                # A tie is loaded with its other owner. A proven plan has nothing for this layer by vLLM's own rules.
                if not self.examined and any(id(param) not in done for param in params.values()):
                    complaints.append(f"{prefix} (nothing arrived)")
                continue
            missing = [name for name in params if name not in arrived and name in info.restore_metadata[0]]
            if missing:
                complaints.extend(f"{prefix}.{name}" for name in missing)
            elif not self.examined and info.load_numel < _loadable_numel(layer, info):
                complaints.append(f"{prefix} ({info.load_numel} of {info.load_numel_total} elements arrived)")
        return complaints


def half_open_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers, with their names, whose tensors a reload has put aside and not put back."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if (info := layer_info(layer)).can_load() and info.kernel_tensors is not None
    ]


@torch.no_grad()
def heal(model: nn.Module, model_config: Any) -> None:
    """Close a half-open reload without its weights: each open layer gets its old tensors back.

    Tensors that vLLM never moves to meta (biases, from 0.27 on) may hold new values already; the next full sync
    overwrites them.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    for _, layer in half_open_layers(model):
        info = layer_info(layer)
        info.loaded_weights.clear()
        # Zero of zero arrived: vLLM then puts the old tensors back, and has nothing to warn of.
        info.load_numel = 0
        info.load_numel_total = 0
    finalize_layerwise_reload(model, model_config)


def is_attention(layer: nn.Module) -> bool:
    """Whether vLLM finalizes this layer after all others; its scales need not be in a checkpoint."""
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
    except ImportError:  # 0.26
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        return isinstance(layer, (Attention, MLAAttention))
    return bool(is_deferred_attention_layer(layer))


def layer_info(layer: nn.Module) -> Any:
    """VLLM's reload record of a layer, `LayerReloadingInfo`."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer)


def _loadable_numel(layer: nn.Module, info: Any) -> int:
    """Elements that a checkpoint brings: vLLM's own total counts buffers that no checkpoint has."""
    buffers = sum(
        buffer.numel()
        for name, buffer in layer._buffers.items()
        if buffer is not None and not any(name == loaded for loaded, _ in info.loaded_weights)
    )
    return int(info.load_numel_total) - buffers


def without_mtp_check() -> AbstractContextManager[None]:
    """One bucket never holds a whole draft head, so vLLM's check of that (0.32) must be off for partial loads."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[None] = disable_mtp_completeness_check()
    return context
