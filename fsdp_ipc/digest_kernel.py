"""The Triton kernel of `digest`: one launch a kind of alignment, one program a piece, sums added atomically."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["Piece", "launcher"]

Piece = tuple[int, int, int, int, int]
"""Address, place in its chunk in bytes, bytes, sum, factor of the chunk."""

_BLOCK = 4096
_WIDE, _WORDS, _BYTES = 16, 4, 1


def launcher(pieces: Iterable[Piece], device: torch.device) -> Callable[[torch.Tensor], None] | None:
    """Prepare the sums of pieces of memory on one CUDA device.

    Args:
        pieces: None of them reaches over the end of its chunk.
        device: Where they lie.

    Returns:
        What queues them on the current stream; None where there is no Triton.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (device.type != "cuda" and not interpreted) or importlib.util.find_spec("triton") is None:
        return None
    tables = [
        (unit, torch.tensor(rows, dtype=torch.int64).to(device))
        for unit, rows in _by_alignment(pieces).items()
        if rows
    ]
    return functools.partial(_launch, tables)


def _by_alignment(pieces: Iterable[Piece]) -> dict[int, list[Sequence[int]]]:
    """Rows of the kernel's tables: as much as possible in wide loads, then in words, then in bytes."""
    found: dict[int, list[Sequence[int]]] = {_WIDE: [], _WORDS: [], _BYTES: []}
    for address, at, nbytes, slot, factor in pieces:
        for unit in (_WIDE, _WORDS, _BYTES):
            count = nbytes - nbytes % unit
            if not count or address % unit or at % min(unit, 4):
                continue
            size = min(unit, 4)
            found[unit].append((address, at // size, count // size, slot, factor))
            address, at, nbytes = address + count, at + count, nbytes - count
    return found


def _launch(tables: Sequence[tuple[int, torch.Tensor]], sums: torch.Tensor) -> None:
    for unit, table in tables:
        if table.device.type != "cuda":  # interpreted
            _kernel()[(table.shape[0],)](table, sums, BLOCK=_BLOCK, UNIT=unit)
            continue
        with torch.cuda.device(table.device):
            _kernel()[(table.shape[0],)](table, sums, BLOCK=_BLOCK, UNIT=unit, num_warps=8)


@functools.cache
def _kernel() -> Any:
    """The kernel; made at first use, since importing Triton takes a while and needs a GPU."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(words, places):  # type: ignore[no-untyped-def]
        x = (places + 1).to(tl.uint32) * 0x9E3779B1
        x = x ^ (x >> 15)
        x = x * 0x85EBCA77
        x = x ^ (x >> 13)
        x = x | 1
        return (words.to(tl.uint64) * x.to(tl.uint64)).to(tl.int64)

    @triton.jit  # type: ignore[untyped-decorator]
    def digest_pieces(table, sums, BLOCK: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        row = tl.program_id(0) * 5
        address = tl.load(table + row)
        first = tl.load(table + row + 1).to(tl.int32)
        count = tl.load(table + row + 2).to(tl.int32)
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.int64)
        if UNIT == 1:
            memory = address.to(tl.pointer_type(tl.uint8))
            for at in range(0, count, BLOCK):
                inside = at + lanes
                values = tl.load(memory + inside, mask=inside < count, other=0).to(tl.uint32)
                position = first + inside
                total += product(values << ((position & 3) * 8).to(tl.uint32), position >> 2)
        else:
            words = address.to(tl.pointer_type(tl.uint32))
            if UNIT == 16:
                words = tl.multiple_of(words, 16)
            whole = count // BLOCK * BLOCK
            for at in range(0, whole, BLOCK):
                inside = at + lanes
                total += product(tl.load(words + inside), first + inside)
            if whole < count:
                inside = whole + lanes
                values = tl.load(words + inside, mask=inside < count, other=0)
                total += product(values, first + inside)
        value = tl.sum(total) * tl.load(table + row + 4)
        tl.atomic_add(sums + tl.load(table + row + 3), value)

    # Bodies are compiled from their source and see this module's globals, not this function's names.
    globals().update(tl=tl, product=product)
    return digest_pieces
