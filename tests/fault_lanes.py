"""A lane of the fault matrix: two ranks and a server, kept alive from cell to cell and replaced when a cell kills them."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Self

from tests import fault_cells
from tests.fault_cells import INJECTED, LATE, Cell
from tests.fault_server import BOOM, ServerProcess
from tests.runner import RankFailure, run_ranks

RANKS = 2
CALL_S = 45.0


class RankPair:
    """Two ranks in processes of their own that do what they are told, one call after the other."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lane-")
        self._pipes: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self._ended: str | None = None
        listener = Listener(f"{self._folder.name}/socket", "AF_UNIX")
        listener._listener._socket.settimeout(1.0)  # a rank that never comes must not hang us
        self._thread = threading.Thread(target=self._run, args=(listener.address,), daemon=True)
        self._thread.start()
        while len(self._pipes) < RANKS:
            try:
                pipe = listener.accept()
            except TimeoutError:
                if self._ended is not None:
                    raise RuntimeError(f"the ranks did not start: {self._ended}") from None
                continue
            rank, self.pids[rank] = pipe.recv()
            self._pipes[rank] = pipe
        listener.close()

    @classmethod
    def start(cls) -> Self:
        """A pair; tried again if the machine is too busy for the ranks to meet in time."""
        try:
            return cls()
        except RuntimeError:
            return cls()

    def _run(self, address: str) -> None:
        try:
            run_ranks(_serve, RANKS, address, timeout_s=600)
            self._ended = "ended"
        except RankFailure as failure:  # a cell may kill one
            self._ended = str(failure)

    def call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] = range(RANKS)
    ) -> dict[int, Any]:
        """Call `function(state, *args)` on some ranks at once: result by rank, None for one that died."""
        for rank in ranks:
            self._pipes[rank].send((function, args))
        results: dict[int, Any] = {}
        for rank in ranks:
            pipe = self._pipes[rank]
            if not pipe.poll(CALL_S):
                raise TimeoutError(f"rank {rank} hangs")
            try:
                results[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                results[rank] = None
        return results

    def close(self) -> None:
        """End both, or what is left of them."""
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        self._thread.join(30)
        self._folder.cleanup()


def _serve(rank: int, world: int, address: str) -> None:
    import os

    state: dict[str, Any] = {"rank": rank, "world": world}
    with Client(address, "AF_UNIX") as pipe:
        pipe.send((rank, os.getpid()))
        while True:
            try:
                call = pipe.recv()
            except EOFError:
                return
            if call is None:
                return
            function, args = call
            try:
                pipe.send(function(state, *args))
            except Exception as error:
                pipe.send({"error": f"the cell itself broke: {type(error).__name__}: {error}"})


class Lane:
    """Runs cells of one wire, one after the other."""

    def __init__(self, wire: str) -> None:
        self._wire = wire
        self._server: ServerProcess | None = None
        self._pair: RankPair | None = None
        self._violations = 0

    def run(self, cell: Cell) -> list[str]:
        """What was wrong in a cell; nothing if all was as it must be."""
        try:
            server = self._server = self._server or ServerProcess(self._wire)
            if not server.alive:
                server.restart()
                self._violations = 0
            pair = self._pair = self._pair or RankPair.start()
            wrong = self._fail(cell, pair, server)
            return wrong + self._recover(cell, pair, server)
        except Exception as error:
            self.close()
            self._violations = 0
            return [f"{type(error).__name__}: {error}"]

    def close(self) -> None:
        """Stop the server and the ranks."""
        if self._pair is not None:
            self._pair.close()
        if self._server is not None:
            self._server.kill()
        self._server = self._pair = None

    def _fail(self, cell: Cell, pair: RankPair, server: ServerProcess) -> list[str]:
        told = pair.call(fault_cells.begin, cell, server.url, server.pid)
        return [f"in the broken send: {text}" for text in _judge(cell, told)]

    def _recover(self, cell: Cell, pair: RankPair, server: ServerProcess) -> list[str]:
        wrong: list[str] = []
        if cell.kind == "SIGKILL of the server":
            server.restart()
            self._violations = 0
        elif not server.fault(kind="none")["quiet"]:
            wrong.append("a request was still running in the server")
        dead: list[int] = []
        if cell.kind == "SIGKILL of the rank":
            dead = [pair.pids[cell.rank]]
            told = pair.call(fault_cells.give_up, ranks=[1 - cell.rank])[1 - cell.rank]
            if told["error"] is None or "died" not in told["error"] or told["seconds"] > 3 or told["files"]:
                wrong.append(f"the survivor's next send: {told}")
            self._pair = None
            fresh = RankPair.start()
            try:
                wrong += self._good(cell, fresh, server)
                left = [n for pid in dead for n in _files_of(pid)]
                if left:
                    wrong.append(f"files of the dead rank are left after the next start: {left}")
            finally:
                pair.close()
            self._pair = fresh
            return wrong
        return wrong + self._good(cell, pair, server)

    def _good(self, cell: Cell, pair: RankPair, server: ServerProcess) -> list[str]:
        told = pair.call(fault_cells.mend, cell, server.url)
        held = server.held()
        wrong = []
        for rank, outcome in told.items():
            found = {key: outcome[key] for key in ("error", "leaks", "files") if outcome.get(key)}
            wrong += [f"the good send, rank {rank}, {key}: {text}" for key, text in found.items()]
        for worker, weights in enumerate(held["workers"]):
            if weights != told[0].get("expected") or not weights:
                wrong.append(f"the good send: worker {worker} holds other bytes")
        fresh, self._violations = held["violations"][self._violations :], len(held["violations"])
        if strange := set(fresh) - _allowed(cell):
            wrong.append(f"the server saw: {strange}")
        if held["active"]:
            wrong.append("an update is open still")
        if (
            cell.kind == "SIGKILL of the server"
            and cell.step in LATE
            and "init" not in told[0].get("first", "")
        ):
            wrong.append(f"the first send to the new server: {told[0].get('first')}")
        if held["published"][-1:] != ["good"]:
            wrong.append(f"published {held['published'][-3:]}")
        if "bad" in held["published"][-2:] and not _may_publish(cell):
            wrong.append("the broken version was published")
        return wrong


def _allowed(cell: Cell) -> set[str]:
    """What a sender can't avoid: to find an update that a dead trainer, or a server that refused to end it, left open."""
    if cell.kind in ("SIGKILL of the rank", "500", "hang", "reset"):
        return {"start while an update is active"}
    return {"start without init"} if cell.kind == "SIGKILL of the server" and cell.step in LATE else set()


def _may_publish(cell: Cell) -> bool:
    """Whether the server had finished before the fault came, or there was no fault for it."""
    return cell.step in LATE or cell.kind == "slow" or (cell.step == "finish" and cell.rank != 0)


def _judge(cell: Cell, told: dict[int, Any]) -> list[str]:
    """What is wrong with how the broken send ended on each rank."""
    wrong = []
    alive = {rank: outcome for rank, outcome in told.items() if outcome is not None}
    killed = cell.kind == "SIGKILL of the rank"
    if set(told) - set(alive) != ({cell.rank} if killed else set()):
        return [f"ranks that died: {set(told) - set(alive)}"]
    if not killed and not cell.by_server and not alive[cell.rank].get("reached"):
        wrong.append("the step was never reached")
    for rank, outcome in alive.items():
        if outcome.get("seconds", 99) > 10:
            wrong.append(f"rank {rank} took {outcome.get('seconds')} s")
        if outcome.get("left"):
            wrong.append(f"rank {rank} keeps {outcome['left']}")
    errors = {outcome["error"] for outcome in alive.values()}
    if not _breaks(cell):
        return wrong + [f"it failed: {error}" for error in errors if error]
    if len(errors) != 1:
        return [*wrong, f"the ranks raised different errors: {errors}"]
    (error,) = errors
    if error is None:
        return [*wrong, "it went well"]
    wrong += [f"{word!r} is not in the error: {error}" for word in _words(cell) if word not in error]
    guilty = next(iter(alive.values()))["failures"]
    if cell.kind in ("exception", "out of memory") and INJECTED not in guilty.get(cell.rank, ""):
        wrong.append(f"rank {cell.rank} is not named: {guilty}")
    if killed and "died" not in guilty.get(cell.rank, ""):
        wrong.append(f"the dead rank {cell.rank} is not named: {guilty}")
    return wrong


def _breaks(cell: Cell) -> bool:
    """Whether the sync must fail on every rank that is left."""
    if cell.kind == "slow" or cell.step == "release":
        return False
    of_server = cell.kind in ("500", "hang", "reset", "SIGKILL of the server")
    # Rank 1 comes to the finish when the sender has asked for it already, or will not notice any more.
    return not (of_server and cell.step in LATE)


def _words(cell: Cell) -> list[str]:
    return {
        "exception": ["OSError", f"{INJECTED} at {cell.step}", f"rank {cell.rank}"],
        "out of memory": ["Memory", f"{INJECTED} at {cell.step}", f"rank {cell.rank}"],
        "SIGKILL of the rank": [f"rank {cell.rank}: its process (pid ", "died. Restart the job"],
        "500": ["breaks at bucket 1" if cell.step == "update" and cell.wire == "fsdp_ipc" else BOOM],
    }.get(cell.kind, [])


def _files_of(pid: int) -> list[str]:
    from pathlib import Path

    return sorted(path.name for path in Path("/dev/shm").glob(f"fsdp_ipc-{pid}-*"))


def run_cells(wire: str, cells: Sequence[Cell], num_lanes: int = 3) -> list[str]:
    """Run cells of one wire over several lanes; what was wrong, each with its cell."""
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)

    def work() -> list[str]:
        found: list[str] = []
        lane = Lane(wire)
        try:
            while True:
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return found
                found += [f"{cell}: {text}" for text in lane.run(cell)]
        finally:
            lane.close()

    with ThreadPoolExecutor(num_lanes) as pool:
        return [text for job in [pool.submit(work) for _ in range(num_lanes)] for text in job.result()]
