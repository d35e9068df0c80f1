"""The names under which vLLM's own trainer engines ask a weight source, over all releases that have them.

vLLM 0.27 and 0.28 call `metadata()` and iterate; 0.29 to 0.32 may also ask `held_names`, `groups` and `iter_groups`;
0.33 reads `metadata` as an attribute and calls `owned_names`, `implements_iter_full` and `iter_full`. None of them
looks at the class, so these methods do, and vLLM need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fsdp_ipc.metadata import ParamMeta


class ParamMetas(list[ParamMeta]):
    """Metadata that can be read as a list and called like a method: vLLM 0.33 does the one, before the other."""

    def __call__(self) -> ParamMetas:
        """The list itself."""
        return self


class VLLMSourceMethods:
    """Mix-in for a source that has `metadata` as a `ParamMetas` and yields full `(name, tensor)` pairs in its order."""

    @property
    def metadata(self) -> ParamMetas:
        """Name, dtype and full shape of every tensor, in the order of iteration; every rank owns all of them."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors, a fresh pass each time (collective, all ranks)."""
        raise NotImplementedError

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As iteration; the name of vLLM 0.33."""
        return iter(self)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Not offered: what is sent is full tensors."""
        raise NotImplementedError("full tensors only: use a backend that takes iter_full")

    def implements_iter_full(self) -> bool:
        """Yes."""
        return True

    def implements_iter_local(self) -> bool:
        """No."""
        return False

    def owned_names(self, rank: int) -> list[str]:
        """Every name: a gather leaves each rank with all of it.

        Args:
            rank: Trainer rank.
        """
        del rank
        return [meta.name for meta in self.metadata]

    def held_names(self) -> list[str] | None:
        """None, for all names (vLLM 0.29 to 0.32)."""
        return None

    def groups(self) -> list[list[str]]:
        """One group for each tensor, in order (vLLM 0.29 to 0.32)."""
        return [[meta.name] for meta in self.metadata]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """The tensors in the groups of `groups` (vLLM 0.29 to 0.32)."""
        for name, tensor in self:
            yield [name], [tensor]


class VLLMSource(VLLMSourceMethods):
    """A weight source in the words of vLLM 0.27 to 0.33, for vLLM's own trainer engines.

    Args:
        source: Has `metadata`, a method or a list, and yields full `(name, tensor)` pairs on every rank, in step.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    @property
    def metadata(self) -> ParamMetas:
        """What the source says of itself."""
        metadata = self._source.metadata
        metas = metadata() if callable(metadata) else metadata
        return ParamMetas(ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in metas)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass of the source."""
        return iter(self._source)
