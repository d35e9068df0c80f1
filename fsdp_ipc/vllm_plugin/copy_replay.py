"""What a plan holds and how it is replayed: the proven copies, bound to the trainer's memory a bucket at a time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_ipc.vllm_plugin.copy_kernel import batched_copy
from fsdp_ipc.vllm_plugin.copy_layout import Layout
from fsdp_ipc.vllm_plugin.copy_memory import Kernel, Piece
from fsdp_ipc.vllm_plugin.copy_peers import beside, peer_copies
from fsdp_ipc.vllm_plugin.copy_places import LivePlaces
from fsdp_ipc.vllm_plugin.loader import NamedTensors, is_attention
from fsdp_ipc.vllm_plugin.scattered import Scattered

__all__ = ["COMPANION", "CONSTANT", "CopyPlan", "attention_layers", "feeding", "kernels_of"]

CONSTANT = "constant data proves nothing"
COMPANION = "shares a layer or a tensor with one on the loader"


@dataclass(eq=False)
class _Bound:
    """One bucket's copies, ready to run."""

    tensors: NamedTensors
    copies: list[Callable[[], object]]
    rest: NamedTensors


@dataclass(eq=False)
class CopyPlan:
    """What was learned about one set of names."""

    digest: str
    kernels: list[Kernel]
    learned: bool = False
    part: nn.Module | None = None
    """What of the model goes through the loader, once learned."""
    proven: dict[Kernel, list[Piece]] = field(default_factory=dict)
    verdicts: dict[nn.Module, str | None] = field(default_factory=dict)
    """Modules that incoming tensors were loaded into: None if replayed, else why not."""
    headed: dict[str, set[nn.Module]] = field(default_factory=dict)
    strayed: dict[str, str] = field(default_factory=dict)
    _epoch: str | None = None
    _reasons: Counter[str] | None = None
    _places: LivePlaces | None = None
    _bound: dict[int, _Bound] = field(default_factory=dict)
    _sources: dict[str, list[tuple[torch.Tensor, Piece]]] = field(default_factory=dict)
    _constants: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))

    @property
    def num_proven(self) -> int:
        """Live tensors that are replayed."""
        return len(self.proven)

    def reasons(self) -> Counter[str]:
        """Parameters on the loader, counted by reason; counted once when all is settled."""
        if self.learned and self._reasons is not None:
            return self._reasons
        counts: Counter[str] = Counter()
        for kernel in self.kernels:
            verdicts = [self.verdicts[module] for module, _ in kernel.users if module in self.verdicts]
            if kernel not in self.proven and isinstance(kernel.tensor, nn.Parameter) and any(verdicts):
                counts[next(v for v in verdicts if v)] += 1
        self._reasons = counts
        return counts

    @property
    def sources(self) -> object:
        """Another object whenever what is replayed was settled anew."""
        return self._sources

    def landed(self, name: str) -> list[tuple[torch.Tensor, Piece]] | str:
        """Where the pieces of an incoming tensor lie, each with its live tensor; or why the plan does not know."""
        found = self._sources.get(name)
        if found:
            return found
        verdicts = (self.verdicts.get(module) for module in self.headed.get(name, ()))
        return next((v for v in verdicts if v), self.strayed.get(name, "nothing loads it"))

    def has_doubts(self) -> bool:
        """Whether watching another sync could prove more."""
        return not self.learned or CONSTANT in self.verdicts.values()

    def reaches(self) -> bool:
        """Whether every replayed tensor still has its memory."""
        return self._places is None or self._places.reachable()

    def holds(self) -> bool:
        """Whether every replayed tensor still is where it was."""
        return self._places is None or self._places.held()

    def bind(self, epoch: str) -> None:
        """Note the allocations of this sync; copies out of others are forgotten."""
        if epoch != self._epoch:
            self._bound.clear()
            self._epoch = epoch

    @torch.no_grad()
    def replay(
        self, bucket: int, tensors: NamedTensors, casts: Mapping[str, torch.dtype] | None = None
    ) -> NamedTensors:
        """Queue a bucket's copies.

        Args:
            bucket: Its number.
            tensors: Its tensors, as they lie in the trainer's memory.
            casts: By name, the dtype to which a tensor is cast on the way.

        Returns:
            The tensors that the loader must get.
        """
        bound = self._bound.get(bucket)
        if bound is None or bound.tensors is not tensors:
            bound = self._bound[bucket] = self._bind_bucket(bucket, tensors, casts or {})
        for copy in bound.copies:
            copy()
        return bound.rest

    def settle(self, model: nn.Module) -> None:
        """Fix what is replayed and what is not, from the verdicts."""
        self._reasons = None
        self._spread()
        self.proven = {
            kernel: pieces
            for kernel, pieces in self.proven.items()
            if all(self.verdicts.get(module) is None for module, _ in kernel.users)
        }
        self._bound.clear()
        self._sources = {}
        self._constants = ([], [])
        for kernel, pieces in self.proven.items():
            for piece in pieces:
                if piece.name is not None:
                    self._sources.setdefault(piece.name, []).append((kernel.tensor, piece))
                else:
                    view = piece.target.view_of(kernel.tensor.data)
                    self._constants[0].append(view)
                    self._constants[1].append(view.flatten()[:1].clone().reshape(()).expand(view.shape))
        self._places = LivePlaces(
            [(module, name, kernel.tensor) for kernel in self.proven for module, name in kernel.users]
        )
        on_loader = {module for module, verdict in self.verdicts.items() if verdict is not None}
        needed = bool(on_loader or self.strayed)
        self.part = _PartOfModel(model, self._with_companions(model, on_loader)) if needed else None

    def _spread(self) -> None:
        """A module can be replayed only if all tensors that it needs are needed by replayed modules alone."""
        changed = True
        while changed:
            changed = False
            groups = [
                *self.headed.values(),
                *({module for module, _ in kernel.users} for kernel in self.proven),
            ]
            for modules in groups:
                concerned = [module for module in modules if module in self.verdicts]
                bad = [v for v in (self.verdicts[module] for module in concerned) if v is not None]
                for module in concerned:
                    if bad and self.verdicts[module] is None:
                        # As long as the cause may go away, its companions are looked at again too.
                        self.verdicts[module] = CONSTANT if all(v == CONSTANT for v in bad) else COMPANION
                        changed = True

    def _with_companions(self, model: nn.Module, on_loader: set[nn.Module]) -> list[nn.Module]:
        """Add the modules that must take notice of a reload of others: ties, and attention that derives weights."""
        chosen = set(on_loader)
        for kernel in self.kernels:
            users = {module for module, _ in kernel.users}
            if len(users) > 1 and users & on_loader:
                chosen |= users
        for attention in attention_layers(model):
            if set(feeding(attention)) & on_loader:
                chosen.add(attention)
        return [module for module in model.modules() if module in chosen]

    def _bind_bucket(self, bucket: int, tensors: NamedTensors, casts: Mapping[str, torch.dtype]) -> _Bound:
        groups: dict[Any, list[_Pair]] = {}
        rest = []
        local: list[Callable[[], object]] = []
        remote: list[Callable[[], object]] = []
        for name, tensor in tensors:
            for live, piece in self._sources.get(name, ()):
                pairs = _pairs(live, piece, tensor)
                wire = casts.get(name, tensor.dtype)
                if wire != tensor.dtype != live.dtype != wire or pairs is None:
                    # Into a third dtype, a copy would round once where the trainer's way rounds twice.
                    local.append(
                        partial(_copy_whole, piece.target.view_of(live.data), tensor, piece.source, wire)
                    )
                    continue
                for pair in pairs:
                    # One odd pair would take the whole list off the fast path, so the kinds are kept apart.
                    key = (live.dtype, tensor.dtype, live.device, pair.alike, pair.distance > 0)
                    groups.setdefault(key, []).append(pair)
            if name not in self._sources and (
                any(self.verdicts.get(m) is not None for m in self.headed.get(name, ()))
                or name in self.strayed
            ):
                rest.append((name, tensor))
        for (_, _, _, alike, far), group in groups.items():
            # Every worker begins with the rank after its own, so that not all read from one at a time.
            group.sort(key=lambda pair: pair.distance)
            targets, sources = [pair.into for pair in group], [pair.out_of for pair in group]
            if far and alike:
                remote += peer_copies(targets, sources)
                continue
            batched = batched_copy(targets, sources) if alike else None
            (remote if far else local).append(batched or partial(_copy_all, targets, sources))
        if bucket == 0 and self._constants[0]:
            local.append(partial(_copy_all, *self._constants))
        device = next((key[2] for key in groups), torch.device("cpu"))
        return _Bound(tensors, beside(remote, local, device), rest)


