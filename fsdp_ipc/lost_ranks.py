"""Who is missing when a collective of the trainer group breaks, told by all who are left in the same words.

A broken collective says only that some peer did not answer. So every rank that is left signs in at the job's store with
what it knows, waits a little for the others, and takes the one verdict that is written there: a rank that died is named
as such, one that does not come as late, and one that had failed by itself with its own cause.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from fsdp_ipc.process import ProcessName

_WAIT_S = 5.0
_POLL_S = 0.01


class RollCall:
    """The ranks of one trainer group and the processes that they are.

    Args:
        store: The group's own part of the job's store.
        rank: This rank in the group.
        names: The processes of all ranks.
        timeout_s: Time-out of the group's collectives.
    """

    def __init__(self, store: Any, rank: int, names: Sequence[ProcessName], timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._names = names
        self._seen = [n for n, name in enumerate(names) if n != rank and names[rank].sees(name)]
        self._verdict: dict[int, str] | None = None

    def dead(self) -> list[int]:
        """The ranks of which it is certain from here that their processes are gone. Not collective."""
        return [rank for rank in self._seen if self._names[rank].is_dead()]

    def verdict(self, own_cause: str | None) -> dict[int, str]:
        """After a broken collective, on every rank that is left: cause by rank, the same on all of them.

        Args:
            own_cause: Why this rank had failed before, if it had.
        """
        if self._verdict is None:
            try:
                self._verdict = self._agree(own_cause)
            except RuntimeError as error:
                # The store went with the rank or the host that kept it: what is known here must do.
                self._verdict = self._alone(own_cause, error)
        return self._verdict

    def _agree(self, own_cause: str | None) -> dict[int, str]:
        store, size = self._store, len(self._names)
        store.set(f"left/{self._rank}", own_cause or "")
        store.add("present", 1)
        begin = time.monotonic()
        wait_s = min(_WAIT_S, self._timeout_s)
        is_judge = False
        while not store.check(["verdict"]):
            waited = time.monotonic() - begin
            if not is_judge and (waited > wait_s or store.add("present", 0) + len(self.dead()) >= size):
                is_judge = store.add("judges", 1) == 1
            # One rank asks for all the others, so that this is linear in the ranks; if it dies, each for itself.
            if is_judge or waited > 2 * wait_s:
                return self._judge()
            time.sleep(_POLL_S)
        return self._read(store.get("verdict"))

    def _judge(self) -> dict[int, str]:
        store, dead = self._store, self.dead()
        causes: dict[int, str] = {}
        for rank in range(len(self._names)):
            if store.check([f"left/{rank}"]):
                causes[rank] = store.get(f"left/{rank}").decode()
            else:
                causes[rank] = self._died(rank) if rank in dead else self._late()
        causes = {rank: cause for rank, cause in causes.items() if cause}
        if not causes:
            lost = (
                f"lost the others, though all of them are alive: one of them came later than after {self._timeout_s:g} s, or "
                "the network failed. Build the sender anew on every rank"
            )
            causes = dict.fromkeys(range(len(self._names)), lost)
        return self._read(store.compare_set("verdict", "", json.dumps(causes)))

    def _alone(self, own_cause: str | None, error: RuntimeError) -> dict[int, str]:
        causes = {rank: self._died(rank) for rank in self.dead()}
        if own_cause is not None:
            causes[self._rank] = own_cause
        return causes or {
            self._rank: f"another rank of the trainer group did not take part within {self._timeout_s:g} s, or died, and "
            f"the job's store does not tell which ({error}). Build the sender anew on every rank, or restart the job"
        }

    def _read(self, written: bytes) -> dict[int, str]:
        return {int(rank): cause for rank, cause in json.loads(written).items()}

    def _died(self, rank: int) -> str:
        return f"its process (pid {self._names[rank].pid}) died. Restart the job"

    def _late(self) -> str:
        return (
            f"did not take part within {self._timeout_s:g} s, or died where the others can't see it. Every rank must call "
            "send() together; build the sender anew on every rank, or restart the job if this one has died"
        )
