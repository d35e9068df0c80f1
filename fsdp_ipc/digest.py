"""Digests of tensors in memory that add up: pieces of a tensor, wherever they lie, sum to the digest of the whole.

The byte at position `p` of a tensor (dense, row by row) contributes `byte << 8 * (p % 4)`, times an odd factor of the
32-bit word that it lies in, modulo 2^64. So a byte that changed, moved or is missing changes the sum, and a merged or
sliced parameter is digested in the order of the tensor that was sent, piece by piece, without being put together.
Against faults, not against forgers: anyone can compute these sums.

On CUDA one Triton kernel walks all pieces at the speed of memory (`digest_kernel`); torch's own operators give the same
numbers everywhere.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fsdp_ipc.digest_kernel import Piece, launcher

__all__ = ["CHUNK_WORDS", "Digester", "Run", "digest_of", "spell", "word_factor"]

CHUNK_WORDS = 1 << 16
"""A word's factor is that of its place in a chunk of so many words, times that of the chunk."""

_CHUNK_BYTES = 4 * CHUNK_WORDS
_BLOCK_CHUNKS = 16
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_local = threading.local()


@dataclass(frozen=True)
class Run:
    """Neighbouring bytes of a tensor that also are neighbours in memory.

    Attributes:
        memory: uint8 `[nbytes]`, contiguous; must stay where it is as long as a `Digester` of it is used.
        position: Of its first byte, in the tensor, in bytes.
        slot: Which sum it counts for.
    """

    memory: torch.Tensor
    position: int
    slot: int


class Digester:
    """The sums of many runs on one device. Everything that can be prepared is; `add` allocates nothing on CUDA.

    Attributes:
        prepared: Whether it goes by addresses (Triton); it then keeps no memory alive, which is for the caller to do.
        nbytes: Bytes of all runs.

    Args:
        runs: In any order.
        device: Device of all of them.
        triton: False takes torch's operators where Triton could be used.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device, *, triton: bool = True) -> None:
        self._runs = [run for run in runs if run.memory.numel()]
        self.nbytes = sum(run.memory.numel() for run in self._runs)
        self._launch = launcher(_pieces(self._runs), device) if triton and self._runs else None
        self.prepared = self._launch is not None
        if self.prepared:
            self._runs = []

    @torch.no_grad()
    def add(self, sums: torch.Tensor) -> None:
        """Queue the work on the current stream.

        Args:
            sums: int64 `[slots]` on the device; what is found is added, modulo 2^64.
        """
        if self._launch is not None:
            self._launch(sums)
            return
        for run in self._runs:
            for part in _sums(run.memory, run.position):
                sums[run.slot] += part


def digest_of(tensor: torch.Tensor) -> int:
    """The digest of one tensor, from 0 to 2^64 - 1; it waits for the device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    sums = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    Digester([Run(flat, 0, 0)], tensor.device).add(sums)
    return int(sums.item()) & _U64


def spell(digest: int) -> str:
    """A digest as errors show it."""
    return f"{digest & _U64:016x}"


def word_factor(index: int) -> int:
    """The odd factor of a 32-bit word, by its index in the tensor."""
    x = ((index % CHUNK_WORDS + 1) * 0x9E3779B1) & _U32
    x ^= x >> 15
    x = (x * 0x85EBCA77) & _U32
    x ^= x >> 13
    return (x | 1) * _chunk_factor(index // CHUNK_WORDS) & _U64


def _chunk_factor(chunk: int) -> int:
    x = ((chunk + 1) * 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return (x ^ (x >> 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _pieces(runs: Iterable[Run]) -> list[Piece]:
    """The runs, cut where a chunk ends, into what one program of the kernel takes."""
    pieces: list[Piece] = []
    for run in runs:
        address, position, left = run.memory.data_ptr(), run.position, run.memory.numel()
        while left:
            chunk, at = divmod(position, _CHUNK_BYTES)
            nbytes = min(left, _CHUNK_BYTES - at)
            pieces.append((address, at, nbytes, run.slot, _signed(_chunk_factor(chunk))))
            address, position, left = address + nbytes, position + nbytes, left - nbytes
    return pieces


def _sums(memory: torch.Tensor, position: int) -> Iterable[torch.Tensor]:
    """The contributions of a run, by torch's operators."""
    nbytes = memory.numel()
    whole = nbytes - nbytes % 4
    if position % 4 or memory.storage_offset() % 4:
        whole = 0
    if whole:
        yield from _word_sums(memory[:whole].view(torch.int32), position // 4)
    for first in range(whole, nbytes, CHUNK_WORDS):
        end = min(first + CHUNK_WORDS, nbytes)
        yield _byte_sum(memory[first:end], position + first)


def _word_sums(words: torch.Tensor, index: int) -> Iterable[torch.Tensor]:
    device, at = words.device, 0
    table, scratch = _place_factors(device), _scratch(device)
    while at < words.numel():
        chunk, place = divmod(index + at, CHUNK_WORDS)
        left = words.numel() - at
        whole = 0 if place else min(left // CHUNK_WORDS, _BLOCK_CHUNKS)
        if whole:
            count = whole * CHUNK_WORDS
            block = scratch[:count].view(whole, CHUNK_WORDS)
            block.copy_(words[at : at + count].view(whole, CHUNK_WORDS))
            block.bitwise_and_(_U32).mul_(table)
            yield block.sum(1).mul_(_chunk_factors(device, chunk, whole)).sum()
        else:
            count = min(left, CHUNK_WORDS - place)
            block = scratch[:count].copy_(words[at : at + count])
            block.bitwise_and_(_U32).mul_(table[place : place + count])
            yield block.sum().mul_(_signed(_chunk_factor(chunk)))
        at += count


def _byte_sum(memory: torch.Tensor, position: int) -> torch.Tensor:
    """Bytes one by one: what does not lie at a whole word."""
    places = torch.arange(position, position + memory.numel(), device=memory.device)
    words = places // 4
    values = memory.to(torch.int64) << places % 4 * 8
    values *= _place_factors(memory.device)[words % CHUNK_WORDS]
    first = position // _CHUNK_BYTES
    factors = _chunk_factors(memory.device, first, 2)
    return (values * factors[words // CHUNK_WORDS - first]).sum()


@functools.cache
def _place_factors(device: torch.device) -> torch.Tensor:
    x = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device).mul_(0x9E3779B1).bitwise_and_(_U32)
    x ^= x >> 15
    x.mul_(0x85EBCA77).bitwise_and_(_U32)
    x ^= x >> 13
    return x | 1


@functools.lru_cache(maxsize=4096)
def _chunk_factors(device: torch.device, first: int, count: int) -> torch.Tensor:
    factors = [_signed(_chunk_factor(chunk)) for chunk in range(first, first + count)]
    return torch.tensor(factors, dtype=torch.int64, device=device)


def _scratch(device: torch.device) -> torch.Tensor:
    """Memory for a block of words; one for each thread, since several may digest at the same time."""
    held: dict[torch.device, torch.Tensor] = _local.__dict__.setdefault("scratch", {})
    if device not in held:
        held[device] = torch.empty(_BLOCK_CHUNKS * CHUNK_WORDS, dtype=torch.int64, device=device)
    return held[device]