@dataclass(eq=False)
class _Pair:
    """One copy: where to, where from, whether both are the same flat run of elements, and how far away the source is."""

    into: torch.Tensor
    out_of: torch.Tensor
    alike: bool
    distance: int


def _pairs(live: torch.Tensor, piece: Piece, tensor: torch.Tensor | Scattered) -> list[_Pair] | None:
    """A proven piece as copies out of an incoming tensor; None if it can't be cut where the tensor's parts end."""
    source, target = piece.source, piece.target
    if target.is_dense and _strides(target) == _strides(source):
        source, target = (Layout(at.offset, (at.numel,), (1,)) for at in (source, target))
    if isinstance(tensor, Scattered):
        parts = tensor.split(source, target)
        if parts is None:
            return None
    else:
        parts = [(source.view_of(tensor), target, 0)]
    alike = len(target.size) == 1 and target.stride == source.stride == (1,)
    return [_Pair(there.view_of(live.data), view, alike, distance) for view, there, distance in parts]


class _PartOfModel(nn.Module):
    """Some modules of a model, for functions that walk `modules()` and call `load_weights`."""

    _model: Any
    _chosen: Any

    def __init__(self, model: nn.Module, chosen: Sequence[nn.Module]) -> None:
        super().__init__()
        names = {id(module): name for name, module in model.named_modules()}
        # Not registered as children: walks must end at the modules that were chosen.
        self.__dict__["_model"] = model
        self.__dict__["_chosen"] = [(names[id(module)], module) for module in chosen]

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """The chosen modules, without those inside them."""
        del remove_duplicate
        return (module for _, module in self._chosen)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The chosen modules with their names in the whole model."""
        del args, kwargs
        return iter(self._chosen)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load through the whole model's own method, which knows where each name belongs."""
        return self._model.load_weights(weights)


def kernels_of(model: nn.Module) -> list[Kernel]:
    """The live parameters and buffers of a model, each once."""
    found: dict[int, Kernel] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.device.type != "meta":
                found.setdefault(id(tensor), Kernel(tensor, [])).users.append((module, name))
    return list(found.values())


def _copy_all(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    torch._foreach_copy_(into, out_of)


def _copy_whole(
    into: torch.Tensor, tensor: torch.Tensor | Scattered, source: Layout, wire: torch.dtype
) -> None:
    whole = tensor.whole() if isinstance(tensor, Scattered) else tensor
    into.copy_(source.view_of(whole).to(wire))


def _strides(layout: Layout) -> tuple[int, ...]:
    return tuple(s for n, s in zip(layout.size, layout.stride, strict=True) if n > 1)


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that vLLM finalises after all others."""
    # A model of vLLM's can't be here before vLLM is; plain modules need not import it.
    return [module for module in model.modules() if is_attention(module)] if "vllm" in sys.modules else []


def feeding(attention: nn.Module) -> Iterator[nn.Module]:
    """An attention layer and the modules that it, or its implementation, refers to."""
    yield from attention.modules()
    for owner in (attention, getattr(attention, "impl", None)):
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, nn.Module):
                yield from value.modules()
