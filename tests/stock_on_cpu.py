"""The stock wire without CUDA: its export is replaced by the shared file in which the memory lies.

So a strict fake worker reads what lies there when it reads: a slot that is written too early, or memory that is freed too
early, shows as wrong bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from fsdp_ipc.handles import device_key
from fsdp_ipc.wire.stock import bare_uuid, dialect_for
from tests.fake_worker import fake_rebuild_args


def _file_behind(tensor: torch.Tensor) -> tuple[str, int]:
    """Path and offset of the shared file in which a tensor lies."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+\s+(/dev/shm/\S+)$", line):
            first, end, offset = (int(match[n], 16) for n in (1, 2, 3))
            if first <= address < end:
                return match[4], address - first + offset
    raise AssertionError(f"{tuple(tensor.shape)} does not lie in a shared file")


class Exports:
    serial = 0

    @classmethod
    def rebuild_args(cls, tensor: torch.Tensor) -> tuple[Any, ...]:
        cls.serial += 1
        nbytes = tensor.nbytes
        handle = json.dumps([*_file_behind(tensor), nbytes]).encode() if nbytes else b""
        return fake_rebuild_args(handle, nbytes, serial=cls.serial)


def read_export(args: tuple[Any, ...]) -> torch.Tensor:
    path, offset, nbytes = json.loads(args[7])
    return torch.from_file(path, shared=True, size=offset + nbytes, dtype=torch.uint8)[offset:]


def stock_on_cpu(release: str) -> None:
    import fsdp_ipc.sender
    from fsdp_ipc.wire import stock_delivery

    stock_delivery.stock_rebuild_args = Exports.rebuild_args
    fsdp_ipc.sender.WeightSender._choose = lambda self, *args: ("ipc", dialect_for(release))  # type: ignore[method-assign]


def stock_uuids(num_ranks: int) -> list[str]:
    """The keys under which CPU ranks send, as a fake worker's GPU."""
    return [bare_uuid(device_key(torch.device("cpu"), rank)) for rank in range(num_ranks)]
