"""What a trainer rank does in one cell of the fault matrix: a send that something breaks, then one that must be good.

Runs in the ranks (`tests.fault_lanes`). A fault is put at a step of the protocol by wrapping the function that does it, on
one rank, for one send.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, Timeouts, WeightSender, WeightSyncError, shm
from fsdp_ipc.control import ControlBlock
from fsdp_ipc.gather import Gatherer
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import SharedBuffer
from tests.fault_server import digests
from tests.stock_on_cpu import stock_on_cpu
from tests.toy import build, full, shard

BUCKET = 700
INJECTED = "injected fault"
LATE = ("barrier", "release")
"""Steps after the server has been asked for the last time."""

CALM = Timeouts(request_s=20, transfer_s=25, control_s=30)
HASTY = Timeouts(request_s=0.5, transfer_s=1.0, control_s=4.0)


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix.

    Attributes:
        wire: `"fsdp_ipc"` or `"ipc"`.
        step: Where it happens, a key of `POINTS`.
        kind: What happens there.
        rank: On which rank.
        packed: Staging slots, or an allocation a tensor.
        warm: Whether a good send went before.
    """

    wire: str
    step: str
    kind: str
    rank: int
    packed: bool = True
    warm: bool = False

    @property
    def by_server(self) -> bool:
        """Whether the server makes the fault by itself, at one of its routes or while a worker reads."""
        return self.kind == "slow" or (
            self.kind in ("500", "hang", "reset") and self.step in ("start", "update", "finish")
        )

    def arming(self) -> dict[str, Any]:
        """What switches such a fault on, see `tests.fault_server`."""
        if self.kind == "slow":
            return {"kind": "slow"}
        if self.step == "update" and self.wire == "fsdp_ipc" and self.kind != "reset":
            return {"kind": self.kind, "worker": self.rank}
        route = {
            "start": "/start_weight_update",
            # Over our wire a later send has no such request: the workers load in start.
            "update": "/start_weight_update"
            if self.wire == "fsdp_ipc" and self.warm and self.packed
            else "/update_weights",
            "finish": "/finish_weight_update",
        }
        second = self.step == "update" and self.wire == "ipc" and self.packed
        return {"kind": self.kind, "routes": [route[self.step]], "after": int(second)}

    def __str__(self) -> str:
        more = f"{'' if self.packed else ', unpacked'}{', second send' if self.warm else ''}"
        return f"{self.wire}: {self.kind} at {self.step} on rank {self.rank}{more}"


@dataclass
class Fault:
    """An action that is done once, when this rank comes to the step."""

    act: Callable[[], None]
    done: bool = False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self.act()


