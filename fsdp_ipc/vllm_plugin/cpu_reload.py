"""What vLLM's layer-wise reload leaves out on CPU, done here.

Two layers come out of that reload wrong, silently, on the CPU backend of vLLM 0.32 (CUDA is not affected):

- **Routed experts.** The CPU experts keep their weights in the layout of their grouped GEMM. The packing runs only when the kernel
  object is first built; a reload finds the kernel there, skips the packing, and copies plain rows into packed storage.
  `CpuReload` runs the packing that was skipped, on the reloaded layer before it is copied back.
- **A tied output head.** `lm_head` shares its parameter with the embedding, so the reload fills it through the embedding alone; the
  packed copy that the head computes with stays that of the old weights, while every parameter checksum agrees.
  `CpuReload` lets the head pack again.

Everything here is a no-op for a model whose parameters are not on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["CpuReload"]


class CpuReload:
    """Puts vLLM's CPU reload right, for one model on one worker.

    Call order in a sync: `install()` before the first weight is loaded, `remove()` once the reload is finalised or abandoned, then
    `refresh_tied_heads()`.

    Args:
        model: The worker's model.

    Raises:
        ValueError: If the model has routed experts on CPU whose reload nobody has shown to be right (quantised ones). Their
            names are in the message.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._experts: list[tuple[str, nn.Module]] = []
        self._patched: list[Any] = []
        self._on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        if self._on_cpu:
            self._experts = list(_routed_experts(model))
            refused = [
                f"{name} ({type(_method(m)).__name__})"
                for name, m in self._experts
                if not _is_plain(_method(m))
            ]
            if refused:
                raise ValueError(
                    f"Cannot update the quantised experts of this model on CPU: {', '.join(refused[:5])}"
                    f"{f' and {len(refused) - 5} more' if len(refused) > 5 else ''}. vLLM's reload does not repack them. "
                    "Serve the model unquantised, or on a GPU."
                )

    def install(self) -> None:
        """Make each plain experts layer pack its weights again when vLLM processes it."""
        self.remove()
        for _, layer in self._experts:
            method = _method(layer)
            if getattr(method, "moe_kernel", None) is not None:
                method.process_weights_after_loading = _packing(method)
                self._patched.append(method)

    def remove(self) -> None:
        """Undo `install`."""
        while self._patched:
            self._patched.pop().__dict__.pop("process_weights_after_loading", None)

    def refresh_tied_heads(self) -> int:
        """Pack tied weights again for the modules that share another module's parameter.

        Returns:
            The number of modules whose packed copy was made anew.
        """
        if not self._on_cpu:
            return 0
        users: dict[int, list[nn.Module]] = {}
        for module in self._model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.numel():
                users.setdefault(id(weight), []).append(module)
        refreshed = 0
        for modules in users.values():
            # The first module is the one whose own loading filled the parameter; it packed itself.
            for module in modules[1:]:
                if hasattr(module, "cpu_linear") and hasattr(
                    _method(module), "process_weights_after_loading"
                ):
                    _method(module).process_weights_after_loading(module)
                    refreshed += 1
        return refreshed


def _method(module: nn.Module) -> Any:
    return getattr(module, "quant_method", None)


def _routed_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that hold routed experts: those whose method carries a fused kernel."""
    for name, module in model.named_modules():
        if hasattr(_method(module), "moe_kernel") and any(p is not None for p in module._parameters.values()):
            yield name, module


def _is_plain(method: Any) -> bool:
    return any(cls.__name__ == "UnquantizedFusedMoEMethod" for cls in type(method).__mro__)


def _packing(method: Any) -> Callable[[nn.Module], None]:
    """Process an experts layer as vLLM does, then pack it, unless that processing did so itself."""

    def process_weights_after_loading(layer: nn.Module) -> None:
        experts = getattr(method.moe_kernel, "fused_experts", None)
        pack = getattr(experts, "process_weights_after_loading", None)
        packed = False

        def pack_once(target: nn.Module) -> None:
            nonlocal packed
            packed = True
            if pack is not None:
                pack(target)

        if experts is not None:
            # Seen from outside whether this release packs on an update too: packing twice would scramble the weights.
            experts.process_weights_after_loading = pack_once
        try:
            type(method).process_weights_after_loading(method, layer)
        finally:
            if experts is not None:
                experts.__dict__.pop("process_weights_after_loading", None)
        if not packed and pack is not None:
            pack(layer)

    return process_weights_after_loading
