"""Process groups of the recipes' jobs, and work that one rank does for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


def own_device(kind: str = "auto") -> torch.device:
    """This rank's device: the GPU of its local rank, or the CPU.

    Args:
        kind: `"auto"`, `"cuda"` or `"cpu"`.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def joined(device: torch.device, timeout_s: float, backend: str | None = None) -> Iterator[None]:
    """Join the process group that torchrun describes, or a group of one where the job runs by itself.

    Args:
        device: From `own_device`.
        timeout_s: Time-out of its collectives, in seconds.
        backend: Back end, the same on all ranks; None chooses by the device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_rank0(function: Callable[[], _T]) -> _T:
    """All ranks, collective: call `function` on rank 0; its result on every rank.

    Raises:
        Exception: Its own error on rank 0, a `RuntimeError` with the same text on the others.
    """
    box: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[1] = function()
        except Exception as caught:  # noqa: BLE001 - raised again below, after the others know
            error, box[0] = caught, f"{type(caught).__name__}: {caught}"
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if error is not None:
        raise error
    if box[0] is not None:
        raise RuntimeError(f"on rank 0: {box[0]}")
    result: _T = box[1]
    return result


def on_each_node(function: Callable[[], _T]) -> list[_T]:
    """All ranks, collective: call `function` on the first rank of each node; their results, in order, on every rank.

    Raises:
        Exception: Its own error where it failed, a `RuntimeError` with the same text on the other ranks.
    """
    mine: tuple[str | None, Any] | None = None
    error: Exception | None = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            mine = None, function()
        except Exception as caught:  # noqa: BLE001 - raised again below, after the others know
            error, mine = caught, (f"{type(caught).__name__}: {caught}", None)
    told: list[tuple[str | None, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    if error is not None:
        raise error
    for rank, entry in enumerate(told):
        if entry is not None and entry[0] is not None:
            raise RuntimeError(f"on rank {rank}: {entry[0]}")
    return [entry[1] for entry in told if entry is not None]


def check_ranks(wanted: int | None) -> None:
    """Raise if torchrun has started another number of ranks on this node than the settings want.

    Raises:
        ValueError: With the option that would be right.
    """
    there = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted is not None and there != wanted:
        raise ValueError(
            f"launcher.ranks={wanted}, but there are {there} on this node: start it with torchrun --nproc-per-node {wanted}"
        )
