"""Training names to checkpoint names: wrapper prefixes, adapters, ties, the family's conversion, a user's own rules.

In this order, each once: wrapper segments are stripped, adapters folded into the weight that they belong to, ties
resolved, the model family's own conversion applied (`conversion`), then the user's rules. Pure: works on names,
shapes and dtypes, gives the same recipes on every rank, does no collective.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from fsdp_ipc.conversion import (
    WRAPPER_SEGMENTS,
    Conversion,
    chained,
    hooked_conversion,
    trace,
    transformers_conversion,
    unwrapped,
)
from fsdp_ipc.experts import ExpertLayout, check_expert_names, is_fused, keep_fused, unfuse
from fsdp_ipc.peft import AdapterMap, LowRankMerge, adapter_map
from fsdp_ipc.recipe import EntryInfo, ParamRecipe, Transform

logger = logging.getLogger(__name__)

KEEP_DTYPE: tuple[str, ...] = (
    "*.mlp.gate.weight",
    "*.mlp.gate.bias",
    "*.block_sparse_moe.gate.weight",
    "*.router.weight",
    "*.router.bias",
    "*.e_score_correction_bias",
    "*.expert_bias",
)
"""Default keep-list: router weights and biases. Rounding them flips the choice of experts."""


class Patterns:
    """Globs that match a whole name (`*.gate.weight`) or, between slashes, regexes that match anywhere in it.

    Raises:
        ValueError: if a regex does not compile.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._globs: list[str] = []
        self._regexes: list[re.Pattern[str]] = []
        for pattern in patterns:
            if len(pattern) < 2 or pattern[0] != "/" or pattern[-1] != "/":
                self._globs.append(pattern)
                continue
            try:
                self._regexes.append(re.compile(pattern[1:-1]))
            except re.error as error:
                raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error

    def __bool__(self) -> bool:
        return bool(self._globs or self._regexes)

    def __contains__(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self._globs) or any(
            r.search(name) for r in self._regexes
        )


_DEFAULT_KEEP = Patterns(KEEP_DTYPE)


def wire_dtype(
    name: str, dtype: torch.dtype, requested: torch.dtype | None, keep: Patterns | None = None
) -> torch.dtype:
    """Dtype in which a tensor is sent.

    Args:
        name: Checkpoint name.
        dtype: The live training tensor's dtype.
        requested: Dtype for the whole model, None to send everything as it is.
        keep: Names that stay as they are, None for `KEEP_DTYPE`. Integers, booleans and 8-bit floats always do: cast without their scales
            they would mean something else.
    """
    keep = _DEFAULT_KEEP if keep is None else keep
    if requested is None or not dtype.is_floating_point or dtype.itemsize < 2 or name in keep:
        return dtype
    return requested


def clean_fqn(fqn: str, *, leading_module: bool = False) -> str:
    """The name without segments that wrappers added: compile, activation checkpointing, FSDP1.

    Args:
        fqn: Path of a parameter or buffer in the wrapped module.
        leading_module: Drop leading `module` segments, too (DDP).
    """
    segments = [segment for segment in fqn.split(".") if segment not in WRAPPER_SEGMENTS]
    while leading_module and len(segments) > 1 and segments[0] == "module":
        del segments[0]
    return ".".join(segments)


def clean_fqns(fqns: Sequence[str]) -> dict[str, str]:
    """Clean name by raw name; a leading `module.` goes only if all names have it, since one may be a real submodule.

    Raises:
        ValueError: if two names become one.
    """
    clean = {fqn: clean_fqn(fqn) for fqn in fqns}
    while clean and all(name.startswith("module.") for name in clean.values()):
        clean = {fqn: name.removeprefix("module.") for fqn, name in clean.items()}
    _refuse_collisions((name, fqn) for fqn, name in clean.items())
    return clean


