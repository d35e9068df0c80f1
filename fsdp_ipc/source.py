"""What the trainer has: walks the sharded state of a module and says how each tensor is held and named.

`DTensorSource` reads the *sharded* parameters. FSDP2 leaves the root's parameters unsharded after a forward, and
`named_parameters()` then gives values of before the optimizer step (pytorch/pytorch#144289), so every read
reshards first.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_ipc.dtypes import dtype_name
from fsdp_ipc.full import Held, full_tensors
from fsdp_ipc.layout import LocalTensors, as_dtensor, layout_of
from fsdp_ipc.metadata import ParamMeta, StreamItem, TensorSpec
from fsdp_ipc.naming import Naming, Patterns, naming_for, wire_dtype
from fsdp_ipc.peft import LowRankMerge
from fsdp_ipc.recipe import EntryInfo, ParamRecipe

_CASTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

PlainShards = Mapping[str, tuple[DeviceMesh, Sequence[Placement]]]


@runtime_checkable
class WeightSource(Protocol):
    """What a sender needs of a trainer: specs without a collective, and the current local tensors."""

    __module__: str = "fsdp_ipc"

    def items(self) -> tuple[StreamItem, ...]:
        """All of the stream in order, the same on every rank; the same object while nothing changed."""

    def tensors(self) -> Sequence[Held]:
        """This rank's current tensors (DTensor or plain), fresh, in the order of the inputs of `items()`.

        An entry may be a function that makes the tensor when it is needed (a merged adapter).
        """

    def mesh(self) -> DeviceMesh | None:
        """The mesh that covers all trainer ranks, where the source knows one."""


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lives: the dict of its module, so that a re-registered parameter is seen."""

    fqn: str
    registry: Mapping[str, torch.Tensor | None]
    key: str
    is_buffer: bool

    def tensor(self) -> torch.Tensor | None:
        return self.registry.get(self.key)


