"""Where a view lies in memory, and where its elements lie after the memory was copied: pure arithmetic on strides.

Offsets and strides count elements. An offset counts from the start of whatever the caller names (a storage, a tensor):
mixing the two up gives plans that are right for dense weights and wrong for every view with an offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Layout", "covers", "translate"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A strided view.

    Attributes:
        offset: Elements from the start to the first element.
        size: Elements along each dim.
        stride: Elements between neighbours along each dim.
        numel: Number of elements.
        last: Offset of the farthest element.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int = field(init=False, compare=False)
    last: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        numel, last = 1, self.offset
        for n, stride in zip(self.size, self.stride, strict=True):
            numel *= n
            last += (n - 1) * stride
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "last", last)

    @classmethod
    def of(cls, tensor: torch.Tensor, start: int = 0) -> Layout:
        """Layout of a tensor in its storage, counted from `start`."""
        return cls(int(tensor.storage_offset()) - start, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def is_nested(self) -> bool:
        """Whether each stride reaches beyond all smaller ones together, so that no two elements coincide."""
        reach = 0
        for stride, n in sorted((s, n) for n, s in zip(self.size, self.stride, strict=True) if n > 1):
            if stride <= reach:
                return False
            reach += (n - 1) * stride
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill the range from `offset` to `last` without a gap or an overlap."""
        return self.numel == self.last - self.offset + 1 and self.is_nested

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This layout, counted from the tensor's first element, as a view of the tensor's memory."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def apart(self, other: Layout) -> bool:
        """Whether the two certainly share no element, by their ranges alone."""
        return self.last < other.offset or other.last < self.offset


def translate(inner: Layout, outer: Layout, outer_elsewhere: Layout) -> Layout | None:
    """Follow a part of a view to the place that the whole view was copied to.

    Args:
        inner: Part of `outer`, in the same memory.
        outer: A view that was copied element by element.
        outer_elsewhere: The destination of that copy: same size as `outer`, any strides.

    Returns:
        Where the elements of `inner` are now, or None if `inner` isn't a regular part of `outer`, or isn't regular there.
    """
    if outer.stride == outer_elsewhere.stride and outer.is_dense:
        if inner.offset < outer.offset or inner.last > outer.last:
            return None
        return Layout(inner.offset - outer.offset + outer_elsewhere.offset, inner.size, inner.stride)
    dims = _merged_dims(outer, outer_elsewhere)
    if dims is None:
        return None
    start = _coordinates(inner.offset - outer.offset, dims)
    if start is None:
        return None
    end = list(start)
    strides = []
    for n, stride in zip(inner.size, inner.stride, strict=True):
        step = _coordinates(stride, dims) if n > 1 else [0] * len(dims)
        if step is None:
            return None
        end = [e + (n - 1) * s for e, s in zip(end, step, strict=True)]
        strides.append(sum(s * there for s, (_, _, there) in zip(step, dims, strict=True)))
    if any(e >= size for e, (size, _, _) in zip(end, dims, strict=True)):
        return None
    offset = outer_elsewhere.offset + sum(c * there for c, (_, _, there) in zip(start, dims, strict=True))
    return Layout(offset, inner.size, tuple(strides))


def covers(whole: Layout, parts: Sequence[Layout]) -> str | None:
    """Whether the parts fill a whole exactly once.

    Never says yes wrongly; parts that interleave in ways that strides alone don't tell apart count as overlapping.

    Returns:
        None if they do, else what is wrong: "overlap" or "gap".
    """
    ordered = sorted(parts, key=lambda part: part.offset)
    boxes = [_box(part, whole) for part in ordered]
    active: list[int] = []
    for i, part in enumerate(ordered):
        if not part.is_dense and boxes[i] is None:
            return "overlap"
        active = [j for j in active if ordered[j].last >= part.offset]
        if any(not _boxes_apart(boxes[i], boxes[j]) for j in active):
            return "overlap"
        active.append(i)
    if any(part.offset < whole.offset or part.last > whole.last for part in ordered):
        return "overlap"
    return None if sum(part.numel for part in ordered) == whole.numel else "gap"


def _merged_dims(a: Layout, b: Layout) -> list[tuple[int, int, int]] | None:
    """Joint dims (size, stride in a, stride in b), largest stride in a first; None if a's strides don't nest."""
    dims = sorted(
        ((n, s, t) for n, s, t in zip(a.size, a.stride, b.stride, strict=True) if n > 1),
        key=lambda dim: -dim[1],
    )
    merged: list[tuple[int, int, int]] = []
    for n, s, t in dims:
        if merged and merged[-1][1] == n * s and merged[-1][2] == n * t:
            merged[-1] = (merged[-1][0] * n, s, t)
        else:
            merged.append((n, s, t))
    return merged


def _coordinates(distance: int, dims: Iterable[tuple[int, int, int]]) -> list[int] | None:
    """A distance in memory as steps along nested dims; None if it leads outside or between elements."""
    if distance < 0:
        return None
    steps = []
    for size, stride, _ in dims:
        step, distance = divmod(distance, stride)
        if step >= size:
            return None
        steps.append(step)
    return steps if distance == 0 else None


def _box(part: Layout, whole: Layout) -> list[tuple[int, int]] | None:
    """First and last coordinate of a part along each dim of the whole, unmerged; None if it isn't a regular part."""
    if not (part.is_nested and whole.is_nested):
        return None
    dims = [
        (n, s, s)
        for n, s in sorted(zip(whole.size, whole.stride, strict=True), key=lambda dim: -dim[1])
        if n > 1
    ]
    first = _coordinates(part.offset - whole.offset, dims)
    if first is None:
        return None
    last = list(first)
    for n, stride in zip(part.size, part.stride, strict=True):
        step = _coordinates(stride, dims) if n > 1 else [0] * len(dims)
        if step is None:
            return None
        last = [e + (n - 1) * s for e, s in zip(last, step, strict=True)]
    if any(e >= size for e, (size, _, _) in zip(last, dims, strict=True)):
        return None
    return list(zip(first, last, strict=True))


def _boxes_apart(a: list[tuple[int, int]] | None, b: list[tuple[int, int]] | None) -> bool:
    if a is None or b is None:
        return False
    return any(
        a_last < b_first or b_last < a_first
        for (a_first, a_last), (b_first, b_last) in zip(a, b, strict=True)
    )
