"""Any number of contiguous copies in one launch, at the speed of one large copy.

`torch._foreach_copy_` reaches about two thirds of an H200's copy bandwidth, and a copy at a time drowns thousands of
expert tensors in launches. Here a table on the device lists chunks (source, target, size), made once for a plan and its
memory; one kernel walks it. A cast from float32 rounds as torch does, to nearest and to even. Where Triton is missing or
a copy does not fit, the caller stays with `_foreach_copy_`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

CHUNK_BYTES = 1 << 16
"""Bytes of the target that a row of the table lists; several programs share a row, so that the table stays small."""

_PART_BYTES, _PART_WARPS = 1 << 12, 4
"""What one program copies, all of it in flight at once: 4.2 TB/s on an H200, as one large copy; with twice the warps 3.8."""

_CAST_PART, _CAST_WARPS = 1 << 12, 8
"""Elements that one program casts: 4.4 TB/s there, as one large cast."""

_ALIGN = 16

_CASTS = (torch.bfloat16, torch.float16)


def batched_copy(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Prepare copies of flat contiguous tensors on one CUDA device.

    Args:
        into: Targets, all of one dtype; must stay where they are as long as the result is called.
        out_of: Sources, likewise; of the same dtype, or float32 for targets of 16 bits.

    Returns:
        What queues all copies on the current stream; None if they do not fit this kernel.
    """
    if not into or into[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    to_dtype, of_dtype = into[0].dtype, out_of[0].dtype
    cast = to_dtype != of_dtype
    if cast and (of_dtype != torch.float32 or to_dtype not in _CASTS):
        return None
    # Offsets are in bytes of the target; a cast's sources lie twice as far apart. Sizes count words, or elements.
    unit, widening = (to_dtype.itemsize, of_dtype.itemsize // to_dtype.itemsize) if cast else (8, 1)
    rows: list[torch.Tensor] = []
    for target, source in zip(into, out_of, strict=True):
        to, of, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
        if to % _ALIGN or of % _ALIGN or nbytes % _ALIGN or source.numel() != target.numel():
            return None
        at = torch.arange(0, nbytes, CHUNK_BYTES)
        rows.append(
            torch.stack((of + at * widening, to + at, (nbytes - at).clamp(max=CHUNK_BYTES) // unit), 1)
        )
    table = torch.cat(rows).to(into[0].device)
    if cast:
        constants = {"ELEMENTS": _CAST_PART, "BF16": to_dtype == torch.bfloat16, "num_warps": _CAST_WARPS}
        return functools.partial(_launch, 1, table, CHUNK_BYTES // to_dtype.itemsize // _CAST_PART, constants)
    constants = {"WORDS": _PART_BYTES // 8, "num_warps": _PART_WARPS}
    return functools.partial(_launch, 0, table, CHUNK_BYTES // _PART_BYTES, constants)


def _launch(kernel: int, table: torch.Tensor, parts: int, constants: dict[str, int]) -> None:
    with torch.cuda.device(table.device):
        _kernels()[kernel][(table.shape[0] * parts,)](table, PARTS=parts, **constants)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The Triton kernels; made at first use, since importing Triton takes a while and needs a GPU."""
    import triton
    import triton.language as tl

    # Only the last part of a tensor needs a mask: under one, loads are not joined to 16 bytes, and take thrice as long.

    @triton.jit
    def copy_chunks(table, PARTS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        program = tl.program_id(0).to(tl.int64)
        row = table + program // PARTS * 3
        begin = program % PARTS * WORDS
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16) + begin
        target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int64)), 16) + begin
        words = tl.load(row + 2) - begin
        at = tl.arange(0, WORDS)
        if words >= WORDS:
            tl.store(target + at, tl.load(source + at))
        elif words > 0:
            tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)

    @triton.jit
    def cast_chunks(  # type: ignore[no-untyped-def]
        table,
        PARTS: tl.constexpr,  # noqa: N803
        ELEMENTS: tl.constexpr,  # noqa: N803
        BF16: tl.constexpr,  # noqa: N803
    ):
        program = tl.program_id(0).to(tl.int64)
        row = table + program // PARTS * 3
        begin = program % PARTS * ELEMENTS
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + begin
        to = tl.load(row + 1)
        elements = tl.load(row + 2) - begin
        at = tl.arange(0, ELEMENTS)
        if BF16:
            target = tl.multiple_of(to.to(tl.pointer_type(tl.bfloat16)), 16) + begin
            if elements >= ELEMENTS:
                tl.store(target + at, tl.load(source + at).to(tl.bfloat16))
            elif elements > 0:
                tl.store(
                    target + at, tl.load(source + at, mask=at < elements).to(tl.bfloat16), mask=at < elements
                )
        else:
            target = tl.multiple_of(to.to(tl.pointer_type(tl.float16)), 16) + begin
            if elements >= ELEMENTS:
                tl.store(target + at, tl.load(source + at).to(tl.float16))
            elif elements > 0:
                tl.store(
                    target + at, tl.load(source + at, mask=at < elements).to(tl.float16), mask=at < elements
                )

    # The bodies are compiled from their source and see this module's globals, not this function's names.
    globals()["tl"] = tl
    return copy_chunks, cast_chunks