def _before(owner: Any, name: str, fault: Callable[[], None], when: Callable[..., bool] | None = None) -> Any:
    """Wrap a function so that the fault comes before the call for which `when` holds."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(*args, **kwargs):
            fault()
        return function(*args, **kwargs)

    return owner, name, wrapped


def _after(owner: Any, name: str, fault: Callable[[], None], when: Callable[..., bool]) -> Any:
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if when(*args, **kwargs):
            fault()
        return result

    return owner, name, wrapped


def _at_step(step: str) -> Callable[..., bool]:
    return lambda *args, **kwargs: step in args


def _vote(step: str) -> Callable[[Any, Fault], Any]:
    return lambda sender, fault: _before(TrainerGroup, "vote", fault, _at_step(step))


def _objects(step: str) -> Callable[[Any, Fault], Any]:
    return lambda sender, fault: _before(TrainerGroup, "gather_objects", fault, _at_step(step))


def _second_allocation(sender: Any, fault: Fault) -> Any:
    made: list[int] = []
    return _before(
        shm, "create", fault, lambda nbytes, suffix="": suffix == "" and (made.append(1) or len(made) == 2)
    )


def _export(sender: Any, fault: Fault) -> Any:
    from fsdp_ipc import stage
    from fsdp_ipc.wire import stock_delivery

    if sender._delivery.backend == "ipc":
        return _before(stock_delivery, "stock_rebuild_args", fault)
    return _before(stage, "Gatherer", fault)


def _update(sender: Any, fault: Fault) -> Any:
    if sender._delivery.backend == "ipc":
        return _before(TrainerGroup, "vote", fault, _at_step("update"))
    return _before(ControlBlock, "produce", fault, lambda self, sync, count: count == 2)


def _finish(sender: Any, fault: Fault) -> Any:
    delivery = sender._delivery
    if delivery.backend == "ipc":
        if sender.is_sender:
            return _before(delivery._client, "finish_weight_update", fault)
        return _before(TrainerGroup, "vote", fault, _at_step("finish"))
    if sender.is_sender:
        return _before(delivery._client, "finish_weight_update_soon", fault)
    return _before(delivery._buckets, "wait_closed", fault)


def _plan(sender: Any, fault: Fault) -> Any:
    from fsdp_ipc import stage

    return _before(stage, "build_plan", fault)


POINTS: dict[str, Callable[[Any, Fault], Any]] = {
    "connect": _objects("connect"),
    "metadata": lambda sender, fault: _before(sender._stage._source, "items", fault),
    "plan digest": _plan,
    "allocation": _second_allocation,
    "export": _export,
    "handle exchange": _objects("handles"),
    "start": _vote("start"),
    "gather": lambda sender, fault: _before(
        Gatherer, "load", fault, lambda self, bucket, tensors: bucket == 1
    ),
    "gathered": lambda sender, fault: _after(Gatherer, "gather", fault, lambda self, bucket: bucket == 1),
    "update": _update,
    "finish": _finish,
    "barrier": _vote("finish"),
    "release": lambda sender, fault: _before(SharedBuffer, "close", fault, lambda self: not self.closed),
}


def _action(cell: Cell, server_pid: int, url: str) -> Callable[[], None]:
    def exception() -> None:
        raise OSError(f"{INJECTED} at {cell.step}")

    def out_of_memory() -> None:
        if cell.step == "allocation":
            raise MemoryError(f"{INJECTED} at {cell.step}")
        raise torch.OutOfMemoryError(f"{INJECTED} at {cell.step}")

    def server_fault() -> None:
        requests.post(f"{url}/fault", json={"kind": cell.kind}, timeout=10)

    return {
        "exception": exception,
        "out of memory": out_of_memory,
        "nothing": lambda: None,
        "SIGKILL of the rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "SIGKILL of the server": lambda: os.kill(server_pid, signal.SIGKILL),
    }.get(cell.kind, server_fault)


@contextlib.contextmanager
def _armed(patch: Any) -> Iterator[None]:
    owner, name, wrapped = patch
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def begin(state: dict[str, Any], cell: Cell, url: str, server_pid: int) -> dict[str, Any]:
    """All ranks: the send that something breaks. Says how it ended."""
    _prepare(state, cell)
    state["before"] = _open()
    hasty = cell.kind == "hang"
    sender = state["sender"] = _sender(state, cell, url, HASTY if hasty else CALM)
    if cell.warm:
        sender.send("warm")
    _change(state["model"])
    began = time.monotonic()
    outcome: dict[str, Any] = {"error": None, "failures": {}}
    patch: Any = contextlib.nullcontext()
    fault = Fault(lambda: None)
    if state["rank"] == cell.rank and not cell.by_server:
        fault = Fault(_action(cell, server_pid, url))
        patch = _armed(POINTS[cell.step](sender, fault))
    if cell.by_server and sender.is_sender:
        requests.post(f"{url}/fault", json=cell.arming(), timeout=10)
    try:
        with patch:
            sender.send("bad")
    except WeightSyncError as error:
        outcome |= {"error": str(error), "failures": error.failures, "step": error.step}
    except BaseException as error:
        outcome |= {"error": f"NOT A WeightSyncError: {type(error).__name__}: {error}"}
    outcome |= {
        "seconds": time.monotonic() - began,
        "reached": fault.done,
        "left": _data_files() if outcome["error"] else [],
    }
    return outcome


def mend(state: dict[str, Any], cell: Cell, url: str) -> dict[str, Any]:
    """All ranks: a send that must be good, over other weights, then close. Says what the workers must hold."""
    if "model" not in state:
        _prepare(state, cell)
        state["before"] = _open()
    _change(state["model"])
    sender = state.pop("sender", None)
    if sender is not None and cell.kind == "hang":
        sender.close()  # its time-outs are too short for a busy machine
        sender = None
    if sender is None:
        sender = _sender(state, cell, url, CALM)
    outcome: dict[str, Any] = {"error": None}
    if cell.kind == "SIGKILL of the server" and cell.step in LATE:
        # The sender can't know that another server answers at this address now: the first send says so.
        try:
            sender.send("to a new server")
        except WeightSyncError as error:
            outcome["first"] = str(error)
    try:
        sender.send("good")
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    sender.close()
    outcome["expected"] = digests(full(state["model"], torch.bfloat16)) if outcome["error"] is None else {}
    del sender
    outcome |= {"leaks": _leaks(state["before"]), "files": _files()}
    return outcome


def give_up(state: dict[str, Any]) -> dict[str, Any]:
    """A survivor, after another rank has died: the next send fails at once and says why; close gives all back."""
    sender = state.pop("sender")
    began = time.monotonic()
    try:
        sender.send("again")
        error = None
    except WeightSyncError as caught:
        error = str(caught)
    seconds = time.monotonic() - began
    sender.close()
    return {"error": error, "seconds": seconds, "files": _files()}


def _prepare(state: dict[str, Any], cell: Cell) -> None:
    if "model" not in state:
        logging.getLogger("fsdp_ipc").setLevel(logging.CRITICAL)
        state["model"] = shard(build(), init_device_mesh("cpu", (state["world"],)))
        if cell.wire == "ipc":
            stock_on_cpu("0.32.0")


def _sender(state: dict[str, Any], cell: Cell, url: str, timeouts: Timeouts) -> WeightSender:
    settings: dict[str, Any] = {"packed": cell.packed, "bucket_bytes": BUCKET if cell.packed else None}
    return WeightSender(
        DTensorSource(state["model"], dtype=torch.bfloat16),
        HTTPWeightSyncClient(url) if state["rank"] == 0 else None,
        backend=cell.wire,
        timeouts=timeouts,
        **settings,
    )


@torch.no_grad()
def _change(model: torch.nn.Module) -> None:
    """Other weights than before, the same on any number of ranks."""
    for parameter in model.parameters():
        parameter.mul_(-0.75).add_(0.125)


def _files() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"fsdp_ipc-{os.getpid()}-*"))


def _data_files() -> list[str]:
    return [name for name in _files() if "." not in name]


def _open() -> tuple[int, int]:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def _leaks(before: tuple[int, int]) -> str | None:
    """What there is more of than before, at the latest after a while: threads do not end at once."""
    deadline = time.monotonic() + 10
    while any(now > then for now, then in zip(_open(), before, strict=True)):
        if time.monotonic() > deadline:
            return f"descriptors and threads before {before}, after {_open()}"
        time.sleep(0.02)
    return None
