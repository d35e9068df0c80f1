"""Staging slots: allocated and exported once, refused with a clear text, freed together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fsdp_ipc import shm, staging
from fsdp_ipc.dtypes import view
from fsdp_ipc.handles import IpcHandle, SharedBuffer, allocate, open_handle
from fsdp_ipc.staging import StagingBuffer

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("clean_shm")


def make(num_slots=2, slot_bytes=4096):
    return StagingBuffer(num_slots=num_slots, slot_bytes=slot_bytes, device=CPU, key="cpu:host:0")


def files():
    return sorted(Path("/dev/shm").glob(f"fsdp_ipc-{os.getpid()}-*"))


def test_each_slot_is_its_own_memory_under_its_own_handle():
    buffer = make(num_slots=3)
    assert len(buffer.handles) == len(set(map(str, buffer.handles))) == 3
    for index in range(3):
        buffer.slot(index).fill_(index + 1)
    for index, handle in enumerate(buffer.handles):
        opened = open_handle(IpcHandle.from_json(json.loads(json.dumps(handle.to_json()))), CPU)
        assert opened.bytes.tolist() == [index + 1] * 4096
        opened.close()
    buffer.close()


def test_field_A5_memory_and_handles_stay_the_same_over_syncs():
    """https://github.com/verl-project/verl/pull/6958: a fresh export a sync leaked 2 GiB each time."""
    buffer = make()
    seen = {(buffer.slot(0).data_ptr(), buffer.slot(1).data_ptr(), str(buffer.handles)) for _ in range(5)}
    assert len(seen) == 1
    assert len(files()) == buffer.num_slots
    buffer.close()


def test_every_allocation_has_an_epoch_of_its_own():
    first, second = make(), make()
    assert second.epoch > first.epoch > 0
    first.close()
    assert make().epoch > second.epoch
    second.close()


def test_a_worker_of_another_epoch_keeps_its_bytes():
    old = make(num_slots=1)
    opened = open_handle(old.handles[0], CPU)
    old.slot(0).fill_(1)
    old.close()
    new = make(num_slots=1)
    new.slot(0).fill_(255)
    assert opened.bytes.tolist() == [1] * 4096
    new.close()


def test_close_frees_all_slots_once():
    buffer = make()
    assert len(files()) == 2
    buffer.close()
    buffer.close()
    assert files() == []
    assert buffer.closed
    with pytest.raises(ValueError, match="closed"):
        buffer.slot(0)


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_other_slot(index):
    buffer = make()
    with pytest.raises(IndexError, match="from 0 to 1"):
        buffer.slot(index)
    buffer.close()


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_nothing_cannot_be_staged(num_slots, slot_bytes):
    with pytest.raises(ValueError, match="at least 1"):
        make(num_slots, slot_bytes)


def test_all_slots_are_checked_before_the_first_takes_its_share(monkeypatch):
    asked = []
    monkeypatch.setattr(staging, "allocate", lambda *args, **kwargs: asked.append(args))
    monkeypatch.setattr(shm, "free_bytes", lambda: 10_000)
    with pytest.raises(MemoryError) as caught:
        make(num_slots=3, slot_bytes=4096)
    text = str(caught.value)
    assert "3 slots of 4096 bytes (12288 in all)" in text
    assert "10000 bytes free" in text
    assert "Lower bucket_bytes (now 4096) or num_slots" in text
    assert asked == []


def test_a_failure_of_a_later_slot_frees_the_earlier_ones(monkeypatch):
    made: list[SharedBuffer] = []

    def second_fails(nbytes, device, *, key):
        if made:
            raise MemoryError(f"{nbytes} are wanted")
        made.append(allocate(nbytes, device, key=key))
        return made[0]

    monkeypatch.setattr(staging, "allocate", second_fails)
    with pytest.raises(MemoryError, match="bucket_bytes"):
        make()
    assert made[0].closed
    assert files() == []


def test_a_parameter_copied_in_brings_no_graph_along():
    """A float staging buffer would begin to require grad; bytes cannot."""
    buffer = make(num_slots=1)
    parameter = torch.nn.Parameter(torch.randn(8, 16))
    view(buffer.slot(0), 0, "float32", [8, 16]).copy_(parameter.detach())
    assert not buffer.slot(0).requires_grad
    assert torch.equal(view(buffer.slot(0), 0, "float32", [8, 16]), parameter)
    buffer.close()
