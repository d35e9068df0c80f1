"""One stream for ranks that hold different modules: each keeps some of the experts, and all send all of them.

Ranks whose lists are equal are told so by one digest each. Else the lists are merged: what every rank has keeps its
order, what only some have goes between, the first owner's first, and is broadcast by its first owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.full import Held, now
from fsdp_ipc.group import TrainerGroup, describe
from fsdp_ipc.layout import local_of
from fsdp_ipc.metadata import WHOLE, Layout, StreamItem


@dataclass(frozen=True)
class _Told:
    """What the ranks tell each other of an item: `exact` with the mesh's ranks, `rough` without them."""

    exact: bytes
    rough: bytes


def unite(
    items: tuple[StreamItem, ...], tensors: Sequence[Held], group: TrainerGroup
) -> tuple[tuple[StreamItem, ...], Sequence[Held]]:
    """All ranks, collective: the stream of all ranks together.

    Args:
        items: This rank's stream.
        tensors: This rank's tensors, in the order of the inputs of `items`.
        group: The trainer ranks.

    Returns:
        `items` and `tensors` themselves where all ranks have the same; else the union, and the tensors in its order
        with empty ones for what this rank has not.

    Raises:
        ValueError: On every rank: an item that only some ranks have and that can't be sent from one of them, or the
            ranks' lists contradict each other, by name.
        WeightSyncError: A rank could not describe its items.
    """
    if group.size == 1:
        return items, tensors
    error: Exception | None = None
    told: list[_Told] = []
    try:
        digests = _Digests()
        told = [digests.of(item) for item in items]
    except Exception as caught:  # noqa: BLE001 - told to all ranks
        error = caught
    total = hashlib.sha256(b"".join(t.exact for t in told)).digest()
    answers = group.gather_objects((total, None if error is None else describe(error)), "metadata")
    failures = {rank: cause for rank, (_, cause) in enumerate(answers) if cause is not None}
    if failures:
        raise WeightSyncError("metadata", failures) from error
    if len({digest for digest, _ in answers}) == 1:
        return items, tensors

    lists = group.gather_objects([(t.rough, t.exact) for t in told], "metadata")
    holders: dict[bytes, list[int]] = {}
    exact: dict[bytes, set[bytes]] = {}
    for rank, entries in enumerate(lists):
        for rough, full in entries:
            holders.setdefault(rough, []).append(rank)
            exact.setdefault(rough, set()).add(full)
    common = {rough for rough, ranks in holders.items() if len(ranks) == group.size}
    mine = {t.rough: item for t, item in zip(told, items, strict=True)}
    # Only the first owner of what not everybody has describes it to the others.
    described = [
        (rough, _described(item))
        for rough, item in mine.items()
        if rough not in common and holders[rough][0] == group.rank
    ]
    known = {
        rough: entry for entries in group.gather_objects(described, "metadata") for rough, entry in entries
    }
    _refuse_differences(known, holders)
    for rough, (item, refusal, _) in known.items():
        if refusal is not None:
            raise ValueError(
                f"{item.recipe.emits[0].name} is only on ranks {holders[rough][:8]} of {group.size}: {refusal}"
            )

    order = _merged([[rough for rough, _ in entries] for entries in lists], common, group)
    united: list[StreamItem] = []
    index = 0
    for rough in order:
        item = mine[rough] if rough in mine else known[rough][0]
        if rough not in common:
            owners = tuple(group.ranks[rank] for rank in holders[rough])
            item = replace(item, inputs=(replace(item.inputs[0], layout=Layout("owned", owners)),))
        elif len(exact[rough]) > 1:
            item = replace(
                item, inputs=tuple(replace(s, layout=replace(s.layout, ranks=())) for s in item.inputs)
            )
        united.append(replace(item, index=index))
        index += len(item.inputs)
    _refuse_clashes(united, group)
    return tuple(united), place_tensors(united, items, tensors)


def place_tensors(
    united: Sequence[StreamItem], own: Sequence[StreamItem], tensors: Sequence[Held]
) -> Sequence[Held]:
    """This rank: its tensors in the order of the united stream, with empty ones for what it has not."""
    if united is own:
        return tensors
    at = {_key(item): item for item in own}
    device = local_of(now(tensors[0])).device if tensors else torch.device("cpu")
    placed: list[Held] = []
    for item in united:
        if (mine := at.get(_key(item))) is not None:
            placed.extend(tensors[mine.index : mine.index + len(mine.inputs)])
        else:
            placed.extend(torch.empty(0, dtype=spec.dtype, device=device) for spec in item.inputs)
    return placed


def _key(item: StreamItem) -> tuple[object, ...]:
    return item.recipe.inputs, item.recipe.emits[0].name if item.recipe.emits else None


