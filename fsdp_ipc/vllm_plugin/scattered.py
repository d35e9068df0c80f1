"""A tensor whose parts lie in the memory of several trainer ranks, and how copies out of it fall into parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from fsdp_ipc.vllm_plugin.copy_layout import Layout


@dataclass(frozen=True, eq=False)
class Scattered:
    """A dense tensor in parts.

    Attributes:
        shape: Of the whole.
        dtype: Of the elements in memory.
        device: This worker's own.
        parts: Flat views that follow each other in the whole, each with its distance (`payload.Part`); 0 is own memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parts: tuple[tuple[torch.Tensor, int], ...]

    def whole(self) -> torch.Tensor:
        """The tensor in new memory."""
        if not self.parts:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.cat([part for part, _ in self.parts]).view(self.shape)

    def split(self, source: Layout, target: Layout) -> list[tuple[torch.Tensor, Layout, int]] | None:
        """The copy from one place in the whole to another place elsewhere, part by part.

        Args:
            source: Where in the whole.
            target: Where the same elements go, of the same size.

        Returns:
            For each part that has some of them: a view of the part, the part of `target`, and the distance. None if an
            index of the outermost dim lies in two parts.
        """
        if source.numel == 0:
            return []
        dims = [d for d, n in enumerate(source.size) if n > 1]
        if not dims:
            outer, count, stride, inner = -1, 1, 1, 1
        else:
            outer = max(dims, key=lambda d: source.stride[d])
            count, stride = source.size[outer], source.stride[outer]
            inner = source.last - source.offset - (count - 1) * stride + 1
        if stride < 1 or (count > 1 and inner > stride):
            return None
        found, done = [], 0
        for part, first, distance in self._places():
            begin = -(-max(0, first - source.offset) // stride)
            end = min(count, (first + part.numel() - source.offset - inner) // stride + 1)
            if begin >= end or begin >= count:
                continue
            if begin != done:
                return None
            at = source.offset + begin * stride - first
            view = part.as_strided(
                _resized(source.size, outer, end - begin), source.stride, part.storage_offset() + at
            )
            there = target.offset + (begin * target.stride[outer] if outer >= 0 else 0)
            size = _resized(target.size, outer, end - begin)
            found.append((view, replace(target, offset=there, size=size), distance))
            done = end
        return found if done == count else None

    def _places(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Each part with the place of its first element in the whole, and its distance."""
        firsts = accumulate((part.numel() for part, _ in self.parts), initial=0)
        for (part, distance), first in zip(self.parts, firsts, strict=False):
            yield part, first, distance


def _resized(size: tuple[int, ...], dim: int, count: int) -> tuple[int, ...]:
    return size if dim < 0 else (*size[:dim], count, *size[dim + 1 :])
