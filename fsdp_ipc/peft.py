"""LoRA adapters in the sharded state: which weight they belong to, and the merged weight shard by shard."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LowRankTerm:
    """One adapter of a weight, `scaling * (b @ a)`; `a` and `b` are names in the sharded state."""

    a: str
    b: str
    scaling: float


@dataclass(frozen=True)
class LowRankMerge:
    """The weight `base` plus its active adapters."""

    base: str
    terms: tuple[LowRankTerm, ...]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapter tensors that are read."""
        return tuple(name for term in self.terms for name in (term.a, term.b))


@dataclass(frozen=True)
class AdapterMap:
    """Where adapters sit in a module tree.

    Attributes:
        base_model: The model without its adapter wrapper.
        names: Clean name by wrapped name, for everything that is sent; adapters and originals are not in it.
        merges: What to add, by name in the sharded state of the base weight.
    """

    base_model: nn.Module
    names: dict[str, str]
    merges: dict[str, LowRankMerge]


def adapter_map(module: nn.Module) -> AdapterMap | None:
    """Adapters of an (unwrapped) module; None if there are none."""
    return None
