"""One stream for ranks that hold different modules."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_ipc.gather import Held
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.metadata import StreamItem


def unite(
    items: tuple[StreamItem, ...], tensors: Sequence[Held], group: TrainerGroup
) -> tuple[tuple[StreamItem, ...], Sequence[Held]]:
    """All ranks, collective."""
    return items, tensors


def place_tensors(
    united: Sequence[StreamItem], own: Sequence[StreamItem], tensors: Sequence[Held]
) -> Sequence[Held]:
    """This rank's tensors in the order of the united stream."""
    return tensors
