"""Field cases that need a GPU and a second process: handles that differ, and a consumer that fails to import."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_ipc.handles import IpcHandle, OpenedBuffer, allocate, device_key, export, open_handle
from tests.peer import Peer

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _key() -> str:
    return device_key(_gpu(), _gpu().index)


def _settle() -> None:
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def peer_read(state: dict[str, Any], handles: list[dict[str, Any]]) -> tuple[list[list[int]], int]:
    """Open all handles at the same time; the first bytes behind each, and the memory that this process has reserved."""
    device = torch.device("cuda", 0)
    opened: list[OpenedBuffer] = [open_handle(IpcHandle.from_json(handle), device) for handle in handles]
    seen = [buffer.bytes[:4].tolist() for buffer in opened]
    for buffer in opened:
        buffer.close()
    return seen, torch.cuda.memory_reserved(device)


def peer_fail_to_open(state: dict[str, Any], handle: dict[str, Any]) -> str:
    """Import with a handle that the driver refuses."""
    raw = dict(handle)
    data = bytearray(base64.b64decode(raw["memory_handle"]))
    data[-56:] = b"\xee" * 56
    raw["memory_handle"] = base64.b64encode(data).decode()
    try:
        open_handle(IpcHandle.from_json(raw), torch.device("cuda", 0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_field_A11_two_exports_of_the_same_memory_need_not_look_alike(peer: Peer) -> None:
    """https://github.com/pytorch/pytorch/pull/179618, https://github.com/pytorch/pytorch/issues/198305: handles differed."""
    tensor = torch.full((2 * MIB,), 7, dtype=torch.uint8, device=_gpu())
    tensor[1:4] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    torch.cuda.synchronize()
    handles = [export(tensor, key=_key()).to_json() for _ in range(2)]
    seen, _ = peer.call(peer_read, handles)
    assert seen == [[7, 1, 2, 3]] * 2
    reserved = {peer.call(peer_read, [export(tensor, key=_key()).to_json()])[1] for _ in range(4)}
    assert len(reserved) == 1  # nothing of the reader's memory is taken by each new handle


def test_field_B18_memory_comes_back_though_the_consumer_failed_to_import(peer: Peer) -> None:
    """https://github.com/pytorch/pytorch/pull/193994: a failed import held the shared reference count."""
    _settle()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        buffer = allocate(64 * MIB, _gpu(), key=_key())
        assert peer.call(peer_fail_to_open, buffer.handle.to_json())
        buffer.close()
        _settle()
        assert torch.cuda.memory_allocated() == before
