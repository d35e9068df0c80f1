"""How checkpoint tensors are made of training tensors: one `ParamRecipe` for what must be converted together.

`naming` makes the recipes; `source`, `plan` and `gather` carry them out. Frozen, the same on every rank, no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_ipc.peft import LowRankMerge

Transform = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """What is known without a collective about one entry of the sharded state.

    Attributes:
        shape: Full (unsharded) shape.
        dtype: Training dtype.
        is_buffer: Whether it is a persistent buffer and not a parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool = False


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@dataclass(frozen=True)
class Emit:
    """One checkpoint tensor.

    `start` and `stride` say where its elements lie in the one training tensor that it comes from, taken as full
    and contiguous; they have no meaning in a recipe with a `transform`.

    Attributes:
        name: Checkpoint name.
        shape: Checkpoint shape.
        start: Offset of the first element, in elements.
        stride: Strides in elements, or None for a contiguous slice.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """Range `[first, last + 1)` of the elements of the training tensor that this tensor needs."""
        if self.numel == 0:
            return self.start, self.start
        stride = contiguous_stride(self.shape) if self.stride is None else self.stride
        last = sum((size - 1) * step for size, step in zip(self.shape, stride, strict=True))
        return self.start, self.start + last + 1

    def rows(self, full_shape: Sequence[int]) -> tuple[int, int]:
        """Range of indices on dim 0 of the training tensor that this tensor needs, so that a part can be gathered."""
        row = math.prod(full_shape[1:])
        if not full_shape or row == 0:
            return 0, full_shape[0] if full_shape else 1
        first, end = self.span
        return first // row, -(-end // row)

    def view(self, tensor: torch.Tensor, origin: int = 0) -> torch.Tensor:
        """This tensor as a view of the full training tensor, or of a part of it.

        Args:
            tensor: Contiguous; the full training tensor, or whole rows of it.
            origin: Offset of the first element of `tensor` in the full training tensor, in elements.
        """
        stride = contiguous_stride(self.shape) if self.stride is None else self.stride
        return tensor.as_strided(self.shape, stride, tensor.storage_offset() + self.start - origin)


def view_emit(name: str, shape: Sequence[int], stride: Sequence[int], start: int) -> Emit:
    """The emit of a strided view; `stride` None where it is contiguous (the strides of dims of size 1 don't count)."""
    wanted = contiguous_stride(shape)
    is_slice = all(size <= 1 or a == b for size, a, b in zip(shape, stride, wanted, strict=True))
    return Emit(name, tuple(shape), start, None if is_slice or 0 in shape else tuple(stride))


@dataclass(frozen=True)
class ParamRecipe:
    """How one training tensor (or several that belong together) becomes checkpoint tensors.

    With `transform` None there is exactly one input and each emit is a (mostly contiguous) view of it, so that it can
    be gathered piece by piece and without a second copy.

    Attributes:
        inputs: Entries of the sharded state, by the names that the source gave, whose full tensors are needed.
        emits: The checkpoint tensors; without a transform in the order of `start`.
        transform: Full inputs in order, of any floating dtype, to the tensors of `emits` in order, possibly views.
        merges: Adapters to add to an input, shard by shard, before it is gathered; see `LowRankMerge.apply`.
    """

    inputs: tuple[str, ...]
    emits: tuple[Emit, ...]
    transform: Transform | None = field(default=None, compare=False)
    merges: tuple[LowRankMerge, ...] = ()

    @property
    def fqn(self) -> str:
        """The first input, which gives the recipe its place in the order of the model."""
        return self.inputs[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """Every entry of the sharded state that is read, adapters included."""
        return self.inputs + tuple(name for merge in self.merges for name in merge.adapters)

    def merge_of(self, fqn: str) -> LowRankMerge | None:
        """What must be added to the input `fqn`, None if nothing."""
        return next((merge for merge in self.merges if merge.base == fqn), None)

    def apply(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The checkpoint tensors, as views where that is possible.

        Args:
            tensors: Full inputs, adapters merged, in the order of `inputs`.

        Raises:
            ValueError: if the transform does not give what was planned.
        """
        if self.transform is None:
            (tensor,) = tensors
            full = tensor.contiguous()
            return [emit.view(full) for emit in self.emits]
        made = list(self.transform(tensors))
        shapes = [tuple(tensor.shape) for tensor in made]
        if shapes != [emit.shape for emit in self.emits]:
            raise ValueError(
                f"the conversion of {', '.join(self.inputs)} gave shapes {shapes}, planned were "
                f"{[emit.shape for emit in self.emits]}; it must depend on names and shapes alone"
            )
        return made
