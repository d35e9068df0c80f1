"""Which trainer rank this worker reads from: the one on its GPU, or on CPU one of those on its host.

A control block is for one worker: two of them would count each other's progress, and memory would be overwritten that
one of them still reads. So a worker claims its block with a lock that ends with the session or with the process.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Sequence

import torch

from fsdp_ipc import shm
from fsdp_ipc.handles import device_key, normalize_device_key
from fsdp_ipc.peers import unreadable
from fsdp_ipc.vllm_plugin.payload import Endpoint

# struct flock: type, whence, start, length, pid. A lock of the open file, not of the process, so that two engines in
# one process exclude each other as well, and the maker's own lock (`flock`) is no concern of it.
_WRITE_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


class Claim:
    """A trainer rank that this worker has to itself until `close`."""

    def __init__(self, endpoint: Endpoint, fd: int) -> None:
        self.endpoint = endpoint
        self._fd: int | None = fd

    def close(self) -> None:
        """Let another worker have it. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def claim_endpoint(endpoints: Sequence[Endpoint], device: torch.device, worker_index: int) -> Claim:
    """Claim the trainer rank that this worker shall read from.

    On CPU every rank of this host will do, so the worker takes the one of its own index if it can: workers of several
    servers have equal indices.

    Args:
        endpoints: All trainer ranks, in group order.
        device: This worker's device.
        worker_index: Index over the data-parallel replicas of this server.

    Raises:
        ValueError: No trainer rank is on this device or host, or another worker has it.
    """
    candidates = _candidates(endpoints, device)
    start = worker_index % len(candidates)
    for endpoint in (*candidates[start:], *candidates[:start]):
        fd = _lock(endpoint.control)
        if fd is not None:
            return Claim(endpoint, fd)
    raise ValueError(
        f"fsdp_ipc: every trainer rank that worker {worker_index} could read from has a worker already "
        f"({sorted(endpoint.device for endpoint in candidates)}). Start one trainer rank for each vLLM worker; two "
        "servers on one GPU cannot be fed by one trainer rank."
    )


def readable(endpoints: Sequence[Endpoint], device: torch.device) -> tuple[list[int], dict[int, str]]:
    """The trainer ranks whose memory this worker can read, by their place in the group; and why not, for the others.

    Only ranks that sent something to try with are tried.
    """
    reads, unread = [], {}
    for index, endpoint in enumerate(endpoints):
        if endpoint.probe is None:
            continue
        if not (shm.SHM_DIR / endpoint.control).exists():
            unread[index] = "it is on another host, or does not share /dev/shm with this worker"
        elif (why := unreadable(endpoint.probe, endpoint.control, device)) is not None:
            unread[index] = why
        else:
            reads.append(index)
    return reads, unread


def _candidates(endpoints: Sequence[Endpoint], device: torch.device) -> list[Endpoint]:
    sent = sorted(endpoint.device for endpoint in endpoints)
    if device.type == "cuda":
        own = device_key(device, 0)
        found = [e for e in endpoints if normalize_device_key(e.device) == normalize_device_key(own)]
        if not found:
            raise ValueError(
                f"fsdp_ipc: no trainer rank shares this worker's GPU {own}. Trainer ranks are on {sent}. "
                "Start trainer and vLLM on the same GPUs."
            )
        return found
    host = device_key(device, 0).rpartition(":")[0]
    found = [endpoint for endpoint in endpoints if endpoint.device.rpartition(":")[0] == host]
    if not found:
        raise ValueError(
            f"fsdp_ipc: no trainer rank on this worker's host ({host}). Trainer ranks are on {sent}."
        )
    return found


def _lock(control: str) -> int | None:
    """Lock a control block's file; None if another worker has it. What is in the file is checked when it is mapped."""
    if shm.CONTROL_NAME.fullmatch(control) is None:
        raise ValueError(
            f"{control!r} is not the name of a control block, which is {shm.CONTROL_NAME.pattern}"
        )
    fd = os.open(shm.SHM_DIR / control, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{control} is not a regular file of this user")
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd
