"""The CUDA data plane: what a GPU allocation looks like to another process.

The only file that touches `torch.multiprocessing.reductions` and torch's private IPC entry points. Three facts of
torch shape it:

- A CUDA IPC handle names the whole `cudaMalloc` segment that the caching allocator carved the tensor from, so the
  storage's offset in the segment and the tensor's offset in the storage travel with it.
- Sharing a storage wraps it for good: its memory then returns to the allocator only after exactly one consumer has
  opened and closed it, and never if the consumer dies, opens it twice or not at all. We share a throw-away *alias*
  of the storage instead, so who frees the memory, and when, stays with its owner
  (https://github.com/pytorch/pytorch/issues/145703, https://github.com/vllm-project/vllm/issues/51258).
- Memory in expandable segments is shared through `pidfd_getfd`, which containers forbid, so it is not shared
  (https://github.com/pytorch/pytorch/issues/165685).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

logger = logging.getLogger(__name__)

#: Positional parameters of `rebuild_cuda_tensor`, in order; what `reduce_tensor` returns are their values.
REBUILD_PARAMETERS = (
    "tensor_cls",
    "tensor_size",
    "tensor_stride",
    "tensor_offset",
    "storage_cls",
    "dtype",
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
#: Index of the device in the rebuild arguments: local to a process, so the receiver puts its own there.
DEVICE_INDEX = REBUILD_PARAMETERS.index("storage_device")

MEMORY_HANDLE_BYTES = 66  # a version byte, a type byte ("c": cudaMalloc, "e": expandable segment), 64 of CUDA
EVENT_HANDLE_BYTES = 64
REF_COUNTERS_IN_FILE = 10_000  # CUDA_IPC_REF_COUNTER_FILE_SIZE of torch

_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE_ON = re.compile(r"(expandable_segments\s*:\s*)true\b", re.IGNORECASE)

#: Words of a CUDA error -> what to do about it.
HINTS = {
    "pidfd_getfd": (
        "the memory lies in expandable segments, which containers forbid to share; remove expandable_segments:True "
        "from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF of the trainer"
    ),
    "invalid device context": (
        "trainer and server must be different processes that see each other: share the PID and IPC namespaces "
        "(containers: --ipc=host --pid=host)"
    ),
    "invalid resource handle": (
        "the memory is gone (the trainer freed it or restarted), the trainer runs in another IPC namespace "
        "(containers: --ipc=host), or the platform has no CUDA IPC (WSL2 has none)"
    ),
    "invalid argument": (
        "the memory was not exported by a living process on this GPU: compare the GPUs that trainer and server see "
        "(CUDA_VISIBLE_DEVICES), share the PID and IPC namespaces, and turn expandable segments off in the trainer"
    ),
    "peer access": (
        "trainer and server use different GPUs; every trainer rank must share its GPU with its worker"
    ),
    "invalid device pointer": (
        "the memory does not come from torch's caching allocator, so it cannot be exported; use packed staging"
    ),
    "does not yet support shareipchandle": (
        "the cudaMallocAsync allocator cannot share memory; remove backend:cudaMallocAsync from PYTORCH_ALLOC_CONF"
    ),
}


@dataclass(frozen=True, kw_only=True)
class CudaMemory:
    """Where a storage lies on the GPU, in the terms of torch's CUDA IPC.

    Attributes:
        memory_handle: Names the segment; two bytes of torch and 64 of CUDA. Two exports of one segment may differ.
        storage_bytes: Size of the storage.
        storage_offset: Where it starts in the segment, in bytes.
        ref_counter: Name of the shared file in which the consumer counts itself out.
        ref_counter_offset: Index of the counter in that file.
        event: CUDA IPC event handle; carried because torch's signature has it.
        event_sync: Whether the consumer waits for `event`. Our exports say no: the event marks the moment of the
            export, not of the last write (https://github.com/radixark/miles/pull/1923), so the producer
            synchronises its stream each time instead.
    """

    memory_handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync: bool = False


def check_exportable(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory cannot be exported as it lies.

    Raises:
        TypeError: It is a DTensor or another subclass, or not on a CUDA device.
        ValueError: It is not contiguous or empty.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"cannot export a {type(tensor).__name__}: torch would export its local piece without saying so; pass "
            "a plain tensor (DTensor: to_local() or full_tensor())"
        )
    if tensor.device.type != "cuda":
        raise TypeError(f"expected a CUDA tensor, got one on {tensor.device}; on CPU use allocate()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor, got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
    if tensor.numel() == 0:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has no memory to export")


def rebuild_args(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the 15 arguments with which `rebuild_cuda_tensor` opens this tensor in another process.

    Each call is a new export with its own reference counter and event; the tensor itself is not touched and its
    owner must keep it alive until the consumer is done.

    Raises:
        TypeError: As `check_exportable`.
        ValueError: As `check_exportable`, or the memory lies in expandable segments.
        RuntimeError: CUDA refuses; the text says what to do.
    """
    check_exportable(tensor)
    storage = tensor.untyped_storage()
    # The alias has no deleter, so torch's bookkeeping of the export never holds the memory itself.
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    shared = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    shared.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
    with explained("export"):
        args: tuple[Any, ...] = reductions.reduce_tensor(shared)[1]
    if len(args) != len(REBUILD_PARAMETERS):
        raise RuntimeError(
            f"torch {torch.__version__} describes a CUDA tensor by {len(args)} values; expected "
            f"{len(REBUILD_PARAMETERS)}, as torch 2.11 to 2.13 do"
        )
    if is_expandable(args[REBUILD_PARAMETERS.index("storage_handle")]):
        _count_out(args)
        raise ValueError(
            "the tensor lies in expandable segments, which other processes cannot open in general; send it through "
            "packed staging, or remove expandable_segments:True from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )
    return args


def share(tensor: torch.Tensor) -> tuple[CudaMemory, int]:
    """Export a contiguous CUDA tensor for our own wire.

    Returns:
        The memory of its storage, and the byte offset of the tensor in that storage.

    Raises:
        TypeError, ValueError, RuntimeError: As `rebuild_args`.
    """
    values = rebuild_args(tensor)
    _count_out(values)
    args = dict(zip(REBUILD_PARAMETERS, values, strict=True))
    memory = CudaMemory(
        memory_handle=args["storage_handle"],
        storage_bytes=args["storage_size_bytes"],
        storage_offset=args["storage_offset_bytes"],
        ref_counter=args["ref_counter_handle"],
        ref_counter_offset=args["ref_counter_offset"],
        event=args["event_handle"],
    )
    return memory, int(tensor.storage_offset()) * tensor.element_size()


def _count_out(args: tuple[Any, ...]) -> None:
    """Count the consumer out at once.

    A counter that outlives a dead or twice-opened consumer, or that nobody gets, would pin a CUDA event until this process
    ends, and make it warn then. Torch never reuses a counter, so the consumer's own decrement later meets a dead one.
    """
    handle, offset = (args[REBUILD_PARAMETERS.index(f"ref_counter_{what}")] for what in ("handle", "offset"))
    torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)


def can_share(tensor: torch.Tensor) -> bool:
    """Whether `share` works: not for what lies in expandable segments, or came from another allocator than torch's."""
    try:
        share(tensor)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        logger.debug("memory of shape %s is staged instead of exported: %s", tuple(tensor.shape), error)
        return False
    return True


def open_storage(memory: CudaMemory, device: torch.device) -> torch.UntypedStorage:
    """Map another process's storage; the mapping ends when the last tensor on it is gone.

    Torch's own cache of opened storages is left out on purpose: each open here is paired with one release.

    Raises:
        RuntimeError: CUDA refuses; the text says what to do.
    """
    torch.cuda.init()
    with explained("open"):
        return torch.UntypedStorage._new_shared_cuda(
            local_index(device),  # of this process; the exporter's index means nothing here
            memory.memory_handle,
            memory.storage_bytes,
            memory.storage_offset,
            memory.ref_counter,
            memory.ref_counter_offset,
            memory.event,
            memory.event_sync,
        )


def allocate(nbytes: int, device: torch.device) -> tuple[torch.Tensor, CudaMemory, int]:
    """Allocate uint8 memory outside expandable segments and export it.

    Returns:
        The tensor, its memory and its byte offset in the storage, as `share`.

    Raises:
        torch.OutOfMemoryError: The GPU has too little memory left.
        ValueError, RuntimeError: As `rebuild_args`.
    """
    torch.cuda.init()
    with expandable_segments_off():
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        return memory, *share(memory)
    except ValueError:
        # On by torch's word, but not by its settings string: a later call had replaced the string.
        del memory
    with expandable_segments_off(force=True):
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory, *share(memory)


def local_index(device: torch.device) -> int:
    """Return the index of a CUDA device in this process; `cuda` without one is the current device."""
    index: int | None = device.index  # annotated as int by torch
    return torch.cuda.current_device() if index is None else index


def is_expandable(memory_handle: bytes) -> bool:
    """Tell from the prefix of torch's handle whether the memory lies in an expandable segment."""
    return memory_handle[1:2] == b"e"


def collect() -> None:
    """Let torch drop the bookkeeping of exports that their consumers have closed; cheap, and nothing without CUDA."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def expandable_segments_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the allocator settings in the environment turn expandable segments on (for checks before a run)."""
    return any(_EXPANDABLE_ON.search(environ.get(name, "")) for name in _CONF_VARIABLES)


@contextlib.contextmanager
def expandable_segments_off(*, force: bool = False) -> Iterator[None]:
    """Allocate outside expandable segments inside this block, and say so in the log if that changes anything.

    Args:
        force: Turn them off, and on again after, even if torch's settings string does not say that they are on.
    """
    before = _allocator_settings()
    on = _EXPANDABLE_ON.search(before) is not None
    if not on and not force:
        yield
        return
    logger.warning(
        "expandable_segments:True is set: memory for the weight sync is allocated outside expandable segments, "
        "because other processes cannot open those in general; everything else stays as it is set"
    )
    # Whole strings both ways: some releases reset every option that a new string leaves out.
    inside = _EXPANDABLE_ON.sub(r"\g<1>False", before) if on else _joined(before, "expandable_segments:False")
    after = before if on else _joined(before, "expandable_segments:True")
    _set_allocator_settings(inside)
    try:
        yield
    finally:
        _set_allocator_settings(after)


def _joined(settings: str, more: str) -> str:
    return f"{settings},{more}" if settings.strip() else more


def _allocator_settings() -> str:
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if getter is not None:
        return str(getter())
    return next((os.environ[name] for name in _CONF_VARIABLES if os.environ.get(name)), "")


def _set_allocator_settings(settings: str) -> None:
    # torch.cuda.memory._set_allocator_settings is the same call and deprecated.
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        setter = torch.cuda.memory._set_allocator_settings
    setter(settings)


def hint(text: str) -> str | None:
    """Translate the text of a CUDA IPC error into what to do about it; None for a text that we do not know."""
    lowered = text.lower()
    return next((advice for words, advice in HINTS.items() if words in lowered), None)


@contextlib.contextmanager
def explained(action: str) -> Iterator[None]:
    """Re-raise a CUDA error of this block with our advice added, in its first words still torch's own text."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        advice = hint(str(error))
        if advice is None:
            raise
        first_line = str(error).strip().splitlines()[0]
        raise RuntimeError(f"cannot {action} CUDA IPC memory: {first_line}. What to do: {advice}") from error


def signature_matches() -> bool:
    """Tell whether this torch still takes the rebuild arguments that we know (for `doctor` and tests)."""
    return tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == REBUILD_PARAMETERS
