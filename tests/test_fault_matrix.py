"""The fault matrix: each step of the protocol × each kind of fault × each rank of two, over both wires.

In every cell all ranks that are left raise the same `WeightSyncError` in time, which names the rank and holds the server's
own words; memory, files, descriptors and threads are given back; and a later good send is bit-exact. A cell is run by
`tests.fault_lanes`, what breaks where is in `tests.fault_cells`. The table for people is docs/reliability.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_cells import LATE, POINTS, Cell
from tests.fault_lanes import run_cells

WIRES = ("fsdp_ipc", "ipc")
KINDS = (
    "exception",
    "out of memory",
    "SIGKILL of the rank",
    "SIGKILL of the server",
    "500",
    "reset",
    "hang",
)
SERVERS_STEPS = ("connect", "allocation", "start", "gather", "update", "finish", "barrier")
"""What the server does between two requests is seen at the next one: these stand for all, which are run by `make soak`."""
STEPS = {
    "out of memory": ("allocation", "export", "gather", "gathered"),
    "SIGKILL of the server": (*SERVERS_STEPS, "release"),
    **dict.fromkeys(("500", "reset", "hang"), SERVERS_STEPS),
}
BY_SERVER = ("SIGKILL of the server", "500", "reset", "hang")


def cells(wire: str, kind: str, *, both_ranks: bool, warm: bool = False) -> Iterator[Cell]:
    """The cells of a kind; where not both ranks are asked for, they take turns from step to step."""
    turn = (WIRES.index(wire) + KINDS.index(kind)) % 2
    for number, step in enumerate(POINTS):
        for rank in range(2):
            if kind in BY_SERVER and step == "barrier" and rank == 1:
                continue  # rank 1 waits there while the sender asks for the finish: the same cell as that one
            if (
                wire == "fsdp_ipc"
                and warm
                and step == "finish"
                and rank == 1
                and kind == "SIGKILL of the server"
            ):
                continue  # the finish of a later send is out before: when rank 1 comes there it may be done
            alone = kind in BY_SERVER and step == "barrier"
            if both_ranks or alone or rank == (number + turn) % 2:
                yield Cell(wire, step, kind, rank, packed=step != "release", warm=warm)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_reaches_every_rank_and_the_next_send_is_right(kind: str, wire: str) -> None:
    steps = STEPS.get(kind, POINTS)
    chosen = [cell for cell in cells(wire, kind, both_ranks=kind == "exception") if cell.step in steps]
    assert run_cells(wire, chosen) == []


@pytest.mark.parametrize("wire", WIRES)
def test_a_fault_in_a_later_send_reaches_every_rank(wire: str) -> None:
    """Plan, memory and session are known from a good send: other requests, and no exchange of handles."""
    steps = ("metadata", "start", "gather", "gathered", "update", "finish")
    warm = [
        Cell(wire, step, kind, (number + turn) % 2, warm=True)
        for turn, kind in enumerate(("exception", "500"))
        for number, step in enumerate(steps)
    ]
    assert run_cells(wire, warm) == []


@pytest.mark.parametrize("wire", WIRES)
def test_a_slow_consumer_is_waited_for(wire: str) -> None:
    slow = [Cell(wire, "update", "slow", 0, packed=packed, warm=packed) for packed in (True, False)]
    assert run_cells(wire, slow, num_lanes=1) == []


def test_the_matrix_can_fail() -> None:
    """A cell in which nothing breaks is told of, as is one whose step does not come."""
    found = run_cells("fsdp_ipc", [Cell("fsdp_ipc", "gather", "nothing", 1)], num_lanes=1)
    assert any("it went well" in text for text in found)
    assert any("the broken version was published" in text for text in found)
    # No handles are exchanged in a second send over the native wire.
    found = run_cells(
        "fsdp_ipc", [Cell("fsdp_ipc", "handle exchange", "exception", 1, warm=True)], num_lanes=1
    )
    assert any("the step was never reached" in text for text in found)


def test_the_page_tells_of_every_step_and_every_fault() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reliability.md").read_text()
    named = {
        "exception": "exception or no memory",
        "out of memory": "exception or no memory",
        "SIGKILL of the rank": "SIGKILL of a rank",
        "reset": "connection reset",
        "hang": "the server never answers",
        "500": "the server answers 500",
    }
    for word in (*POINTS, *(named.get(kind, kind) for kind in KINDS), "slow consumer"):
        assert word == "gathered" or word in page, word
    for path in re.findall(r"`(tests/\w+\.py)`", page):
        assert (Path(__file__).parent.parent / path).is_file(), path


@pytest.mark.soak
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_of_the_matrix(kind: str, wire: str) -> None:
    """Both ranks everywhere, in a first send and in a later one."""
    cold = list(cells(wire, kind, both_ranks=True))
    warm = [
        cell
        for cell in cells(wire, kind, both_ranks=True, warm=True)
        if cell.step in ("metadata", "start", "gather", "gathered", "update", "finish", *LATE)
    ]
    assert run_cells(wire, cold + warm) == []
