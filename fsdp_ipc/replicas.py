"""Plain tensors must be the same on every rank; what is not is refused instead of being mixed."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_ipc.gather import Held
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.metadata import StreamItem


def check_replicas(items: Sequence[StreamItem], tensors: Sequence[Held], group: TrainerGroup) -> None:
    """All ranks, collective."""
