"""Watches a reload and notes which piece of which incoming tensor ends in which piece of which live parameter.

vLLM's loaders copy views of incoming tensors into fresh memory, process the layer, and copy the result over the live
parameters. `CopyRecorder` sees every operator call meanwhile. It follows plain copies (views, casts and clones on the
way included) and constant fills from memory to memory; whatever else reads or writes that memory spoils it. When a
live parameter is written, each piece is compared with its source at once, bit for bit, while both are at hand.

Memory is told apart by storage object, not by address: freed memory is handed out again during a reload.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ipc.vllm_plugin.copy_layout import Layout, covers
from fsdp_ipc.vllm_plugin.copy_memory import Kernel, Memory, Piece, Span, carried
from fsdp_ipc.vllm_plugin.copy_proof import is_constant, same_bits

__all__ = ["CopyRecorder"]

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_CLONES = {_aten.clone.default, _aten._to_copy.default}
_NEW_CONSTANTS = {
    _aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.zeros_like.default, _aten.ones_like.default,
    _aten.full_like.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
}  # fmt: skip
# They look at shape, dtype and device of their argument, not at its elements.
_NEW_EMPTY = {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}


@dataclass(frozen=True, slots=True)
class _Operator:
    """What an operator's schema says of its effects."""

    writes: tuple[int, ...]
    writes_kw: tuple[str, ...]
    composite: bool


