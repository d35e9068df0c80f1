"""Memory that a trainer rank fills and the worker beside it reads, named by a handle that is plain JSON.

Two data planes behind one type: CUDA IPC on GPUs and files in `/dev/shm` on CPU. Everything above works on bytes and
cannot tell them apart. The producer owns the memory; a handle is only a name for it.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Any
from weakref import WeakSet

import torch

from fsdp_ipc import cuda_ipc, shm
from fsdp_ipc.cuda_ipc import CudaMemory
from fsdp_ipc.ipc_handle import IpcHandle, ShmMemory
from fsdp_ipc.shm import sweep_stale

__all__ = [
    "IpcHandle",
    "OpenedBuffer",
    "SharedBuffer",
    "ShmMemory",
    "allocate",
    "device_key",
    "export",
    "is_exportable",
    "normalize_device_key",
    "open_handle",
    "stock_rebuild_args",
    "sweep_stale",
]


class _Buffer:
    """Bytes under a handle, until they are closed."""

    _kind: str

    def __init__(self, memory: torch.Tensor, handle: IpcHandle) -> None:
        self.handle = handle
        self._bytes: torch.Tensor | None = memory

    @property
    def bytes(self) -> torch.Tensor:
        """The memory as uint8 `[nbytes]`.

        Raises:
            ValueError: The buffer is closed.
        """
        if self._bytes is None:
            raise ValueError(f"the {self._kind} buffer is closed")
        return self._bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._bytes is None

    def _release(self) -> None:
        self._bytes = None
        if self.handle.kind == "cuda":
            cuda_ipc.collect()


class SharedBuffer(_Buffer):
    """Memory of this process that another one may open. The producer owns it; `close` frees it.

    What a worker may still be reading must not be closed: the memory goes back to the allocator at once, whatever
    the worker has open.

    Attributes:
        handle: Its name for the other process.
    """

    _kind = "shared"

    def __init__(self, memory: torch.Tensor, handle: IpcHandle, file: shm.SharedFile | None = None) -> None:
        super().__init__(memory, handle)
        self._file = file

    def close(self) -> None:
        """Free the memory and unlink its file; a second call does nothing."""
        if self.closed:
            return
        self._release()
        if self._file is not None:
            self._file.close()


class OpenedBuffer(_Buffer):
    """Another process's memory, mapped here. Tensors made from `bytes` keep the mapping alive until they are gone.

    Attributes:
        handle: The name under which it was opened.
    """

    _kind = "opened"

    def close(self) -> None:
        """Unmap; a second call does nothing. On CUDA this waits for the device's current stream."""
        if not self.closed:
            self._release()


_shared_on_cpu: WeakSet[SharedBuffer] = WeakSet()
"""What this process has allocated on the CPU, so that a tensor that lies there can be exported as it is."""


