"""Any number of contiguous copies in one launch, at the speed of one large copy.

`torch._foreach_copy_` reaches about two thirds of an H200's copy bandwidth, and a copy at a time drowns thousands of
expert tensors in launches. Here a table on the device lists chunks (source, target, size), made once for a plan and its
memory; one kernel walks it. Where Triton is missing or a copy does not fit, the caller stays with `_foreach_copy_`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

CHUNK_BYTES = 1 << 17
_ALIGN = 16


def batched_copy(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Prepare copies of flat contiguous tensors of equal dtype and size, on one CUDA device.

    Args:
        into: Targets; must stay where they are as long as the result is called.
        out_of: Sources, likewise.

    Returns:
        What queues all copies on the current stream; None if they do not fit this kernel.
    """
    if not into or into[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    rows: list[tuple[int, int, int]] = []
    for target, source in zip(into, out_of, strict=True):
        to, of, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
        if to % _ALIGN or of % _ALIGN or nbytes % _ALIGN or source.nbytes != nbytes:
            return None
        rows += [
            (of + at, to + at, min(CHUNK_BYTES, nbytes - at) // 8) for at in range(0, nbytes, CHUNK_BYTES)
        ]
    if not rows:
        return None
    table = torch.tensor(rows, dtype=torch.int64).to(into[0].device)
    return functools.partial(_launch, table, len(rows))


def _launch(table: torch.Tensor, num_chunks: int) -> None:
    with torch.cuda.device(table.device):
        _kernel()[(num_chunks,)](table, WORDS=CHUNK_BYTES // 8, BLOCK=2048, num_warps=8)


@functools.cache
def _kernel() -> Any:
    """The Triton kernel; made at first use, since importing Triton takes a while and needs a GPU."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy_chunks(table, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        row = tl.program_id(0) * 3
        source = tl.load(table + row).to(tl.pointer_type(tl.int64))
        target = tl.load(table + row + 1).to(tl.pointer_type(tl.int64))
        words = tl.load(table + row + 2)
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        at = tl.arange(0, BLOCK)
        if words == WORDS:
            for step in tl.static_range(WORDS // BLOCK):
                tl.store(target + step * BLOCK + at, tl.load(source + step * BLOCK + at))
        else:
            # Not the name of above: Triton wants one type for a name in both branches.
            for begin in range(0, words, BLOCK):
                inside = begin + at < words
                tl.store(target + begin + at, tl.load(source + begin + at, mask=inside), mask=inside)

    # The body is compiled from its source and sees this module's globals, not this function's names.
    globals()["tl"] = tl
    return copy_chunks
