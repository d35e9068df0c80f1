"""The one exception that a failed sync raises, the same on every trainer rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class WeightSyncError(Exception):
    """A weight sync failed; every rank of the trainer group raises it with the same causes.

    The version was not published; only after `"finish"` was asked for (step `"finish"` or later) it may have been, and the
    workers then hold its weights whole. The next `send` works or says what must be restarted.

    Attributes:
        step: Name of the protocol step at which the sync ended, for example `"gather"`.
        failures: Cause by rank *of the trainer group* (not the global rank), in the words of that rank,
            the server's own text included.
        server_paused: The server was left paused, as `on_failure="pause"` asks; False, too, if nobody could do it.
    """

    __module__ = "fsdp_ipc"

    def __init__(self, step: str, failures: Mapping[int, str]) -> None:
        self.step = step
        self.failures: dict[int, str] = dict(failures)
        self.server_paused = False
        self._advice = ""
        ranks: dict[str, list[int]] = {}
        for rank, cause in sorted(self.failures.items()):
            ranks.setdefault(cause, []).append(rank)
        causes = "; ".join(f"{_named(same)}: {cause}" for cause, same in ranks.items())
        super().__init__(f"weight sync failed at {step!r}: {causes}")

    def advise(self, text: str, *, server_paused: bool = False) -> None:
        """Add what was done about the failure, and what to do."""
        self._advice = f"{self._advice}. {text}"
        self.server_paused = self.server_paused or server_paused

    def __str__(self) -> str:
        return f"{super().__str__()}{self._advice}"

    def __reduce__(self) -> tuple[type[WeightSyncError], tuple[str, dict[int, str]], dict[str, Any]]:
        state = {"server_paused": self.server_paused, "_advice": self._advice}
        return type(self), (self.step, self.failures), state


def _named(ranks: Sequence[int]) -> str:
    """One rank or several, but not a thousand."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