def allocate(nbytes: int, device: torch.device, *, key: str) -> SharedBuffer:
    """Allocate memory that can be exported, and export it. Not collective.

    Args:
        nbytes: Size in bytes, at least 1.
        device: A CUDA device (caching-allocator memory outside expandable segments) or the CPU (a private file in
            `/dev/shm`, zero-filled).
        key: Device key to write into the handle, as `device_key` gives it.

    Raises:
        ValueError: `nbytes` is not positive, or the device is neither CUDA nor CPU.
        MemoryError: The device has too little memory left; the text says how much is wanted and free.
        RuntimeError: CUDA refuses to export.
    """
    if nbytes < 1:
        raise ValueError(f"expected at least 1 byte, got {nbytes}")
    if device.type == "cuda":
        try:
            memory, cuda_memory, offset = cuda_ipc.allocate(nbytes, device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise MemoryError(f"{device} has {free} of {total} bytes free, {nbytes} are wanted") from error
        return SharedBuffer(memory, IpcHandle(device=key, nbytes=nbytes, offset=offset, memory=cuda_memory))
    if device.type != "cpu":
        raise ValueError(f"expected a CUDA device or the CPU, got {device}")
    file = shm.create(nbytes)
    try:
        memory = _map(file.fd, nbytes)
    except BaseException:
        file.close()
        raise
    handle = IpcHandle(
        device=key, nbytes=nbytes, offset=0, memory=ShmMemory(file=file.name, file_bytes=nbytes)
    )
    buffer = SharedBuffer(memory, handle, file)
    _shared_on_cpu.add(buffer)
    return buffer


def is_exportable(tensor: torch.Tensor) -> bool:
    """Whether `export` can name a plain, contiguous tensor's memory: that of torch's CUDA allocator, or of `allocate`."""
    return cuda_ipc.can_share(tensor) if tensor.device.type == "cuda" else _shared_at(tensor) is not None


def _shared_at(tensor: torch.Tensor) -> tuple[SharedBuffer, int] | None:
    """The buffer of this process in which CPU memory lies, and the offset there in bytes."""
    first = tensor.data_ptr()
    for buffer in _shared_on_cpu:
        if not buffer.closed:
            at = first - buffer.bytes.data_ptr()
            if 0 <= at <= buffer.bytes.numel() - tensor.nbytes:
                return buffer, at
    return None


def export(tensor: torch.Tensor, *, key: str) -> IpcHandle:
    """Name an existing tensor's memory for another process; zero-copy, the sender's rank only.

    The owner keeps the tensor alive until the consumer is done. Writes to it reach the consumer, so the producer
    synchronises its stream before it says that the bytes are there.

    Args:
        tensor: A plain, contiguous tensor or parameter: on CUDA, or on the CPU in memory that `allocate` gave.
        key: Device key to write into the handle.

    Raises:
        TypeError: It is a DTensor or another subclass, or neither on CUDA nor in shared memory of this process.
        ValueError: It is not contiguous, is empty, or lies in expandable segments.
        RuntimeError: CUDA refuses.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous() and (found := _shared_at(tensor)) is not None:
        buffer, at = found
        return IpcHandle(device=key, nbytes=tensor.nbytes, offset=at, memory=buffer.handle.memory)
    memory, offset = cuda_ipc.share(tensor)
    return IpcHandle(device=key, nbytes=tensor.numel() * tensor.element_size(), offset=offset, memory=memory)


def stock_rebuild_args(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the 15 values that vLLM's stock `ipc` backend passes to `rebuild_cuda_tensor`.

    Each call is a new export, for one open and one close by the consumer. Torch's event is part of it and marks the
    moment of this call: synchronise the stream before every request that makes the worker read.

    Raises:
        TypeError, ValueError, RuntimeError: As `export`.
    """
    return cuda_ipc.rebuild_args(tensor)


def open_handle(handle: IpcHandle, device: torch.device, *, peer: bool = False) -> OpenedBuffer:
    """Map the memory that a handle names (the worker's side).

    Args:
        handle: A checked handle, from `IpcHandle.from_json`.
        device: This process's own device; the exporter's device index means nothing here.
        peer: The memory may be another GPU's of this host, which this process need not see otherwise; the mapping is then
            read over NVLink or PCIe (`cudaIpcOpenMemHandle` opens handles of devices that are not visible, too).

    Raises:
        ValueError: The handle is for another device or data plane, or its file is not what it says.
        PermissionError: Its file belongs to another user or is open to others.
        FileNotFoundError: Its file is gone or not in this namespace.
        RuntimeError: CUDA refuses; the text says what to do.
    """
    memory = handle.memory
    if isinstance(memory, CudaMemory):
        if device.type != "cuda":
            raise ValueError(
                f"the handle is for CUDA memory of {handle.device}, this worker runs on {device}"
            )
        own = device_key(device, 0)
        if not peer and normalize_device_key(handle.device) != normalize_device_key(own):
            raise ValueError(f"the handle is for GPU {handle.device}, this worker runs on GPU {own}")
        storage = cuda_ipc.open_storage(memory, device)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return OpenedBuffer(whole[handle.offset : handle.offset + handle.nbytes], handle)
    if device.type != "cpu":
        raise ValueError(
            f"the handle is for CPU shared memory ({handle.device}), this worker runs on {device}"
        )
    fd = shm.open_checked(memory.file, shm.DATA_NAME, memory.file_bytes)
    try:
        whole = _map(fd, memory.file_bytes)
    finally:
        os.close(fd)
    return OpenedBuffer(whole[handle.offset : handle.offset + handle.nbytes], handle)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # Through the descriptor, so that the file that was checked is the file that is mapped.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)


def device_key(device: torch.device, index: int) -> str:
    """Return the name under which trainer and worker find each other on a device.

    Args:
        device: The device.
        index: On CPU, the rank in the trainer group (or what stands for it); CUDA needs none.

    Returns:
        The bare UUID of the GPU from its device properties, or `cpu:<host>:<index>`.

    Raises:
        ValueError: The device is neither CUDA nor CPU.
    """
    if device.type == "cuda":
        local = cuda_ipc.local_index(device)
        return str(torch.cuda.get_device_properties(local).uuid)
    if device.type == "cpu":
        return f"cpu:{socket.gethostname()}:{index}"
    raise ValueError(f"expected a CUDA device or the CPU, got {device}")


def normalize_device_key(key: str) -> str:
    """Return a form of a device key that compares equal for every spelling of one GPU.

    Tools spell a GPU `GPU-<uuid>`, `MIG-<uuid>` or bare, in either case; CPU keys stay as they are.
    """
    key = key.strip()
    if key.startswith("cpu:"):
        return key
    return re.sub(r"^((gpu|mig)-)+", "", key.lower())
