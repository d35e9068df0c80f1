"""The seam between a sender and the two wires that it can speak."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.stats import StageTimer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each kind of wait may take, in seconds.

    A wait that encloses another must outlast it, or the outer one fires first and hides the cause.

    Attributes:
        request_s: One request to the server; a client that would wait longer is held to it.
        transfer_s: Waiting for the worker on the same device to free a slot.
        control_s: Waiting for the other trainer ranks.
    """

    __module__ = "fsdp_ipc"

    request_s: float = 300.0
    transfer_s: float = 330.0
    control_s: float = 360.0

    def __post_init__(self) -> None:
        for name in ("request_s", "transfer_s", "control_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: expected seconds, more than 0")
        for inner, outer in (("request_s", "transfer_s"), ("transfer_s", "control_s")):
            shorter, longer = getattr(self, inner), getattr(self, outer)
            if longer <= shorter:
                raise ValueError(
                    f"time-outs must grow outwards: {outer}={longer:g} s is not more than {inner}={shorter:g} s, so it would "
                    f"fire first and hide the cause. Raise {outer} above {shorter:g}, or lower {inner}"
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


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """The stream as current one, or nothing on a CPU."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def outcome(future: Future[None] | None, timeout_s: float) -> BaseException | None:
    """What a request that is out ended with: its error, a time-out, or None if it went well or is another rank's."""
    if future is None:
        return None
    try:
        return future.exception(timeout=timeout_s)
    except TimeoutError:
        return TimeoutError(f"the server did not answer within {timeout_s:g} s")


def quietly(call: Callable[[WeightSyncClient], None], client: WeightSyncClient) -> bool:
    """Whether a clean-up call went well; its error is only logged, since the sync has a cause of its own already."""
    try:
        call(client)
    except Exception as error:  # noqa: BLE001  of any kind: nothing more can be done
        logger.info("while closing a failed update: %s", error)
        return False
    return True
