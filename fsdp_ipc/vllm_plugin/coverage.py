"""Records, on meta tensors, which bytes of which parameter a model's loaders write from which incoming name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAX_RUNS = 65_536

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes `[start, end)` of a target, written from these incoming names (none: a constant, such as padding)."""

    start: int
    end: int
    names: frozenset[str]


@dataclass
class Target:
    """A parameter or buffer of the model in its loading format, on meta."""

    name: str
    tensor: torch.Tensor
    writes: list[Write] = field(default_factory=list)
    approximate: bool = False
    """Some write was too fragmented to follow, so that only whether anything came is known."""

    @property
    def names(self) -> set[str]:
        """Incoming names that wrote here."""
        return set().union(*(write.names for write in self.writes))

    def covered_bytes(self) -> int:
        """Bytes written at least once."""
        return span_bytes((write.start, write.end) for write in self.writes)

    def overlaps(self) -> set[str]:
        """Names that wrote bytes which another name wrote as well."""
        clashing: set[str] = set()
        last: Write | None = None
        for write in sorted((w for w in self.writes if w.names), key=lambda w: (w.start, w.end)):
            if last is not None and write.start < last.end and write.names.isdisjoint(last.names):
                clashing |= write.names | last.names
            if last is None or write.end > last.end:
                last = write
        return clashing


@dataclass
class Source:
    """One incoming tensor: what of it was read, and how it did not fit where it went."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    read: list[Span] = field(default_factory=list)
    narrowed_to: torch.dtype | None = None
    broadcast: str | None = None

    def read_bytes(self) -> int:
        """Bytes read at least once."""
        return span_bytes(self.read)


class Recorder(TorchDispatchMode):
    """Follows incoming tensors through views and computations into targets, by the identity of their storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: dict[int, Target] = {}
        self.sources: dict[str, Source] = {}
        self._incoming: dict[int, str] = {}
        self._tainted: dict[int, frozenset[str]] = {}
        # A freed storage's address may be used again, and would then be taken for the old one.
        self._alive: list[torch.UntypedStorage] = []

    def add_target(self, name: str, tensor: torch.Tensor) -> None:
        """Watch writes into this tensor's storage. The first name of a shared storage wins."""
        self.targets.setdefault(self._key(tensor, keep=True), Target(name, tensor))

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        """Follow this incoming tensor. A name may be added again with another tensor."""
        key = self._key(tensor, keep=True)
        self._incoming[key] = name
        self._tainted[key] = frozenset((name,))
        self.sources.setdefault(name, Source(tuple(tensor.shape), tensor.dtype, tensor.nbytes))

    def traced(self, name: str) -> bool:
        """Whether anything was read from this incoming tensor."""
        source = self.sources.get(name)
        return source is not None and (bool(source.read) or source.nbytes == 0)

    def names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """The incoming names that went into this tensor."""
        return self._tainted.get(self._key(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = [
            args[index]
            for index, argument in enumerate(func._schema.arguments)
            if index < len(args) and argument.alias_info is not None and argument.alias_info.is_write
        ]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
        if tensors:
            read = [leaf for leaf in inputs if not any(leaf is tensor for tensor in tensors)]
            for tensor in tensors:
                self._write(func, tensor, read)
            self._consume(read)
            return out
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._derive(inputs, outputs)
        return out

    def _write(self, func: Any, tensor: torch.Tensor, read: Sequence[torch.Tensor]) -> None:
        names = frozenset().union(*(self.names_of(leaf) for leaf in read))
        key = self._key(tensor)
        target = self.targets.get(key)
        if target is None:
            if names:
                self._tainted[self._key(tensor, keep=True)] = names | self.names_of(tensor)
            return
        if func is torch.ops.aten.copy_.default and len(read) == 1:
            self._note_misfit(tensor, read[0])
        spans = byte_spans(tensor)
        if spans is None:
            target.approximate = True
            spans = [(0, target.tensor.nbytes)]
        target.writes.extend(Write(start, end, names) for start, end in spans)

    def _note_misfit(self, tensor: torch.Tensor, incoming: torch.Tensor) -> None:
        name = self._incoming.get(self._key(incoming))
        if name is None:
            return
        source = self.sources[name]
        if not exact(incoming.dtype, tensor.dtype):
            source.narrowed_to = tensor.dtype
        if incoming.numel() != tensor.numel():
            source.broadcast = f"{list(incoming.shape)} into {list(tensor.shape)}"

    def _derive(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        keys = {self._key(leaf) for leaf in inputs}
        new = [leaf for leaf in outputs if self._key(leaf) not in keys]
        if not new:
            return
        names = frozenset().union(*(self.names_of(leaf) for leaf in inputs))
        if not names:
            return
        for leaf in new:
            self._tainted[self._key(leaf, keep=True)] = names
        self._consume(inputs)

    def _consume(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            name = self._incoming.get(self._key(tensor))
            if name is not None:
                source = self.sources[name]
                source.read.extend(byte_spans(tensor) or [(0, source.nbytes)])

    def _key(self, tensor: torch.Tensor, *, keep: bool = False) -> int:
        storage = tensor.untyped_storage()
        if keep:
            self._alive.append(storage)
        return int(storage._cdata)


def byte_spans(view: torch.Tensor) -> list[Span] | None:
    """The bytes of its storage that a view covers, as runs; None for a view of too many runs."""
    if view.numel() == 0:
        return []
    dims = sorted(
        (int(stride), int(size)) for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1
    )
    length = 1
    while dims and dims[0][0] <= length:
        stride, size = dims.pop(0)
        # A stride of 0 repeats the same elements; one below the run so far overlaps it. Both stay inside.
        length = max(length, stride * (size - 1) + length)
    count = 1
    for _, size in dims:
        count *= size
    if count > MAX_RUNS:
        return None
    starts = [int(view.storage_offset())]
    for stride, size in dims:
        starts = [start + stride * index for start in starts for index in range(size)]
    item = view.element_size()
    return [(start * item, (start + length) * item) for start in starts]


def span_bytes(spans: Iterable[Span]) -> int:
    """Bytes in the union of the spans."""
    total = 0
    reached = 0
    for start, end in sorted(spans):
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total


def exact(sent: torch.dtype, stored: torch.dtype) -> bool:
    """Whether every value of one dtype exists in the other."""
    if sent == stored:
        return True
    wider: dict[torch.dtype, tuple[torch.dtype, ...]] = {
        torch.bfloat16: (torch.float32, torch.float64),
        torch.float16: (torch.float32, torch.float64),
        torch.float32: (torch.float64,),
        torch.uint8: (torch.int16, torch.int32, torch.int64),
        torch.int8: (torch.int16, torch.int32, torch.int64),
        torch.int16: (torch.int32, torch.int64),
        torch.int32: (torch.int64,),
    }
    return stored in wider.get(sent, ())
