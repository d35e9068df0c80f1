"""Sources made of what code written against vLLM's trainer API has: pairs of names and full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_ipc.full import Held
from fsdp_ipc.layout import layout_of
from fsdp_ipc.metadata import WHOLE, Layout, ParamMeta, StreamItem, TensorSpec
from fsdp_ipc.recipe import Emit, ParamRecipe


class PairsSource:
    """Checkpoint names with tensors at hand, plain (the same on every rank) or DTensor.

    Args:
        pairs: The tensors by name; they are kept, so give sharded ones where there is a choice.

    Raises:
        ValueError: No pair, or a name twice.
    """

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._pairs = [(name, tensor.detach()) for name, tensor in pairs]
        specs = [
            (name, tuple(tensor.shape), tensor.dtype, layout_of(name, tensor)) for name, tensor in self._pairs
        ]
        self._items = _items(specs)

    def items(self) -> tuple[StreamItem, ...]:
        """The stream, in the order of the pairs."""
        return self._items

    def tensors(self) -> Sequence[Held]:
        """The tensors."""
        return [tensor for _, tensor in self._pairs]

    def mesh(self) -> DeviceMesh | None:
        """The largest mesh among the DTensors."""
        meshes = [tensor.device_mesh for _, tensor in self._pairs if isinstance(tensor, DTensor)]
        return max(meshes, key=lambda mesh: mesh.size(), default=None)


class IteratedSource:
    """A source that can only be iterated: each pass yields every full tensor on every rank, in the declared order.

    Tensors are pulled when they are needed, one pass for each sync; what a pass yields ahead of its turn waits.

    Args:
        metadata: What a pass yields.
        passes: Starts a pass. All ranks run it in step, as it may be collective.

    Raises:
        ValueError: No tensor, or a name twice.
    """

    def __init__(
        self, metadata: Sequence[ParamMeta], passes: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    ) -> None:
        self._metas = list(metadata)
        self._passes = passes
        self._items = _items([(meta.name, tuple(meta.shape), meta.dtype, WHOLE) for meta in self._metas])

    def items(self) -> tuple[StreamItem, ...]:
        """The stream, in the order of the metadata."""
        return self._items

    def tensors(self) -> Sequence[Held]:
        """Functions that pull from a pass of their own."""
        current = _Pass(self._metas, self._passes)
        return [current.puller(index) for index in range(len(self._metas))]

    def mesh(self) -> DeviceMesh | None:
        """Unknown."""
        return None


class _Pass:
    """One pass over an iterator, read by index; the iterator starts with the first read."""

    def __init__(
        self, metas: Sequence[ParamMeta], passes: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    ) -> None:
        self._metas = metas
        self._passes = passes
        self._iterator: Iterator[tuple[str, torch.Tensor]] | None = None
        self._waiting: dict[int, torch.Tensor] = {}
        self._last: tuple[int, torch.Tensor] | None = None
        self._num_pulled = 0

    def puller(self, index: int) -> Callable[[], torch.Tensor]:
        return lambda: self.read(index)

    def read(self, index: int) -> torch.Tensor:
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        if index not in self._waiting and index < self._num_pulled:
            raise RuntimeError(
                f"{self._metas[index].name} was read before and is gone: a pass yields it once"
            )
        if self._iterator is None:
            self._iterator = iter(self._passes())
        # The tensor before is dropped before the next is made: one full tensor at a time.
        self._last = None
        while self._num_pulled <= index:
            tensor = self._pull(self._iterator)
            # The iterator may use its memory again: what is passed over has to be kept.
            self._waiting[self._num_pulled] = tensor if self._num_pulled == index else tensor.clone()
            self._num_pulled += 1
        self._last = (index, self._waiting.pop(index))
        return self._last[1]

    def _pull(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        meta = self._metas[self._num_pulled]
        try:
            name, tensor = next(iterator)
        except StopIteration:
            raise ValueError(
                f"the source's iteration ended before {meta.name}, tensor {self._num_pulled + 1} of "
                f"{len(self._metas)} in its metadata"
            ) from None
        got = (name, tensor.dtype, tuple(tensor.shape))
        wanted = (meta.name, meta.dtype, tuple(meta.shape))
        if got != wanted:
            raise ValueError(f"the source yielded {got} where its metadata says {wanted}: both must agree")
        return tensor.detach()


def _items(specs: Sequence[tuple[str, tuple[int, ...], torch.dtype, Layout]]) -> tuple[StreamItem, ...]:
    names = [name for name, *_ in specs]
    if not names:
        raise ValueError("nothing to send: the source names no tensor")
    if len(set(names)) != len(names):
        raise ValueError(f"named twice: {sorted({name for name in names if names.count(name) > 1})}")
    items: list[StreamItem] = []
    for index, (name, shape, dtype, layout) in enumerate(specs):
        spec = TensorSpec(name, shape, dtype, dtype, layout)
        items.append(StreamItem((spec,), ParamRecipe((name,), (Emit(name, shape),)), index))
    return tuple(items)
