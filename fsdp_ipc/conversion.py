"""The model family's own state-dict conversion, run on meta tensors to learn what it makes of what.

transformers reverts at save time what it converted at load time, torchtitan has `to_hf`, a user may have a function
of their own: all map a whole state dict to a whole state dict. `trace` runs such a function once on tensors without
data and reads off, per checkpoint tensor, which training tensors it comes from and whether it is just a slice of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from fsdp_ipc.recipe import Emit, EntryInfo, ParamRecipe, view_emit

logger = logging.getLogger(__name__)

Conversion = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]

# Modules that only wrap: the attribute that holds the wrapped module.
WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


_IN_PLACE = frozenset(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "and", "or", "xor")) | {
    "__setitem__"
}


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class _Provenance(TorchFunctionMode):
    """Notes for every tensor made under it which inputs it was made of.

    `contiguous` and `clone` hand back the tensor itself: what they would copy still is a view of its input then, and
    its strides say where it lies.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.written: set[int] = set()  # ids of storages that something wrote to
        self._origins: dict[int, frozenset[str]] = {}
        self._alive: list[Any] = []  # ids are unique only among living objects
        for name, tensor in inputs.items():
            self._note(tensor, frozenset((name,)))

    def _note(self, tensor: torch.Tensor, origins: frozenset[str]) -> None:
        self._origins[id(tensor)] = origins
        self._alive.append((tensor, tensor.untyped_storage()))

    def origins(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._origins.get(id(tensor), frozenset())

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            self.written.add(id(args[0].untyped_storage()))
        result = func(*args, **(kwargs or {}))
        made = [t for t in _tensors(result) if id(t) not in self._origins]
        if made:
            sources = frozenset().union(*(self.origins(t) for t in _tensors((args, kwargs or {}))))
            for tensor in made:
                self._note(tensor, sources)
        return result


@dataclass(frozen=True)
class Converted:
    """Transform by the conversion itself, given only the tensors that belong together."""

    convert: Conversion
    inputs: tuple[str, ...]
    names: tuple[str, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The checkpoint tensors in the order of `names`."""
        made = self.convert(dict(zip(self.inputs, tensors, strict=True)))
        if set(made) != set(self.names):
            raise ValueError(
                f"the state-dict conversion makes {sorted(made)} of {', '.join(self.inputs)} alone, but "
                f"{sorted(self.names)} as part of the whole; it must treat each group of tensors by itself"
            )
        return [made[name] for name in self.names]


def trace(convert: Conversion, entries: Mapping[str, EntryInfo]) -> list[ParamRecipe]:
    """Recipes that give, tensor by tensor, what `convert` makes of the whole state dict.

    Args:
        convert: State dict to state dict; must look at names, shapes and dtypes only, and must not change dtypes.
        entries: The clean training names, in the order of the model.

    Returns:
        Recipes in the order of their first input. Entries that the conversion drops are in none.

    Raises:
        ValueError: if an output comes from no input, or a group converted alone differs from the whole.
        TypeError: if an output is no tensor or has another dtype than its input.
    """
    inputs = {
        name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in entries.items()
    }
    storages = {id(tensor.untyped_storage()): name for name, tensor in inputs.items()}
    # `provenance` keeps every storage alive, so that its id means it alone.
    with torch.no_grad(), _Provenance(inputs) as provenance:
        outputs = dict(convert(dict(inputs)))

    groups = _Groups()
    origins: dict[str, frozenset[str]] = {}
    for name, tensor in outputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: the state-dict conversion made a {type(tensor).__name__}, not a tensor")
        origins[name] = provenance.origins(tensor)
        if not origins[name]:
            raise ValueError(
                f"{name}: the state-dict conversion made it of no training tensor; drop it by a pattern"
            )
        for origin in origins[name]:
            if tensor.dtype != entries[origin].dtype:
                raise TypeError(
                    f"{name}: the state-dict conversion changes {origin} from {entries[origin].dtype} to {tensor.dtype}; "
                    "the wire dtype is set by `dtype` and the keep-list"
                )
        groups.join(origins[name])

    members: dict[str, list[str]] = {}
    for name in outputs:
        members.setdefault(groups.root(next(iter(origins[name]))), []).append(name)
    joined: dict[str, list[str]] = {}
    dropped: list[str] = []
    for name in entries:
        root = groups.root(name)
        if root in members:
            joined.setdefault(root, []).append(name)
        else:
            dropped.append(name)
    if dropped:
        logger.warning("the state-dict conversion has no place for %s; not sent", ", ".join(dropped))

    recipes = []
    for root, names in joined.items():
        made = [(name, outputs[name]) for name in members[root]]
        places = {id(tensor.untyped_storage()) for _, tensor in made}
        is_sliced = len(names) == 1 and not places & provenance.written
        if is_sliced and all(storages.get(place) == names[0] for place in places):
            recipes.append(_sliced(names[0], made))
        else:
            recipes.append(_converted(convert, tuple(names), made, entries))
    return recipes


def _sliced(source: str, made: list[tuple[str, torch.Tensor]]) -> ParamRecipe:
    emits = [
        view_emit(name, tensor.shape, tensor.stride(), int(tensor.storage_offset())) for name, tensor in made
    ]
    return ParamRecipe((source,), tuple(sorted(emits, key=lambda emit: emit.start)))


def _converted(
    convert: Conversion,
    inputs: tuple[str, ...],
    made: list[tuple[str, torch.Tensor]],
    entries: Mapping[str, EntryInfo],
) -> ParamRecipe:
    recipe = ParamRecipe(
        inputs,
        tuple(Emit(name, tuple(tensor.shape)) for name, tensor in made),
        Converted(convert, inputs, tuple(name for name, _ in made)),
    )
    # At plan time, so that a conversion that looks at the whole dict is refused before any sync.
    recipe.apply([torch.empty(entries[n].shape, dtype=entries[n].dtype, device="meta") for n in inputs])
    return recipe


class _Groups:
    """Union-find over names."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def root(self, name: str) -> str:
        while (parent := self._parent.get(name, name)) != name:
            self._parent[name] = self._parent.get(parent, parent)
            name = parent
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = sorted({self.root(name) for name in names})
        for other in roots[1:]:
            self._parent[other] = roots[0]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module tree as it was before wrapping, sharing all parameters; the given module is left as it is.

    Wrappers (compile, activation checkpointing, FSDP1, DDP) are left out and FSDP2's class change is undone, since
    families look their conversion up by class and by path. For reading only: its hooks are those of the wrapped tree,
    and `_view_of` is the module itself, whose plain attributes may change after this.
    """
    while True:
        inner = next((module._modules[s] for s in (*WRAPPER_SEGMENTS, "module") if _wraps(module, s)), None)
        if inner is None:
            break
        module = inner
    cls: type[nn.Module] = type(module)
    if isinstance(module, FSDPModule):
        cls = next(c for c in cls.__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))
    view = object.__new__(cls)
    children = {name: None if child is None else unwrapped(child) for name, child in module._modules.items()}
    view.__dict__.update(module.__dict__, _modules=children, _view_of=module)
    return view


def _wraps(module: nn.Module, segment: str) -> bool:
    if segment not in module._modules:
        return False
    return segment != "module" or isinstance(module, nn.parallel.DistributedDataParallel)


def hooked_conversion(view: nn.Module) -> Conversion | None:
    """What `state_dict()` of an (unwrapped) module makes of its registered parameters and buffers.

    None if it just lists them: no module has hooks or a way of saving of its own. torchtitan's fused QKV has.
    """
    if not any(_saves_by_itself(module) for module in view.modules()):
        return None

    def convert(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        paths = {name[: end + 1] for name in state for end, char in enumerate(name) if char == "."}
        made: dict[str, torch.Tensor] = _holding(view, state, paths, "").state_dict()
        return {name: value for name, value in made.items() if not name.endswith("_extra_state")}

    return convert


def _saves_by_itself(module: nn.Module) -> bool:
    return (
        bool(module._state_dict_hooks)
        or type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    )


def _holding(module: nn.Module, state: Mapping[str, torch.Tensor], paths: set[str], prefix: str) -> nn.Module:
    """A copy of the part of the tree that has one of `paths`, with the given tensors as its parameters and buffers."""
    copy = object.__new__(type(module))
    copy.__dict__.update(
        module.__dict__,
        _parameters={key: state.get(prefix + key) for key in module._parameters},
        _buffers={key: state.get(prefix + key) for key in module._buffers},
        _modules={
            key: _holding(child, state, paths, f"{prefix}{key}.")
            for key, child in module._modules.items()
            if child is not None and f"{prefix}{key}." in paths
        },
        _state_dict_pre_hooks={},  # FSDP2's would reshard the real module
    )
    return copy


def chained(*conversions: Conversion | None) -> Conversion | None:
    """One conversion after the other, without the Nones."""
    steps = [step for step in conversions if step is not None]
    if len(steps) < 2:
        return steps[0] if steps else None

    def convert(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        for step in steps:
            state = dict(step(state))
        return state

    return convert


def transformers_conversion(model: nn.Module) -> Conversion | None:
    """What `save_pretrained` does to names and layouts of the state dict of an (unwrapped) transformers model.

    None if the model is none of transformers' classes.
    """
    if not any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        return None
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: experts are as in the checkpoint, only names may differ
        if getattr(model, "_checkpoint_conversion_mapping", None):
            raise ValueError(
                f"the checkpoint of {type(model).__name__} has other names than the model, and this transformers has no "
                "`revert_weight_conversion` to make them; install transformers >= 5, or give rename rules and "
                "`adapter=dict`"
            ) from None
        return None

    def convert(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
        return reverted

    return convert
