"""The seam between a sender and the two wires that it can speak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_ipc.stats import StageTimer


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each kind of wait may take, in seconds.

    A wait that encloses another must outlast it, or the outer one fires first and hides the cause.

    Attributes:
        request_s: One request to the server.
        transfer_s: Waiting for the worker on the same device to free a slot.
        control_s: Waiting for the other trainer ranks.
    """

    __module__ = "fsdp_ipc"

    request_s: float = 300.0
    transfer_s: float = 330.0
    control_s: float = 360.0

    def __post_init__(self) -> None:
        if not 0 < self.request_s < self.transfer_s < self.control_s:
            raise ValueError(
                f"time-outs must grow outwards: 0 < request_s={self.request_s:g} < transfer_s={self.transfer_s:g} < "
                f"control_s={self.control_s:g} does not hold"
            )


class Delivery(Protocol):
    """One wire: how a plan's buckets reach the workers. Every method is called on all ranks, in step."""

    backend: str

    def connect(self) -> None:
        """Collective: the init handshake, after which a sync can begin."""

    def deliver(self, version: str | None, sync: int, timer: StageTimer) -> dict[str, Any] | None:
        """Collective: one sync, from start to finish; returns what this rank's worker reported.

        Raises:
            WeightSyncError: On every rank, when any rank or worker failed.
        """

    def recover(self, reason: str) -> None:
        """Not collective, after a failed `deliver`: close what is half-open on the server, as well as can be."""

    def close(self) -> None:
        """This rank: give everything back."""
