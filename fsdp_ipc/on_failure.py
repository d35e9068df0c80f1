"""What happens to the server when a sync has failed: nothing, or it stays paused until one has gone well."""

from __future__ import annotations

import logging
from typing import Any, Literal

from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.group import TrainerGroup, describe

OnFailure = Literal["raise", "pause"]

logger = logging.getLogger(__name__)

_PAUSED = (
    "the server stays paused. The next send of this sender that goes well resumes it; to serve what it holds now, weights "
    "of two versions perhaps, or after the job was started anew, call resume() of the client"
)


_BEFORE = frozenset(
    {
        "group",
        "set-up",
        "server",
        "connect",
        "metadata",
        "plan",
        "allocation",
        "export",
        "handles",
        "verify",
        "start",
    }
)
"""Steps at which no weights have moved yet: the server holds what it held."""

_HEAR_S = 2.0


class FailurePolicy:
    """The policy of one sender. Every rank has one and goes the same way; only the sender's talks to the server.

    Args:
        policy: `"raise"` leaves the server as it is, `"pause"` pauses it.
        client: The sender's client.
        group: The trainer ranks.
    """

    def __init__(self, policy: OnFailure, client: Any, group: TrainerGroup) -> None:
        self._pauses, self._group = policy == "pause", group
        self._client = client if group.is_sender else None
        self._paused = False

    def failed(self, error: BaseException, sync: int) -> None:
        """This rank, after a failed sync: the sender pauses the server; the error says on every rank how that went."""
        if not self._pauses or (isinstance(error, WeightSyncError) and error.step in _BEFORE):
            return
        self._paused = True
        if self._client is not None:
            try:
                # Running requests would go on with weights of two versions: they end here.
                self._client.pause()
                outcome = _PAUSED
            except Exception as caught:  # noqa: BLE001  the sync has a cause of its own
                outcome = f"the server could NOT be paused: {describe(caught)}"
            self._group.leave_note(f"pause/{sync}", outcome)
            logger.warning("on_failure='pause': %s", outcome)
        elif isinstance(error, WeightSyncError):
            outcome = self._heard(error, sync)
        if isinstance(error, WeightSyncError):
            error.advise(f"on_failure='pause': {outcome}", server_paused=outcome == _PAUSED)

    def _heard(self, error: WeightSyncError, sync: int) -> str:
        """What the rank that talks to the server says it has done; a dead one has done nothing."""
        sender = self._group.sender_rank
        dead = "died" in error.failures.get(sender, "")
        return (None if dead else self._group.read_note(f"pause/{sync}", _HEAR_S)) or (
            f"rank {sender}, which talks to the server, did not say that it has paused it: pause() it by hand before it "
            "serves weights of two versions"
        )

    def succeeded(self) -> None:
        """All ranks, collective after a failed sync: the server holds whole weights again and may serve them.

        Raises:
            WeightSyncError: On every rank, if the server did not resume.
        """
        if not self._paused:
            return
        with self._group.together("resume"):
            if self._client is not None:
                self._client.resume()
        self._paused = False


def check_on_failure(policy: str, client: Any) -> None:
    """Refuse a policy that the client can't carry out; without a client, only one that there is not.

    Raises:
        ValueError: Neither `"raise"` nor `"pause"`, or the client can't pause.
    """
    if policy not in ("raise", "pause"):
        raise ValueError(f"on_failure={policy!r}: expected 'raise' or 'pause'")
    missing = [name for name in ("pause", "resume") if not callable(getattr(client, name, None))]
    if policy == "pause" and client is not None and missing:
        raise ValueError(
            f"on_failure='pause' needs a client that can pause and resume a server, and {type(client).__name__} has no "
            f"{' and no '.join(missing)}: use HTTPWeightSyncClient, or on_failure='raise'"
        )
