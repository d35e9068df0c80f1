"""Copies out of other GPUs' memory, beside the copies out of this one's.

Large tensors go by the GPU's copy engines, which keep NVLink full and leave the multiprocessors to the local copies: on two
H200s 363 GB/s each way, where the copy kernel reads 336 GB/s and slows the local copies down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from fsdp_ipc.vllm_plugin.copy_kernel import batched_copy

_ENGINE_BYTES = 1 << 20
"""From here on a copy by the engines is worth its launch, which takes some microseconds of the CPU."""

Copy = Callable[[], object]


def peer_copies(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> list[Copy]:
    """Prepare copies of flat contiguous tensors of one device, out of memory of other GPUs; in the order given.

    Args:
        into: Targets, all of one dtype.
        out_of: Sources, likewise.
    """
    pairs = list(zip(into, out_of, strict=True))
    cast = bool(pairs) and into[0].dtype != out_of[0].dtype
    large = [pair for pair in pairs if not cast and pair[0].nbytes >= _ENGINE_BYTES]
    small = [pair for pair in pairs if cast or pair[0].nbytes < _ENGINE_BYTES]
    copies: list[Copy] = [functools.partial(target.copy_, source) for target, source in large]
    if small:
        targets, sources = [p[0] for p in small], [p[1] for p in small]
        copies.append(
            batched_copy(targets, sources) or functools.partial(torch._foreach_copy_, targets, sources)
        )
    return copies


def beside(remote: Sequence[Copy], local: Sequence[Copy], device: torch.device) -> list[Copy]:
    """All copies, those out of other GPUs' memory on a stream of their own where there are streams.

    The current stream waits for both, and they for what was queued on it before.
    """
    if not remote or device.type != "cuda":
        return [*remote, *local]
    return [functools.partial(_run, tuple(remote), tuple(local), device)]


def _run(remote: Sequence[Copy], local: Sequence[Copy], device: torch.device) -> None:
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for copy in remote:
            copy()
    for copy in local:
        copy()
    current.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