def _refuse_collisions(pairs: Iterable[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    clashes = []
    for name, origin in pairs:
        if (other := seen.setdefault(name, origin)) != origin:
            clashes.append(f"{name} (from {other} and from {origin})")
    if clashes:
        raise ValueError(
            f"{len(clashes)} checkpoint names would be sent twice, and a server would load one of the two: "
            f"{'; '.join(clashes[:8])}. Change the rename rules, or drop one of them"
        )


@dataclass(frozen=True)
class Rename:
    r"""A user's rule for checkpoint names. Each name is renamed by at most one rule, once.

    Attributes:
        pattern: Whole name, prefix of whole dotted segments (`""` is a prefix of all), or regex.
        replacement: What takes its place; for a regex it may have `\1` groups.
        kind: How `pattern` is meant.
    """

    pattern: str
    replacement: str
    kind: Literal["exact", "prefix", "regex"] = "prefix"

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "prefix", "regex"):
            raise ValueError(
                f"kind of rename rule {self.pattern!r}: expected exact, prefix or regex, got {self.kind!r}"
            )
        if self.kind == "regex":
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"rename rule {self.pattern!r} is no regular expression: {error}") from error

    def apply(self, name: str) -> str | None:
        """The new name, None if the rule does not match."""
        if self.kind == "exact":
            return self.replacement if name == self.pattern else None
        if self.kind == "regex":
            renamed, count = re.subn(self.pattern, self.replacement, name, count=1)
            return renamed if count else None
        old = self.pattern.removesuffix(".")
        new = self.replacement.removesuffix(".")
        if not old:
            rest = name
        elif name == old:
            rest = ""
        elif name.startswith(f"{old}."):
            rest = name[len(old) + 1 :]
        else:
            return None
        return ".".join(part for part in (new, rest) if part)


class Renamer:
    """Rules in their order of precedence: exact before others, then the longest pattern."""

    def __init__(self, rules: Iterable[Rename]) -> None:
        self._rules = sorted(rules, key=lambda rule: (rule.kind != "exact", -len(rule.pattern)))

    def __call__(self, names: Iterable[str]) -> dict[str, str]:
        """New name by name. Warns about rules that matched none."""
        unused = list(self._rules)
        renamed = {}
        for name in names:
            renamed[name] = name
            for rule in self._rules:
                if (target := rule.apply(name)) is not None:
                    renamed[name] = target
                    if rule in unused:
                        unused.remove(rule)
                    break
        for rule in unused:
            warnings.warn(
                f"rename rule {rule.kind} {rule.pattern!r} -> {rule.replacement!r} decided no name",
                stacklevel=3,
            )
        return renamed


