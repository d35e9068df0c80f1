"""What no push can beat on this machine: copies and bare all-gathers of the same bytes, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ipc.group import all_gather

_BLOCK = 4 << 30
_BUCKET = 1 << 30


@torch.no_grad()
def copy_floor(nbytes: int, device: torch.device, repeat: int = 10) -> dict[str, float]:
    """Copy one large tensor on the device.

    Args:
        nbytes: Bytes of a sync; scaled up from a block that fits anywhere.
        device: Where.
        repeat: Copies; the median counts.

    Returns:
        Seconds that one copy of `nbytes` takes at that speed, and the bandwidth in bytes a second, reads and writes
        counted.
    """
    block = min(nbytes, _BLOCK if device.type == "cuda" else 256 << 20)
    if device.type == "cuda":
        block = min(block, max(64 << 20, (torch.cuda.mem_get_info(device)[0] - (2 << 30)) // 2))
    source = torch.empty(block, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    seconds = median(_times(lambda: target.copy_(source), device, repeat))
    return {"seconds": seconds * nbytes / block, "bytes_per_s": 2 * block / seconds}


@torch.no_grad()
def foreach_floor(
    model: nn.Module, dtype: torch.dtype, device: torch.device, repeat: int = 5
) -> dict[str, float] | None:
    """Copy this rank's own shards into fresh memory of the wire dtype, all in one `_foreach_copy_`.

    Returns:
        Seconds, or None if there is no memory for it.
    """
    sources = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    need = sum(s.numel() * dtype.itemsize for s in sources)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < need + (2 << 30):
        return None
    targets = [torch.empty(s.shape, dtype=dtype, device=device) for s in sources]
    seconds = median(_times(lambda: torch._foreach_copy_(targets, sources), device, repeat))
    targets.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"seconds": seconds, "bytes_written": need}


@torch.no_grad()
def gather_floor(nbytes: int, device: torch.device, group: Any, repeat: int = 5) -> dict[str, float] | None:
    """All ranks, collective: gather `nbytes` in buckets with nothing around the all-gathers.

    Returns:
        Seconds and bytes a second received by a rank, or None for one rank.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    bucket = min(_BUCKET if device.type == "cuda" else 32 << 20, nbytes)
    piece = torch.empty(bucket // ranks, dtype=torch.uint8, device=device).fill_(1)
    out = torch.empty(piece.numel() * ranks, dtype=torch.uint8, device=device)
    count = -(-nbytes // bucket)

    def gather() -> None:
        for _ in range(count):
            all_gather(out, piece, group)

    times = _times(gather, device, repeat, before=lambda: dist.barrier(group))
    seconds = median(times) * nbytes / (count * bucket)
    return {"seconds": seconds, "bytes_per_s": nbytes * (ranks - 1) / ranks / seconds}


def floors_text(floors: Mapping[str, dict[str, float] | None]) -> str:
    """The floors that were measured, for people."""
    return ", ".join(f"{name} {f['seconds'] * 1e3:.1f} ms" for name, f in floors.items() if f is not None)


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times(
    work: Callable[[], object], device: torch.device, repeat: int, before: Callable[[], object] | None = None
) -> list[float]:
    work()
    times = []
    for _ in range(repeat):
        if before is not None:
            before()
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times
