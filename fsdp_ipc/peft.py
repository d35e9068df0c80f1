"""LoRA: which weight an adapter in the module tree belongs to, and the merged weight, made shard by shard.

What is sent is what `merge_and_unload` would leave, under the names of the model without adapters. The trainer's
tensors stay as they are: a merge yields a new local shard, no full weight, and gathers only the two thin factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

Kind = Literal["linear", "transposed", "embedding", "experts", "experts_transposed"]


@dataclass(frozen=True)
class LowRankTerm:
    """One adapter of a weight: its name and where its two factors are in the sharded state."""

    adapter: str
    a: str
    b: str


@dataclass(frozen=True)
class LowRankMerge:
    """The weight `base` plus its active adapters.

    Attributes:
        base: Name of the weight in the sharded state.
        terms: The adapters that were active when the naming was made.
        kind: Shape of the product: `b @ a`; its transpose (`[in, out]` weights, embeddings); one product for each
            expert, `[experts, out, in]`; or the transpose of that.
        layer: The adapter layer, asked at each merge for scale, active adapters and those already in the weight.
    """

    base: str
    terms: tuple[LowRankTerm, ...]
    kind: Kind
    layer: Any = field(compare=False, repr=False)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapter tensors that are read."""
        return tuple(name for term in self.terms for name in (term.a, term.b))

    def renamed(self, names: Mapping[str, str]) -> LowRankMerge:
        """The same with other names for the entries of the sharded state."""
        terms = tuple(replace(term, a=names[term.a], b=names[term.b]) for term in self.terms)
        return replace(self, base=names[self.base], terms=terms)

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Merged weight in the layout and dtype of the base: its local shard is new, the base is not written.

        All ranks that hold the weight; collective where a factor is sharded and not aligned with the weight.

        Args:
            tensors: DTensors or plain tensors by name, at least `base` and `adapters`.

        Raises:
            ValueError: if the active adapters are no longer those for which the names were made.
        """
        made_for, active = [term.adapter for term in self.terms], _active_adapters(self.layer)
        if active != made_for:
            raise ValueError(
                f"{self.base}: adapters {made_for} were active when the source was made, now {active} are; make a new "
                "source after changing adapters"
            )
        base = tensors[self.base].detach()
        terms = [term for term in self.terms if term.adapter not in self.layer.merged_adapters]
        if not terms:
            return base
        with torch.no_grad():
            merged = (base.to_local() if isinstance(base, DTensor) else base).clone()
            for term in terms:
                a, b = tensors[term.a].detach(), tensors[term.b].detach()
                merged += self._delta(base, a, b, float(self.layer.scaling[term.adapter]))
        if not isinstance(base, DTensor):
            return merged
        return DTensor.from_local(
            merged, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
        )

    def _delta(self, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """The part of the product that belongs to this rank's shard."""
        dtype = b.dtype
        left: torch.Tensor
        if self.kind == "linear" and _rows_aligned(base, b):
            left, right = b.to_local(), _full(a)  # type: ignore[attr-defined]
        else:
            factor, right = self._factors(_full(a), _full(b))
            left = _part(factor, base, {0, 1} if factor.dim() == 3 else {0})
        right = _part(right, base, {0, 2} if right.dim() == 3 else {1})
        # Where PEFT rounds, this has to round: the result must be the same.
        delta: torch.Tensor
        if left.device.type == "cpu" and dtype.itemsize == 2 and left.dim() == 2:
            delta = (left.float() @ right.float() * scaling).to(dtype)
        else:
            delta = left @ right * scaling
        return delta if self.kind in ("linear", "transposed") else delta.to(base.dtype)

    def _factors(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Full factors as `left @ right` of the shape of the weight."""
        if self.kind == "linear":
            return b, a
        if self.kind in ("transposed", "embedding"):
            return a.T, b.T
        experts = int(self.layer.num_experts)
        by_expert_a = a.reshape(experts, -1, a.shape[-1])  # [experts, rank, in]
        by_expert_b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # [experts, out, rank]
        if self.kind == "experts":
            return by_expert_b, by_expert_a
        return by_expert_a.transpose(1, 2), by_expert_b.transpose(1, 2)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _rows_aligned(base: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether this rank's rows of `b` are the rows of its shard of the weight, so that nothing is gathered."""
    return (
        isinstance(base, DTensor)
        and isinstance(b, DTensor)
        and base.device_mesh == b.device_mesh
        and tuple(base.placements) == tuple(b.placements)
        and all(isinstance(p, Replicate) or _dim(p) == 0 for p in base.placements)
    )


def _dim(placement: Placement) -> int | None:
    return getattr(placement, "dim", None)


def _part(factor: torch.Tensor, base: torch.Tensor, dims: set[int]) -> torch.Tensor:
    """The piece of a full factor that belongs to this rank's shard of the weight.

    The factor has the weight's dims in the same places, but for the one that is contracted; `dims` are the shared ones.
    """
    if not isinstance(base, DTensor):
        return factor
    mesh = base.device_mesh
    placements = [p if _dim(p) in dims else Replicate() for p in base.placements]
    whole = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements).to_local()