class DTensorSource:
    """The weights of a module sharded with FSDP2 (HSDP, FSDP×TP, TP, expert parallel), in checkpoint names.

    Built and read on every trainer rank. Nothing here is collective but iterating over it. Reading reshards modules
    that FSDP2 has left unsharded.

    Args:
        module: The module; wrappers (`torch.compile`, checkpoint wrappers, DDP) are looked through.
        dtype: Wire dtype of floating parameters, for example `torch.bfloat16` for fp32 masters. None sends the
            dtype that the trainer holds. Buffers always go in their own dtype.
        keep: Patterns of checkpoint names that keep the trainer's dtype (see `naming.Patterns`); the default keeps
            router weights and biases (`naming.KEEP_DTYPE`).
        naming: From training names to checkpoint names; the default is `naming_for(module)`.
        plain_shards: By glob pattern of training names: *plain* tensors that are this rank's shard of a larger
            tensor, with the mesh and placements that say so. A plain tensor that is not declared must be the same
            on every rank.

    Raises:
        ValueError: The module has no parameters, FSDP1 or ZeRO-3 shards it, a placement can't be sent, or `dtype` is no floating dtype of 16 bits
            or more.
        TypeError: A tensor subclass or dtype that can't be sent, by name.
    """

    __module__ = "fsdp_ipc"

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        keep: Sequence[str] | None = None,
        naming: Naming | None = None,
        plain_shards: PlainShards | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
        refuse_flattened(module)
        if dtype is not None and dtype not in _CASTS:
            raise ValueError(
                f"dtype={dtype!r}: expected a floating dtype of 16 bits or more ({', '.join(map(str, _CASTS))}), or None "
                "for what the trainer holds. Anything narrower would lose the weights without scales beside them"
            )
        self._module = module
        self._dtype = dtype
        self._keep = None if keep is None else Patterns(keep)
        self._naming = naming if naming is not None else naming_for(module)
        self._plain_shards = dict(plain_shards or {})
        self._fsdp_modules: list[FSDPModule] = []
        self._seen: _Seen | None = None
        self._tensors: list[Held] = []
        self._inputs: list[_Input] = []
        self._items: tuple[StreamItem, ...] = ()
        self._build()

    def items(self) -> tuple[StreamItem, ...]:
        """The stream; the same tuple object while the module's structure is the same."""
        self._refresh()
        return self._items

    def tensors(self) -> list[Held]:
        """This rank's current sharded tensors, in the order of the inputs of `items()`."""
        self._refresh()
        return self._current()

    def _current(self) -> list[Held]:
        # A plain shard is wrapped anew each time: its storage may have been exchanged under the same parameter.
        return [held.now(self._held) for held in self._inputs] if self._plain_shards else self._tensors

    def metadata(self) -> list[ParamMeta]:
        """Name, wire dtype and full shape of every checkpoint tensor, in stream order."""
        return [meta for item in self.items() for meta in item.metas()]

    def mesh(self) -> DeviceMesh | None:
        """The largest mesh among the module's DTensors, or None for a module of plain tensors."""
        meshes = [
            t.device_mesh for read in self._inputs for t in read.read.values() if isinstance(t, DTensor)
        ]
        meshes.extend(mesh for mesh, _ in self._plain_shards.values())
        return max(meshes, key=lambda m: m.size(), default=None)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full checkpoint tensors one by one: the reading loop of vLLM's own trainers.

        All ranks, collective: every rank must read to the end, in step. A sender never uses it.
        """
        items, tensors = self.items(), self.tensors()
        for item in items:
            yield from full_tensors(item, tensors[item.index : item.index + len(item.inputs)])

    def _refresh(self) -> None:
        # While the sharded parameters are the registered ones, nothing is unsharded and nothing was replaced.
        if not self._has_changed():
            return
        for module in self._fsdp_modules:
            module.reshard()
        if self._has_changed():
            self._build()

    def _has_changed(self) -> bool:
        # A parameter set anew or cast in place, an adapter put in, a module added or taken away.
        return self._seen is None or self._seen.differs()

    def _build(self) -> None:
        self._fsdp_modules = [m for m in self._module.modules() if isinstance(m, FSDPModule)]
        for module in self._fsdp_modules:
            module.reshard()
        slots = {slot.fqn: slot for slot in _walk(self._module)}
        tensors = {fqn: tensor for fqn, slot in slots.items() if (tensor := slot.tensor()) is not None}
        if not any(isinstance(t, nn.Parameter) for t in tensors.values()):
            raise ValueError(
                f"{type(self._module).__name__} has no parameters: nothing to send. Pass the module that was sharded"
            )
        entries: dict[str, EntryInfo] = {}
        ties: dict[int, list[str]] = {}
        for fqn, tensor in tensors.items():
            # By identity: empty shards all have the data pointer 0.
            ties.setdefault(id(tensor), []).append(fqn)
            shape = tuple(self._held(fqn, tensor).shape)
            entries[fqn] = EntryInfo(shape=shape, dtype=tensor.dtype, is_buffer=slots[fqn].is_buffer)
        recipes = self._naming.recipes(entries, [group for group in ties.values() if len(group) > 1])
        items: list[StreamItem] = []
        inputs: list[_Input] = []
        for recipe in recipes:
            wire = self._wire_dtype(recipe, tensors, slots)
            specs = []
            for fqn in recipe.inputs:
                _check_type(fqn, tensors[fqn])
                held = self._held(fqn, tensors[fqn])
                layout = layout_of(fqn, held)
                specs.append(TensorSpec(fqn, tuple(held.shape), tensors[fqn].dtype, wire, layout))
            items.append(StreamItem(tuple(specs), recipe, len(inputs)))
            for fqn in recipe.inputs:
                merge = recipe.merge_of(fqn)
                read = (fqn,) if merge is None else (fqn, *merge.adapters)
                inputs.append(_Input(fqn, merge, {name: tensors[name] for name in read}))
        self._seen = _Seen(self._module)
        self._tensors = [held.now(self._held) for held in inputs]
        self._inputs = inputs
        self._items = tuple(items)

    def _held(self, fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it is held: a declared plain shard as the DTensor that it stands for."""
        for pattern, (mesh, placements) in self._plain_shards.items():
            if fnmatch.fnmatchcase(fqn, pattern):
                return as_dtensor(fqn, tensor, mesh, placements)
        return tensor

    def _wire_dtype(
        self, recipe: ParamRecipe, tensors: Mapping[str, torch.Tensor], slots: Mapping[str, _Slot]
    ) -> torch.dtype:
        dtypes = {
            tensors[fqn].dtype
            if slots[fqn].is_buffer
            else wire_dtype(emit.name, tensors[fqn].dtype, self._dtype, self._keep)
            for fqn in recipe.inputs
            for emit in recipe.emits
        }
        if len(dtypes) != 1:
            raise ValueError(
                f"{', '.join(recipe.inputs)} would be sent in several dtypes {sorted(map(str, dtypes))} but become "
                f"checkpoint tensors together ({[e.name for e in recipe.emits][:4]}): let `keep` match all or none"
            )
        return dtypes.pop()


def read(source: WeightSource) -> tuple[tuple[StreamItem, ...], Sequence[Held]]:
    """Items and tensors of one moment; looks only once at a module, which takes a while with thousands of parameters."""
    if isinstance(source, DTensorSource):
        return source.items(), source._current()
    return source.items(), source.tensors()