class _Digests:
    """Digests of items. A layout names all ranks of its mesh: each one is written out once, not once an item."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[str, str]] = {}

    def of(self, item: StreamItem) -> _Told:
        exact, rough = [], []
        for spec in item.inputs:
            layout = spec.layout
            if id(layout) not in self._texts:
                without = replace(layout, ranks=(len(layout.ranks),))
                self._texts[id(layout)] = repr(layout), repr(without)
            text = f"{spec.fqn}|{spec.shape}|{spec.dtype}|{spec.wire_dtype}"
            exact.append(text + self._texts[id(layout)][0])
            rough.append(text + self._texts[id(layout)][1])
        recipe = item.recipe
        rest = repr((recipe.emits, recipe.transform is None, bool(recipe.merges)))
        return _Told(*(hashlib.sha256("".join([*t, rest]).encode()).digest()[:16] for t in (exact, rough)))


def _described(item: StreamItem) -> tuple[StreamItem, str | None, str]:
    """The item as the other ranks need it; why it can't be sent from one rank alone, if it can't; how it is held."""
    refusal = None
    kinds = {spec.layout.kind for spec in item.inputs}
    if item.recipe.transform is not None:
        refusal = (
            f"it is made of {', '.join(item.recipe.inputs[:4])} together, which needs every one of them on each rank. "
            "Hold these experts on all ranks or as one DTensor, or send them unconverted"
        )
    elif kinds != {"whole"}:
        refusal = (
            f"it is sharded there as {item.inputs[0].layout.placements} over ranks {list(item.inputs[0].layout.ranks[:8])}, "
            "and the other ranks can't take part in its gather. Put every rank into its mesh"
        )
    specs = tuple(replace(spec, layout=WHOLE) for spec in item.inputs)
    layout = item.inputs[0].layout
    held = str(layout.kind) if layout.kind == "whole" else f"sharded as {layout.placements}"
    return StreamItem(specs, replace(item.recipe, transform=None, merges=()), 0), refusal, held


def _refuse_differences(
    known: Mapping[bytes, tuple[StreamItem, str | None, str]], holders: Mapping[bytes, Sequence[int]]
) -> None:
    """Refuse a name that ranks have in different forms, which is not a name that only some of them have."""
    forms: dict[str, list[bytes]] = {}
    for rough, (item, _, _) in known.items():
        for emit in item.recipe.emits[:1]:
            forms.setdefault(emit.name, []).append(rough)
    for name, roughs in forms.items():
        if len(roughs) < 2:
            continue
        told = []
        for rough in roughs:
            item, _, held = known[rough]
            spec = item.inputs[0]
            sent = f"sent as {spec.wire_dtype}"
            told.append(
                f"ranks {list(holders[rough][:8])} hold {spec.fqn} {list(spec.shape)} {spec.dtype}, {held}, {sent}"
            )
        raise ValueError(
            f"the ranks disagree about {name}: {'; '.join(told)}. Build the module, and choose the wire dtype, alike on "
            "every rank"
        )


def _merged(lists: list[list[bytes]], common: set[bytes], group: TrainerGroup) -> list[bytes]:
    """What all have, in the order that all have it in; before each of it what some ranks have there, by rank."""
    anchors = [[rough for rough in entries if rough in common] for entries in lists]
    for rank, own in enumerate(anchors):
        if own != anchors[0]:
            at = next(n for n, (a, b) in enumerate(zip(own, anchors[0], strict=True)) if a != b)
            raise ValueError(
                f"ranks 0 and {rank} of {group.size} hold the same tensors in different orders, from number {at} of those "
                "that all have: build the module alike on every rank"
            )
    between: list[dict[bytes, None]] = [{} for _ in range(len(anchors[0]) + 1)]
    for entries in lists:
        at = 0
        for rough in entries:
            if rough in common:
                at += 1
            else:
                between[at][rough] = None
    order: dict[bytes, None] = {}
    for at, some in enumerate(between):
        order.update(some)
        if at < len(anchors[0]):
            order[anchors[0][at]] = None
    return list(order)


def _refuse_clashes(items: Sequence[StreamItem], group: TrainerGroup) -> None:
    seen: dict[str, StreamItem] = {}
    for item in items:
        for emit in item.recipe.emits:
            other = seen.setdefault(emit.name, item)
            if other is not item:
                a, b = other.inputs[0], item.inputs[0]
                raise ValueError(
                    f"the ranks disagree about {emit.name}: {a.fqn} {list(a.shape)} {a.wire_dtype} {_held(a.layout, group)} and "
                    f"{b.fqn} {list(b.shape)} {b.wire_dtype} {_held(b.layout, group)}; a name must mean one tensor"
                )


def _held(layout: Layout, group: TrainerGroup) -> str:
    return f"on global ranks {list(layout.ranks[:8])}" if layout.ranks else f"on all {group.size} ranks"