@dataclass(frozen=True)
class _Picked:
    """A transform of which some tensors are not wanted."""

    transform: Transform
    wanted: tuple[int, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = self.transform(tensors)
        return [made[index] for index in self.wanted]


def _without(recipe: ParamRecipe, drop: Patterns) -> ParamRecipe:
    """The recipe without the tensors that are not sent."""
    wanted = tuple(index for index, emit in enumerate(recipe.emits) if emit.name not in drop)
    if len(wanted) == len(recipe.emits):
        return recipe
    emits = tuple(recipe.emits[index] for index in wanted)
    transform = None if recipe.transform is None else _Picked(recipe.transform, wanted)
    return replace(recipe, emits=emits, transform=transform)


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How the names of one training module become those of its checkpoint. Made by `naming_for`.

    Attributes:
        convert: The family's conversion of a clean state dict, None for none.
        adapters: Adapters in the module, None for none.
        rename: The user's rules.
        ties: `"once"` sends a parameter that has several names under one of them, `"both"` under all.
        tied_names: Clean names that a checkpoint leaves out when they are tied to another one.
        experts: `"checkpoint"` (as the conversion has it), `"fused"` (3-D), or the layout by which to unfuse.
        drop: Names, before or after conversion, that are not sent.
    """

    convert: Conversion | None = None
    adapters: AdapterMap | None = None
    rename: tuple[Rename, ...] = ()
    ties: Literal["once", "both"] = "once"
    tied_names: frozenset[str] = frozenset()
    experts: Literal["checkpoint", "fused"] | ExpertLayout = "checkpoint"
    drop: tuple[str, ...] = ()

    def recipes(
        self, entries: Mapping[str, EntryInfo], ties: Iterable[Sequence[str]] = ()
    ) -> list[ParamRecipe]:
        """Recipes for all that is sent, in the order of `entries`.

        Args:
            entries: By name in the sharded state, in the order of the model.
            ties: Groups of those names that share one parameter.

        Raises:
            ValueError: if two tensors get one name, or an adapter or a conversion can't be carried out.
        """
        drop = Patterns(self.drop)
        raw = {name: fqn for fqn, name in clean_fqns(list(entries)).items()}
        merges: dict[str, LowRankMerge] = {}
        if self.adapters is not None:
            merges = {name: merge.renamed(raw) for name, merge in self.adapters.merges.items()}
            sent = self.adapters.names
            raw = {sent[name]: fqn for name, fqn in raw.items() if name in sent}
        infos = {name: entries[fqn] for name, fqn in raw.items()}
        clean = {fqn: name for name, fqn in raw.items()}
        for group in ties:
            names = [clean[fqn] for fqn in group if fqn in clean]
            if self.ties == "once" and len(names) > 1:
                if changed := [name for name in names if name in merges and merges[name].terms]:
                    raise ValueError(
                        f"{' and '.join(names)} are one parameter, but an adapter changes {changed[0]} alone, so that one "
                        "name can't stand for both; ties='both' sends each, for a server that does not tie them"
                    )
                for name in self._tied_away(names, list(infos)):
                    del infos[name]
        infos = {name: info for name, info in infos.items() if name not in drop}

        recipes = self._convert(infos)
        if self.experts == "fused":
            recipes = [keep_fused(recipe, infos[recipe.fqn].shape) for recipe in recipes]
        recipes = self._finish(recipes, raw, merges, drop)
        position = {fqn: index for index, fqn in enumerate(entries)}
        return sorted(recipes, key=lambda recipe: position[recipe.fqn])

    def _tied_away(self, names: list[str], order: list[str]) -> list[str]:
        """Names of a tie that are left out: all but the one that the checkpoint keeps, the first one in doubt."""
        names = sorted(names, key=order.index)
        kept = next((name for name in names if name not in self.tied_names), names[0] if names else None)
        return [name for name in names if name != kept]

    def _convert(self, infos: Mapping[str, EntryInfo]) -> list[ParamRecipe]:
        recipes = []
        rest = dict(infos)
        if isinstance(self.experts, ExpertLayout):
            fused = [name for name in infos if is_fused(name)]
            recipes = [unfuse(name, rest.pop(name).shape, self.experts) for name in fused]
        convert = self.convert if self.convert is not None else lambda state: state
        return recipes + trace(convert, rest)

    def _finish(
        self,
        recipes: list[ParamRecipe],
        raw: Mapping[str, str],
        merges: Mapping[str, LowRankMerge],
        drop: Patterns,
    ) -> list[ParamRecipe]:
        """User's rules, checks, and the names of the sharded state in place of the clean ones."""
        finished = [kept for recipe in recipes if (kept := _without(recipe, drop)).emits] if drop else recipes
        renamed = Renamer(self.rename)(e.name for r in finished for e in r.emits) if self.rename else {}
        result = []
        for recipe in finished:
            emits = recipe.emits
            if renamed:
                emits = tuple(replace(emit, name=renamed[emit.name]) for emit in emits)
            check_expert_names(emits)
            result.append(
                replace(
                    recipe,
                    inputs=tuple(raw[name] for name in recipe.inputs),
                    emits=emits,
                    merges=tuple(merges[name] for name in recipe.inputs if name in merges),
                )
            )
        _refuse_collisions((e.name, f"{r.fqn} [{n}]") for r in result for n, e in enumerate(r.emits))
        return result


def naming_for(
    module: nn.Module,
    *,
    rename: Iterable[Rename] = (),
    ties: Literal["once", "both"] = "once",
    experts: Literal["checkpoint", "fused"] | ExpertLayout = "checkpoint",
    drop: Iterable[str] = (),
    adapter: Any = None,
) -> Naming:
    """The naming of a training module: transformers models as `save_pretrained` would write them, others as they are.

    Args:
        module: As it is trained: sharded, compiled, wrapped, with adapters.
        rename: Rules for the final names.
        ties: See `Naming`.
        experts: See `Naming`.
        drop: Patterns (see `Patterns`) of what is not sent, for example a buffer.
        adapter: For a module that is none of transformers' classes: an object with `to_hf(state_dict)`, such as a
            torchtitan state-dict adapter, or such a function itself.

    Raises:
        ValueError: for adapters that can't be merged, by name.
    """
    if ties not in ("once", "both"):
        raise ValueError(f"ties: expected 'once' or 'both', got {ties!r}")
    if not isinstance(experts, ExpertLayout) and experts not in ("checkpoint", "fused"):
        raise ValueError(f"experts: expected 'checkpoint', 'fused' or an ExpertLayout, got {experts!r}")
    plain = unwrapped(module)
    adapters = adapter_map(plain)
    if adapters is not None:
        plain = adapters.base_model
    family: Conversion | None = getattr(adapter, "to_hf", adapter)
    convert = chained(hooked_conversion(plain), transformers_conversion(plain) if family is None else family)
    tied = getattr(plain, "all_tied_weights_keys", None)
    ignored = getattr(plain, "_keys_to_ignore_on_save", None) or ()
    return Naming(
        convert=convert,
        adapters=adapters,
        rename=tuple(rename),
        ties=ties,
        tied_names=frozenset(tied or ()),
        experts=experts,
        drop=(*drop, *ignored),
    )