@dataclass(frozen=True)
class _Input:
    """One input of the stream: a tensor, or a weight whose adapters are merged when it is read."""

    fqn: str
    merge: LowRankMerge | None
    read: Mapping[str, torch.Tensor]

    def now(self, held: Callable[[str, torch.Tensor], torch.Tensor]) -> Held:
        merge = self.merge
        if merge is None:
            return held(self.fqn, self.read[self.fqn])
        return lambda: merge.apply({name: held(name, tensor) for name, tensor in self.read.items()})


def refuse_flattened(module: nn.Module) -> None:
    """Refuse what holds pieces of parameters that do not say so.

    Raises:
        ValueError: FSDP1 or DeepSpeed ZeRO-3 shards the module.
    """
    # The mark is torch's own, on what is left of the parameters where the module inside of the wrapper is given.
    flattened = any(getattr(parameter, "_fsdp_flattened", False) for parameter in module.parameters())
    if flattened or any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is sharded with FSDP1 (FullyShardedDataParallel), which flattens parameters: expected "
            "FSDP2. Use torch.distributed.fsdp.fully_shard; with accelerate FullyShardedDataParallelPlugin(fsdp_version=2), "
            "or `fsdp_version: 2` in its configuration"
        )
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} is sharded with DeepSpeed ZeRO-3, which leaves empty parameters behind: expected FSDP2, "
            "for example accelerate's FullyShardedDataParallelPlugin(fsdp_version=2)"
        )


def _walk(module: nn.Module) -> Iterator[_Slot]:
    """Parameters and persistent buffers in registration order, tied ones under each of their names."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for key in child._parameters:
            yield _Slot(dot + key, child._parameters, key, is_buffer=False)
        for key in child._buffers:
            if key not in child._non_persistent_buffers_set:
                yield _Slot(dot + key, child._buffers, key, is_buffer=True)


class _Seen:
    """What a module was made of when it was read: looked at before every sync, so with no loop of Python's."""

    def __init__(self, module: nn.Module) -> None:
        whole: list[dict[str, Any]] = []
        self._partial: list[tuple[dict[str, Any], Collection[str]]] = []
        for child in module.modules():
            whole += (child._modules, child._parameters)
            # Non-persistent buffers are not sent, and come and go (a cache).
            if child._non_persistent_buffers_set:
                self._partial.append((child._buffers, child._non_persistent_buffers_set))
            else:
                whole.append(child._buffers)
        self._whole = [registry for registry in whole if registry]
        self._empty = [registry for registry in whole if not registry]
        self._objects = self._now()
        tensors = [each for each in self._objects if isinstance(each, torch.Tensor)]
        self._locals = LocalTensors(tensors)
        self._specs = list(map(_SPEC, self._locals.wrapped))
        self._dtypes, self._shapes = self._kinds()

    def differs(self) -> bool:
        """Whether the module holds other objects now, or the same ones with another dtype or shape."""
        now = self._now()
        # `!=` on tensors would compare their elements.
        if len(now) != len(self._objects) or not all(map(operator.is_, now, self._objects)):
            return True
        if any(self._empty) or not all(map(operator.is_, map(_SPEC, self._locals.wrapped), self._specs)):
            return True
        dtypes, shapes = self._kinds()
        return not all(map(operator.is_, dtypes, self._dtypes)) or shapes != self._shapes

    def _kinds(self) -> tuple[list[torch.dtype], list[int]]:
        # Of local tensors, since a DTensor's own properties take several times as long; and numbers instead of thousands of
        # shapes, which Python's collector would count and then walk through all objects of the training process.
        held = self._locals.now()
        return list(map(_DTYPE, held)), list(map(hash, map(_SHAPE, held)))

    def _now(self) -> list[Any]:
        found = list(chain.from_iterable(map(dict.values, self._whole)))
        for registry, left_out in self._partial:
            found += [value for key, value in registry.items() if key not in left_out]
        return found


_SPEC, _DTYPE, _SHAPE = map(operator.attrgetter, ("_spec", "dtype", "shape"))


def _check_type(name: str, tensor: torch.Tensor) -> None:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # A subclass of Parameter may be packed, too (4-bit weights are), and its `data` would not show it.
    if type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer) or not _is_plain_dtensor(tensor):
        raise TypeError(
            f"{name}: a {type(local).__name__} can't be sent: expected a plain tensor or parameter, or a DTensor of "
            "plain tensors. Dequantise it in the source, or leave it out with a naming rule"
        )
    if local.layout is not torch.strided:
        raise TypeError(f"{name}: layout {local.layout} can't be sent, expected torch.strided")
    if local.is_meta:
        raise TypeError(
            f"{name}: is on the meta device and has no values; materialise the module before the sync"
        )
    try:
        dtype_name(local.dtype)
    except ValueError as error:
        raise TypeError(f"{name}: {error}") from error


def _is_plain_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor) is DTensor or not isinstance(tensor, DTensor)
