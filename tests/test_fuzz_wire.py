"""Whatever comes over the native wire: the worker refuses it with an error, and never reads outside of what it was given.

Each input is a well-formed handshake or update with a few things changed at random, taken through the worker's own way
from JSON to memory: parse, claim, open, bounds, views. A crash would end this process. Thousands of inputs by default, a
million with `make fuzz`.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.dtypes import dtype_name, view
from fsdp_ipc.handles import IpcHandle, SharedBuffer, allocate, device_key, open_handle
from fsdp_ipc.vllm_plugin.endpoint import claim_endpoint, readable
from fsdp_ipc.vllm_plugin.payload import InitInfo, UpdateInfo, parse_update
from fsdp_ipc.vllm_plugin.payload_plan import check_bounds

CPU = torch.device("cpu")
BYTES = 4096
REFUSED = (ValueError, OSError)
"""What a worker may raise at a payload: vLLM makes a 500 answer of it, and the session stays as it was."""

JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 255, 4095, 4096, 4097, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 50, 1 << 53, 1 << 63,
    1 << 64, 10**40, 0.5, -0.0, 1e308, math.inf, math.nan, "", " ", "0", "a" * 2000, "../../etc/passwd", "/dev/shm/x",
    "\0", "\ud800", "fsdp_ipc-1-" + "0" * 32, "fsdp_ipc-1-" + "0" * 32 + ".ctl", "float32", "int64", "cuda", "shm", [], {},
    [[]], {"": None}, [1] * 40, {"kind": "shm"}, {"file": "x"},
)  # fmt: skip


class Target:
    """Memory of a trainer, the valid payloads that name it, and a worker's way through a payload."""

    def __init__(self) -> None:
        self.key = device_key(CPU, 0)
        self.control = ControlBlock.create()
        self.buffers: list[SharedBuffer] = [allocate(BYTES, CPU, key=self.key) for _ in range(2)]
        self.peer = device_key(CPU, 1)
        self.buffers.append(allocate(BYTES, CPU, key=self.peer))
        *handles, theirs = [buffer.handle.to_json() for buffer in self.buffers]
        part = {**handles[1], "offset": 1024, "nbytes": 2048}
        session = "0123456789abcdef" * 2
        rows = [
            ["a.weight", "bfloat16", [40, 16], 0, 0, 0],
            ["a.bias", "float32", [16], 0, 0, 2048],
            ["b.weight", "float32", [16, 16], 1, 1, 0],
            ["empty", "int64", [0, 5], 1, 1, 0],
            ["scalar", "float64", [], 1, 2, 2040],
            ["spread", "float32", [16, 4], 1, 0, 64, "", 0, 128, 32],
            ["spread.cast", "bfloat16", [16, 4], 1, 0, 0, "float32", 0, 128, -0],
        ]
        local = {self.key: [["mine", "uint8", [7], 1, 2, 9]]}
        holders = [{self.key: [self.key, self.peer, self.peer]}]
        plan = {"tensors": rows, "num_buckets": 2, "packed": True, "local": local, "holders": holders}
        self.valid: dict[str, Any] = {
            "init": {
                "protocol": 3,
                "session": session,
                "token": "secret",
                "endpoints": [
                    {"device": self.key, "control": self.control.name},
                    {"device": self.peer, "control": self.control.name, "probe": theirs},
                ],
                "timeout_s": 1.5,
            },
            "update": {
                "session": session,
                "sync": 1,
                "plan": plan,
                "plan_digest": "d" * 64,
                "allocations": {self.key: [*handles, part], self.peer: [theirs]},
                "epoch": 1,
            },
        }

    def close(self) -> None:
        self.control.close()
        for buffer in self.buffers:
            buffer.close()

    def take(self, which: str, payload: Any) -> int:
        """What a worker does with a payload; how many views it made."""
        if which == "init":
            endpoints = InitInfo.from_json(payload).endpoints
            claim = claim_endpoint(endpoints, CPU, 0)
            try:
                readable(endpoints, CPU)
                ControlBlock.open(claim.endpoint.control).close()
            finally:
                claim.close()
            return 0
        info = parse_update(payload)
        if not isinstance(info, UpdateInfo) or info.plan is None or info.allocations is None:
            return 0
        buckets = info.plan.buckets_for(self.key)
        sizes = {key: [handle.nbytes for handle in handles] for key, handles in info.allocations.items()}
        opened = {}
        try:
            for device, number in sorted(check_bounds(buckets, sizes, self.key)):
                handle = info.allocations[device][number]
                opened[device, number] = open_handle(handle, CPU, peer=device != self.key)
                assert opened[device, number].bytes.numel() == handle.nbytes
            return sum(self._look(row, opened) for rows in buckets for row in rows)
        finally:
            for buffer in opened.values():
                buffer.close()

    def _look(self, row: Any, opened: dict[tuple[str, int], Any]) -> int:
        places = [(self.key, row.allocation, row.offset, row.nbytes)]
        if row.shards >= 0:
            places = [(part.device, part.allocation, part.offset, part.nbytes) for part in row.parts]
        assert sum(nbytes for *_, nbytes in places) == row.nbytes
        for device, allocation, offset, nbytes in places:
            memory = opened[device, allocation].bytes
            held = dtype_name(row.held)
            shape = row.shape if row.shards < 0 else (nbytes // row.held.itemsize,)
            seen = view(memory, offset, held, shape)
            assert seen.nbytes == nbytes
            assert seen.is_contiguous()
            if seen.numel():
                first, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
                assert first <= seen.data_ptr() and seen.data_ptr() + seen.nbytes <= end
                seen.view(-1).view(torch.uint8).sum()
        return 1


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.close()


def _paths(obj: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, list) else ()
    return [at, *(path for key, value in inner for path in _paths(value, (*at, key)))]


def _change(value: Any, drawn: random.Random) -> Any:
    """A value like this one, or none like it."""
    if isinstance(value, int) and not isinstance(value, bool) and drawn.random() < 0.6:
        near = (value + 1, value - 1, -value, value * 2, value ^ (1 << drawn.randrange(64)), value + 4096)
        return drawn.choice(near)
    if isinstance(value, str) and value and drawn.random() < 0.6:
        at = drawn.randrange(len(value))
        return (
            value[:at]
            + drawn.choice(["", "x", "/", "\0", ".", chr(drawn.randrange(0x500))])
            + value[at + 1 :]
        )
    if isinstance(value, list) and value and drawn.random() < 0.6:
        entry = drawn.choice(value)
        return drawn.choice([value[1:], [*value, entry], value[::-1], [entry] * drawn.randrange(9)])
    if isinstance(value, dict) and value and drawn.random() < 0.6:
        gone = drawn.choice(list(value))
        return drawn.choice(
            [{k: v for k, v in value.items() if k != gone}, {**value, "more": 1}, {**value, gone: None}]
        )
    return copy.deepcopy(drawn.choice(JUNK))


def _broken(valid: dict[str, Any], drawn: random.Random) -> Any:
    payload = copy.deepcopy(valid)
    for _ in range(drawn.choice([1, 1, 1, 2, 3])):
        paths = _paths(payload)
        path = drawn.choice(paths)
        if not path:
            return _change(payload, drawn)
        place = payload
        for key in path[:-1]:
            place = place[key]
        donor: Any = payload
        for key in drawn.choice(paths):
            donor = donor[key]
        place[path[-1]] = copy.deepcopy(donor) if drawn.random() < 0.1 else _change(place[path[-1]], drawn)
    return payload


def test_what_is_well_formed_is_taken(target: Target) -> None:
    assert target.take("init", target.valid["init"]) == 0
    assert target.take("update", json.loads(json.dumps(target.valid["update"]))) == 8


@given(seed=st.integers(0, 1 << 62))
def test_no_payload_crashes_a_worker_or_reaches_outside(target: Target, seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(200 if settings().max_examples > 1000 else 30):
        which = drawn.choice(["init", "update", "update", "update"])
        payload = _broken(target.valid[which], drawn)
        try:
            target.take(which, payload)
        except REFUSED as error:
            assert len(str(error)) < 4000, (str(error)[:200], payload)  # noqa: PT017
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} at {which} {payload!r}") from error


@given(seed=st.integers(0, 1 << 62))
def test_no_handle_is_more_than_its_fields_say(target: Target, seed: int) -> None:
    """Handles alone, of both planes: parsed, and then what they say lies inside the whole; or refused."""
    drawn = random.Random(seed)
    whole = target.buffers[0].handle.to_json()
    cuda = {
        **{key: whole[key] for key in ("device", "nbytes", "offset")},
        "kind": "cuda",
        "memory_handle": "/2M" + "A" * 85,
        "storage_bytes": BYTES,
        "storage_offset": 0,
        "ref_counter": "L3RvcmNoXzFfMg==",
        "ref_counter_offset": 5,
        "event": "A" * 86 + "==",
        "event_sync": False,
    }
    for _ in range(20):
        valid = drawn.choice([whole, cuda])
        try:
            handle = IpcHandle.from_json(_broken(valid, drawn))
        except ValueError:
            continue
        size = getattr(handle.memory, "file_bytes", None) or handle.memory.storage_bytes
        assert 0 <= handle.offset < handle.offset + handle.nbytes <= size
        assert IpcHandle.from_json(handle.to_json()) == handle
