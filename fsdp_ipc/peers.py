"""Whether a worker can read the memory of trainer ranks on other devices: tried once a handshake, before it is relied on.

Every rank exports a few bytes that follow from the name of its control block; a worker that finds them there can read
that rank's shards where they lie (CUDA IPC over NVLink or PCIe, or shared memory of one host).
"""

from __future__ import annotations

import hashlib

import torch

from fsdp_ipc.handles import IpcHandle, open_handle

PROBE_BYTES = 32


def probe_bytes(name: str) -> torch.Tensor:
    """What the rank with this control block exports: uint8 `[32]` on the CPU."""
    return torch.tensor(list(hashlib.sha256(name.encode()).digest()), dtype=torch.uint8)


def unreadable(probe: IpcHandle, name: str, device: torch.device) -> str | None:
    """Why this process can't read a rank's memory from its device; None if it can.

    Args:
        probe: What the rank exported.
        name: Name of the rank's control block.
        device: This process's own device.
    """
    if probe.nbytes != PROBE_BYTES:
        return f"it exported {probe.nbytes} bytes to try with, expected {PROBE_BYTES}"
    try:
        buffer = open_handle(probe, device, peer=True)
    except Exception as error:  # noqa: BLE001  whatever it is, the shards are gathered then
        return f"{type(error).__name__}: {error}"
    try:
        seen = (
            buffer.bytes.clone().cpu()
        )  # over the way that a sync takes, not from that GPU straight to the host
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.close()
    if not torch.equal(seen, probe_bytes(name)):
        return "its memory reads as something else"
    return None
