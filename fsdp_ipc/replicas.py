"""Plain tensors must be the same on every rank; what is not is refused instead of being mixed.

A plain tensor in a sharded model is taken to be whole and equal everywhere. Experts that each rank keeps as a plain
tensor of the same name look just like that, and gathering them would lose all but one rank's. So each rank digests
what it holds, and ranks that should hold the same compare, once for every new plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.full import Held
from fsdp_ipc.group import TrainerGroup, describe
from fsdp_ipc.layout import local_of
from fsdp_ipc.metadata import StreamItem, TensorSpec

_BLOCK = 1 << 21
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(items: Sequence[StreamItem], tensors: Sequence[Held], group: TrainerGroup) -> None:
    """All ranks, collective: refuse what should be equal on several ranks and is not.

    Compared are plain tensors; tensors that some ranks own whole, among the owners; and shards on meshes that each
    cover a part of the group, among the ranks at the same place of their mesh. Tensors made by a function are not.

    Args:
        items: The stream, the same on every rank (`unite`).
        tensors: This rank's tensors, in the order of the inputs of `items`.
        group: The trainer ranks.

    Raises:
        ValueError: On every rank, naming tensors and ranks.
        WeightSyncError: A rank could not read its tensors.
    """
    if group.size == 1:
        return
    compared: list[tuple[TensorSpec, tuple[int, ...] | None, torch.Tensor]] = []
    for item in items:
        for n, spec in enumerate(item.inputs):
            held = tensors[item.index + n]
            if isinstance(held, torch.Tensor) and _is_compared(spec):
                compared.append((spec, _place(spec, held), held))
    error: Exception | None = None
    digests: list[int] = []
    try:
        digests = _digests([local_of(held) for _, _, held in compared])
    except Exception as caught:  # noqa: BLE001 - told to all ranks
        error = caught
    # One digest of all suffices while nothing differs, unless ranks differ by right.
    text = repr([(place, digest) for (_, place, _), digest in zip(compared, digests, strict=False)])
    total = hashlib.sha256(text.encode()).hexdigest()
    answers = group.gather_objects((total, None if error is None else describe(error)), "replicas")
    failures = {rank: cause for rank, (_, cause) in enumerate(answers) if cause is not None}
    if failures:
        raise WeightSyncError("replicas", failures) from error
    if len({total for total, _ in answers}) == 1:
        return
    mine = [
        None if place is None else (place, digest)
        for (_, place, _), digest in zip(compared, digests, strict=True)
    ]
    everybody = group.gather_objects(mine, "replicas")
    differing = []
    for column, (spec, _, _) in enumerate(compared):
        by_place: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for rank, row in enumerate(everybody):
            if (entry := row[column]) is not None:
                by_place.setdefault(entry[0], {}).setdefault(entry[1], []).append(rank)
        for kinds in by_place.values():
            if len(kinds) > 1:
                differing.append(f"{spec.fqn} {list(spec.shape)} ({_sets(list(kinds.values()))})")
                break
    if differing:
        raise ValueError(
            f"{len(differing)} tensors that every rank should hold alike differ between ranks: "
            f"{'; '.join(differing[:8])}{' …' if len(differing) > 8 else ''}. If each rank holds its own shard (its own "
            "experts), declare that: plain_shards={'<pattern>': (mesh, placements)}; else broadcast them before the sync"
        )


def _is_compared(spec: TensorSpec) -> bool:
    # Without ranks: plain, or on meshes that differ by rank (`union`). A DTensor vouches for its own replicas.
    return spec.layout.kind == "owned" or not spec.layout.ranks


def _place(spec: TensorSpec, held: torch.Tensor) -> tuple[int, ...] | None:
    """Ranks with the same place must hold the same; None for a rank that holds nothing."""
    layout = spec.layout
    if layout.kind == "owned":
        return (0,) if dist.get_rank() in layout.ranks else None
    if not isinstance(held, DTensor):
        return (0,)
    coordinate = held.device_mesh.get_coordinate()
    return tuple(coordinate) if coordinate is not None else None


def _sets(ranks: list[list[int]]) -> str:
    sets = [
        f"{'rank' if len(r) == 1 else 'ranks'} {', '.join(map(str, r[:4]))}{' …' if len(r) > 4 else ''}"
        for r in ranks
    ]
    return " against ".join(sets[:4])


def _digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A 64-bit digest of each tensor's bytes, computed on its device; one wait for each device at the end.

    `torch.hash_tensor` would not do: it is the exclusive or of all elements, which is 0 for every constant tensor
    of even length and does not see their order.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    order: list[tuple[torch.device, int]] = []
    for tensor in tensors:
        device = tensor.device
        if device not in weights:
            weights[device] = _weights(device)
        own = sums.setdefault(device, [])
        order.append((device, len(own)))
        own.append(_weighted_sum(tensor, weights[device]))
    values = {device: torch.stack(parts).tolist() for device, parts in sums.items()}
    return [values[device][n] for device, n in order]


def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern: with weights in a line, some patterns of differences would cancel out."""
    mixed = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * -7046029254386353131
    mixed ^= mixed >> 29
    mixed *= -4658895280553007687
    mixed ^= mixed >> 32
    return mixed | 1


def _weighted_sum(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    width = next(w for w in (8, 4, 2, 1) if raw.numel() % w == 0 and raw.data_ptr() % w == 0)
    numbers = raw.view(_INTEGERS[width])
    for block in numbers.split(_BLOCK):
        # int64 arithmetic wraps around, which is what a digest wants.
        total = total * 6364136223846793005 + (block.to(torch.int64) * weights[: block.numel()]).sum()
    return total