class CopyRecorder(TorchDispatchMode):
    """Runs every operator unchanged and follows incoming tensors through plain copies.

    Args:
        kernels: The live tensors of the model, before its reload begins.
    """

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.headed: dict[str, set[nn.Module]] = {}
        """Incoming tensors, and the modules that they were loaded into."""
        self.strayed: dict[str, str] = {}
        """Incoming tensors whose elements went elsewhere than into live tensors by copies, and how."""
        self._live: dict[int, Memory] = {}
        self._other: dict[int, Memory] = {}
        self._spans: dict[int, tuple[StorageWeakRef, list[Span]]] = {}
        self._owners: dict[int, tuple[StorageWeakRef, set[nn.Module]]] = {}
        self._operators: dict[Any, _Operator] = {}
        for kernel in kernels:
            if kernel.tensor.numel():
                storage = kernel.tensor.untyped_storage()
                self._live[storage._cdata] = Memory(StorageWeakRef(storage), live=True)
                for module, _ in kernel.users:
                    self._own(kernel.tensor, module)

    # What comes in.

    def expect(self, modules: Iterable[nn.Module]) -> None:
        """Say which modules wait for weights, once their reload is open: their tensors are on meta then."""
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._own(tensor, module)

    def incoming(self, name: str, tensor: torch.Tensor) -> None:
        """Announce an incoming tensor, just before it is loaded.

        Args:
            name: Its name.
            tensor: A copy made for the loader: whoever still holds its memory in the end kept it as state of its own.
        """
        self._tidy()
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        self._other.pop(storage._cdata, None)
        known, spans = self._spans.get(storage._cdata, (None, []))
        if known is None:
            self._spans[storage._cdata] = (StorageWeakRef(storage), spans)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        span = Span(begin, begin + int(tensor.nbytes), name, tensor.dtype)
        at = bisect_right(spans, begin, key=lambda other: other.begin)
        for other in spans[max(0, at - 1) : at + 1]:
            if other.begin < span.end and begin < other.end and other.name != name:
                self.strayed[name] = self.strayed[other.name] = "two names for the same memory"
        if not tensor.is_contiguous():
            self.strayed[name] = "not contiguous"
        spans.insert(at, span)

    # What came out. Ask after `close`.

    def close(self) -> None:
        """Settle what became of everything that is not live. Call after the reload is finalised."""
        while self._other:
            self._settle(self._other.popitem()[1])
        kept = [entry for entry in self._spans.values() if not entry[0].expired()]
        if kept:
            gc.collect()
        for storage, spans in kept:
            if not storage.expired():
                # Held by reference, which no operator shows.
                for span in spans:
                    self.strayed.setdefault(span.name, "kept by the model")
        self._spans.clear()

    def pieces(self, kernel: Kernel) -> list[Piece]:
        """The proven pieces of a live tensor, targets counted from its own first element."""
        memory, whole = self._memory(kernel.tensor), kernel.layout
        if memory is None:
            return []
        return [
            replace(p, target=Layout(p.target.offset - whole.offset, p.target.size, p.target.stride))
            for p in memory.pieces
            if not p.target.apart(whole)
        ]

    def touched(self, kernel: Kernel) -> bool:
        """Whether the reload wrote the live tensor."""
        memory = self._memory(kernel.tensor)
        return memory is not None and bool(memory.pieces or memory.spoiled)

    def flaw(self, kernel: Kernel) -> str | None:
        """Why copies alone don't give a live tensor what the reload gave it; None if they do."""
        memory = self._memory(kernel.tensor)
        if memory is None:
            return "emptied when processed"
        if memory.spoiled or memory.derived:
            return memory.spoiled or memory.derived
        parts = [p.target for p in memory.pieces if not p.target.apart(kernel.layout)]
        wrong = covers(kernel.layout, parts)
        return {None: None, "gap": "not filled completely", "overlap": "written more than once"}[wrong]

    # Following.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _inspect(func)
        if operator.composite:
            with self:  # inference mode hands composites over whole; what is inside must be seen
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inputs = list(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        if func is _aten.copy_.default:
            self._note_copy(args[0], args[1])
        elif func in _CLONES:
            self._note_copy(result, args[0])
        elif func in _FILLS and not any(self._is_followed(t) for t in inputs[1:]):
            self._note_fill(args[0])
        elif func in _NEW_CONSTANTS:
            self._note_fill(result)
        elif func not in _NEW_EMPTY:
            written = [args[i] for i in operator.writes if i < len(args)]
            written += [kwargs[k] for k in operator.writes_kw if k in kwargs]
            self._note_other(func, inputs, list(_tensors(written)), list(_tensors(result)))
        return result

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.numel():
            return
        self._head(source, target)
        if target.device.type == "meta":
            rehearsed = self._memory(source)
            if rehearsed is not None:
                # vLLM runs each loader on meta first, to count elements; what it copied there went nowhere.
                rehearsed.moved.update(range(len(rehearsed.pieces)))
            return
        if source.shape != target.shape:
            source = source.expand(target.shape)
        to, at = Layout.of(target), Layout.of(source)
        origin, memory = self._memory(source), self._claim(target)
        if origin is memory:
            if to != at:
                memory.spoiled = "rearranged in place"
            return
        found = self._find_incoming(source)
        if found is not None:
            pieces, flaw = [self._incoming_piece(found, source, target)], None
            memory.names.add(found.name)
        elif origin is None:
            pieces, flaw = [], "holds data that the transfer did not bring"
        else:
            pieces, flaw = carried(origin, source.dtype, at, target.dtype, to)
            memory.names |= origin.names
            if origin.live:
                # Somebody keeps a second copy of a live parameter, which a replay would not reach.
                origin.derived = "copied into other state"
        if flaw is not None:
            memory.spoiled = flaw
        self._write(memory, target, pieces)

    def _note_fill(self, target: torch.Tensor) -> None:
        if target.device.type != "meta" and target.numel():
            nowhere = Layout(0, (), ())
            piece = Piece(name=None, source=nowhere, target=Layout.of(target), dtype=target.dtype)
            self._write(self._claim(target), target, [piece])

    def _note_other(
        self, func: Any, inputs: list[torch.Tensor], written: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        storages = {t.untyped_storage()._cdata for t in inputs if t.device.type != "meta"}
        fresh = [t for t in results if t.device.type == "meta" or t.untyped_storage()._cdata not in storages]
        if results and not written and not fresh:
            return  # a view
        followed = [t for t in inputs if self._is_followed(t)]
        names: set[str] = set()
        for tensor in followed:
            found, memory = self._find_incoming(tensor), self._memory(tensor)
            if found is not None:
                self.strayed[found.name] = f"used by {func.overloadpacket.__name__}"
                names.add(found.name)
            elif memory is not None:
                names |= memory.names
                if not any(tensor is w for w in written):
                    memory.derived = "other state is computed from it"
        for tensor in [*written, *(fresh if followed else [])]:
            if (followed or self._is_followed(tensor)) and tensor.device.type != "meta" and tensor.numel():
                memory = self._claim(tensor)
                memory.spoiled = "computed, not copied"
                memory.names |= names

    def _write(self, memory: Memory, target: torch.Tensor, pieces: list[Piece]) -> None:
        """Enter what a write put in a memory, in place of what lay there; prove it where the memory is live."""
        to = Layout.of(target)
        dense = to.is_dense
        kept = memory.pieces
        gone: list[Piece] = []
        if memory.pieces and to.offset <= memory.high:
            kept = []
            for piece in memory.pieces:
                at = piece.target
                inside = to.offset <= at.offset and at.last <= to.last if dense else at == to
                (gone if inside and piece.dtype == target.dtype else kept).append(piece)
        if dense and to.numel == target.untyped_storage().nbytes() // target.element_size():
            gone, kept = [*gone, *kept], []
            memory.spoiled = None if pieces else memory.spoiled
        if {p.name for p in gone if p.name is not None} - {p.name for p in pieces}:
            # One of two tensors won. Which one must not depend on the order of a replay.
            memory.spoiled = "written by several tensors"
        memory.high = max(to.last, memory.high if kept else -1)
        if kept is not memory.pieces:
            memory.moved.clear()
        if memory.live:
            pieces = [self._proved(memory, target, piece) for piece in pieces]
        if kept is memory.pieces:
            kept.extend(pieces)
        else:
            memory.pieces = kept + pieces

    def _proved(self, memory: Memory, target: torch.Tensor, piece: Piece) -> Piece:
        there = target.as_strided(piece.target.size, piece.target.stride, piece.target.offset)
        constant = is_constant(there)
        if piece.name is None:
            ok = constant
        elif piece.tensor is None:
            ok = False
        else:
            source = piece.tensor.as_strided(
                piece.source.size, piece.source.stride, piece.origin + piece.source.offset
            )
            ok = same_bits(there, source)
        if not ok:
            memory.spoiled = "differs from the copies"
        return replace(piece, tensor=None, constant=constant)

    def _incoming_piece(self, found: Span, source: torch.Tensor, target: torch.Tensor) -> Piece:
        origin = found.begin // source.element_size()
        at = Layout.of(source, origin)
        if found.dtype != source.dtype or (origin + at.last + 1) * source.element_size() > found.end:
            self.strayed[found.name] = "seen as another type or beyond its end"
        return Piece(
            name=found.name,
            source=at,
            target=Layout.of(target),
            dtype=target.dtype,
            tensor=source,
            origin=origin,
        )

    # What a tensor's memory is.

    def _own(self, tensor: torch.Tensor, module: nn.Module) -> None:
        storage = tensor.untyped_storage()
        _, modules = self._owners.setdefault(storage._cdata, (StorageWeakRef(storage), set()))
        modules.add(module)

    def _head(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that a tensor on its way to a module's parameter, or to the meta stand-in for one, belongs there."""
        _, modules = self._owners.get(target.untyped_storage()._cdata, (None, set()))
        if modules:
            found, memory = self._find_incoming(source), self._memory(source)
            names = {found.name} if found is not None else memory.names if memory is not None else set()
            for name in names:
                self.headed.setdefault(name, set()).update(modules)

    def _find_incoming(self, tensor: torch.Tensor) -> Span | None:
        """The incoming tensor that a view begins in."""
        if tensor.device.type == "meta" or not tensor.numel():
            return None
        _, spans = self._spans.get(tensor.untyped_storage()._cdata, (None, []))
        begin = tensor.storage_offset() * tensor.element_size()
        at = bisect_right(spans, begin, key=lambda span: span.begin) - 1
        return spans[at] if at >= 0 and begin < spans[at].end else None

    def _memory(self, tensor: torch.Tensor) -> Memory | None:
        if tensor.device.type == "meta" or not tensor.numel():
            return None
        key = tensor.untyped_storage()._cdata
        return self._live.get(key) or self._other.get(key)

    def _claim(self, target: torch.Tensor) -> Memory:
        """The record of memory that is being written."""
        found = self._find_incoming(target)
        if found is not None:
            self.strayed[found.name] = "written where it lay"
        memory = self._memory(target)
        if memory is None:
            storage = target.untyped_storage()
            memory = self._other[storage._cdata] = Memory(StorageWeakRef(storage))
        return memory

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        memory = self._memory(tensor)
        return (memory is not None and (memory.live or bool(memory.pieces or memory.spoiled))) or (
            self._find_incoming(tensor) is not None
        )

    def _tidy(self) -> None:
        """Let go of incoming tensors that were loaded into memory which is gone."""
        for key, memory in list(self._other.items()):
            if memory.storage.expired():
                self._settle(self._other.pop(key))

    def _settle(self, memory: Memory) -> None:
        """Tensors in this memory that were not copied on, or not only, went where no replay could reach."""
        for i, piece in enumerate(memory.pieces):
            if piece.name is not None and (i not in memory.moved or memory.derived):
                self.strayed.setdefault(piece.name, memory.derived or "not found in any parameter")


def _inspect(func: Any) -> _Operator:
    arguments = func._schema.arguments
    writes = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return _Operator(
        writes=tuple(i for i in writes if not arguments[i].kwarg_only),
        writes_kw=tuple(arguments[i].name for i in writes),
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