@dataclass(frozen=True)
class AdapterMap:
    """Where adapters sit in a module tree. All names are without wrapper segments.

    Attributes:
        base_model: The model without adapters and their wrappers (a view that shares its parameters).
        names: Name in `base_model` by name in the wrapped module, for all that is sent: no adapters, no originals of
            modules that are trained as a copy.
        merges: What is to be added to a weight, by its name in `base_model`.
    """

    base_model: nn.Module
    names: dict[str, str]
    merges: dict[str, LowRankMerge]


def adapter_map(module: nn.Module) -> AdapterMap | None:
    """Adapters in an unwrapped module; None if there are none. Changes the view that it is given.

    Raises:
        ValueError: for adapters that can't be merged here (DoRA, LoRA on biases, other methods), by name.
    """
    if not any(_is_peft(child) for child in module.modules()):
        return None
    walk = _Walk()
    base_model = walk.visit(module, "", "")
    wrapped = {name: path for path, name in walk.names.items()}
    merges = {
        name: LowRankMerge(wrapped[name], tuple(terms), kind, layer)
        for name, (terms, kind, layer) in walk.merges.items()
    }
    return AdapterMap(base_model, walk.names, merges)


def _is_peft(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def _original(view: nn.Module) -> Any:
    """The live module behind a view, whose settings a user may change later."""
    return view.__dict__.get("_view_of", view)


def _active_adapters(layer: Any) -> list[str]:
    """Those of the layer's own adapters that its forward uses."""
    if layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


class _Walk:
    """Walks a tree with adapters, noting names and merges, and takes the adapters out of the view."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.merges: dict[str, tuple[list[LowRankTerm], Kind, Any]] = {}

    def visit(self, module: nn.Module, path: str, clean: str) -> nn.Module:
        children = module._modules
        if not _is_peft(module):
            for key in _own_tensors(module):
                self.names[f"{path}{key}"] = f"{clean}{key}"
            for key, child in list(children.items()):
                if child is not None:
                    children[key] = self.visit(child, f"{path}{key}.", f"{clean}{key}.")
            return module
        if "base_layer" in children and "lora_A" in children:
            return self._lora(module, path, clean)
        if "modules_to_save" in children and "original_module" in children:
            return self._copy(module, path, clean)
        for key in ("base_model", "model"):  # PeftModel, and the tuner in it
            if (inner := children.get(key)) is not None:
                others = [name for name, _ in module.named_parameters() if not name.startswith(f"{key}.")]
                if others:
                    raise _refusal(module, path, f"it has parameters of its own ({others[0]})")
                return self.visit(inner, f"{path}{key}.", clean)
        if next(module.parameters(), None) is not None:
            raise _refusal(module, path, "only LoRA can be")
        return module

    def _copy(self, module: nn.Module, path: str, clean: str) -> nn.Module:
        copies = module._modules["modules_to_save"]
        assert copies is not None
        wrapper = _original(module)
        used = [] if wrapper.disable_adapters else wrapper.active_adapters
        active = [name for name in used if name in copies._modules]
        key = f"modules_to_save.{active[0]}" if active else "original_module"
        return self.visit(module.get_submodule(key), f"{path}{key}.", clean)

    def _lora(self, module: nn.Module, path: str, clean: str) -> nn.Module:
        layer, kind_name = _original(module), type(module).__name__
        if kind_name not in ("Linear", "Embedding", "ParamWrapper"):
            raise _refusal(module, path, "only LoRA on Linear, Embedding and expert parameters can be")
        embedding = kind_name == "Embedding"
        terms = []
        for adapter in _active_adapters(layer):
            for option in ("lora_variant", "use_dora", "lora_bias"):
                if getattr(layer, option, {}).get(adapter):
                    raise _refusal(module, path, f"adapter {adapter!r} has {option}")
            a, b = (
                (f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}")
                if embedding
                else (f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight")
            )
            terms.append(LowRankTerm(adapter, f"{path}{a}", f"{path}{b}"))
        target, kind = (
            "weight",
            "embedding" if embedding else "transposed" if layer.fan_in_fan_out else "linear",
        )
        if kind_name == "ParamWrapper":
            target = layer.parameter_name
            if layer.num_experts > 1:
                kind = "experts" if layer._did_swap_in_out_features else "experts_transposed"
        inner = module._modules["base_layer"]
        assert inner is not None
        base = self.visit(inner, f"{path}base_layer.", clean)
        # Without an active adapter, too: its merge notices when one becomes active.
        self.merges[f"{clean}{target}"] = (terms, kind, layer)  # type: ignore[assignment]
        return base


def _own_tensors(module: nn.Module) -> Iterator[str]:
    yield from module._parameters
    yield from module._buffers


def _refusal(module: nn.Module, path: str, reason: str) -> ValueError:
    return ValueError(
        f"the adapter at {path.removesuffix('.') or 'the root'} ({type(module).__name__}) can't be merged into the weights "
        f"that are sent: {reason}. Merge it before the sync, or send a model without it"
    )
