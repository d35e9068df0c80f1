"""The private file in `/dev/shm` by which a trainer rank tells its worker the digests of what it meant to send.

64-bit words: a header that says whose they are and of which sync, then one digest for each tensor of the plan, in the
order of the buckets. The number of the sync is written last and wiped first, so that old digests never pass for new ones.

A worker that holds only slices of some tensors (tensor parallelism) asks in the same file for digests of those regions;
the trainer gives them from the next sync on.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from fsdp_ipc import shm

__all__ = ["DigestFile", "Region", "SentDigests"]

_MAGIC = 0x66736470_69706401  # "fsdpid" and the version of this layout
_HEADER_WORDS = 8
_SYNC, _RANK, _SHARE, _NUM_SHARES, _ROWS, _ASKED, _HONOURED = range(1, 8)
_MAX_DIMS = 3
_REGION_WORDS = 2 + 2 * _MAX_DIMS


class Region(NamedTuple):
    """Elements of a tensor, counted from its first one, row by row.

    Attributes:
        row: The tensor, by its number in the plan.
        offset: Of the first element.
        dims: Size and stride along each dim, at most three, largest stride first.
    """

    row: int
    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(size for size, _ in self.dims)

    @property
    def last(self) -> int:
        """The farthest element."""
        return self.offset + sum((size - 1) * stride for size, stride in self.dims)


class SentDigests(NamedTuple):
    """What a trainer rank wrote for one sync.

    Attributes:
        rank: Its rank in the trainer group.
        share: Which share of the tensors was digested.
        num_shares: How many shares there are; with one, every tensor was.
        digests: int64 `[rows]`; only those of the share mean anything.
        honoured: Number of the request whose regions are in `parts`; 0 without one.
        parts: int64, one for each region that was asked for.
    """

    rank: int
    share: int
    num_shares: int
    digests: torch.Tensor
    honoured: int
    parts: torch.Tensor


class DigestFile:
    """One side's view of the file.

    Attributes:
        name: What travels to the worker.
        num_rows: Digests that it has room for.
    """

    def __init__(self, name: str, fd: int, num_rows: int, file: shm.SharedFile | None) -> None:
        self.name, self.num_rows, self._file = name, num_rows, file
        self._map = mmap.mmap(fd, _nbytes(num_rows))
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, num_rows: int, rank: int) -> Self:
        """Make the file (a trainer rank). Not collective.

        Raises:
            MemoryError: `/dev/shm` is full.
        """
        file = shm.create(_nbytes(num_rows), suffix=".dig")
        try:
            made = cls(file.name, file.fd, num_rows, file)
        except BaseException:
            file.close()
            raise
        made._words[_RANK], made._words[_ROWS] = rank, num_rows
        made._words[0] = _MAGIC
        return made

    @classmethod
    def open(cls, name: str, num_rows: int) -> Self:
        """Open the file of the trainer rank that this worker reads from (the worker).

        Raises:
            ValueError: The name, the size or what is in it is not that of a file of digests for so many tensors.
            PermissionError: The file belongs to another user or is open to others.
            FileNotFoundError: There is no such file on this side.
        """
        fd = shm.open_checked(name, shm.DIGEST_NAME, _nbytes(num_rows))
        try:
            opened = cls(name, fd, num_rows, None)
        finally:
            os.close(fd)
        if opened._words[0] != _MAGIC or opened._words[_ROWS] != num_rows:
            opened.close()
            raise ValueError(
                f"{name} is no file of digests of this release; install one release on both sides"
            )
        return opened

    def ask(self, regions: Sequence[Region]) -> int:
        """Ask for the digests of regions, instead of all that was asked for before (the worker).

        Returns:
            The number of the request; 0 if there is nothing to ask for.
        """
        self._words[_ASKED] = 0
        if not regions:
            return 0
        flat = [word for region in regions for word in _region_words(region)]
        first = self._at(2)
        for at, word in enumerate(flat, first):
            self._words[at] = word
        number = zlib.crc32(self._words[first : first + len(flat)]) << 32 | len(regions)
        self._words[_ASKED] = number
        return number

    def asked(self, last: int) -> tuple[int, list[Region]] | None:
        """What the worker asks for, unless that is the request `last` (the trainer).

        What makes no sense is taken for no request: the worker then counts those tensors as unverified.
        """
        number = self._words[_ASKED]
        if number == last:
            return None
        count, first = number & 0xFFFFFFFF, self._at(2)
        if not 0 < count <= self.max_regions:
            return 0, []
        words = self._words[first : first + count * _REGION_WORDS].tolist()
        regions = [
            _region(words[at : at + _REGION_WORDS]) for at in range(0, count * _REGION_WORDS, _REGION_WORDS)
        ]
        if any(region.row >= self.num_rows for region in regions):
            return 0, []
        return number, regions

    def write(
        self,
        sync: int,
        share: int,
        num_shares: int,
        digests: torch.Tensor,
        *,
        honoured: int = 0,
        parts: torch.Tensor | None = None,
    ) -> None:
        """Publish the digests of one sync (the trainer).

        Args:
            sync: Its number.
            share: Which share of the tensors they cover.
            num_shares: Of how many.
            digests: int64 `[rows]` on the CPU.
            honoured: Number of the request whose regions are in `parts`.
            parts: int64, one for each of them.
        """
        words = self._words
        words[_SYNC] = 0
        words[_SHARE], words[_NUM_SHARES], words[_HONOURED] = share, num_shares, honoured
        self._area(0, self.num_rows).copy_(digests)
        if parts is not None:
            self._area(1, parts.numel()).copy_(parts)
        words[_SYNC] = sync

    def read(self, sync: int) -> SentDigests:
        """A copy of the digests of one sync (the worker).

        Raises:
            ValueError: The file has those of another sync, or of none.
        """
        words = self._words
        if words[_SYNC] != sync:
            raise ValueError(
                f"the trainer left digests of sync {words[_SYNC]} where those of sync {sync} were expected"
            )
        share, num_shares = words[_SHARE], words[_NUM_SHARES]
        if not 0 <= share < num_shares < 1 << 32:
            raise ValueError(f"the trainer's digests are of share {share} of {num_shares}, which is no share")
        honoured = words[_HONOURED]
        parts = self._area(1, min(honoured & 0xFFFFFFFF, self.max_regions)).clone()
        digests = self._area(0, self.num_rows).clone()
        return SentDigests(int(words[_RANK]), share, num_shares, digests, honoured, parts)

    @property
    def max_regions(self) -> int:
        """Regions that can be asked for."""
        return _capacity(self.num_rows)

    def _at(self, area: int) -> int:
        """First word of the digests (0), of those of regions (1), of the regions (2)."""
        return _HEADER_WORDS + area * _capacity(self.num_rows)

    def _area(self, area: int, count: int) -> torch.Tensor:
        whole = torch.frombuffer(
            self._map, dtype=torch.int64, offset=8 * self._at(area), count=_capacity(self.num_rows)
        )
        return whole[:count]

    def close(self) -> None:
        """Let go of the file; the trainer's side also unlinks it. Idempotent."""
        self._words.release()
        if self._file is not None:
            self._file.close()


def _capacity(num_rows: int) -> int:
    return max(num_rows, 16)


def _nbytes(num_rows: int) -> int:
    return 8 * (_HEADER_WORDS + _capacity(num_rows) * (2 + _REGION_WORDS))


def _region_words(region: Region) -> list[int]:
    dims = [number for dim in region.dims for number in dim]
    return [region.row, region.offset, *dims, *[1] * (2 * _MAX_DIMS - len(dims))]


def _region(words: Sequence[int]) -> Region:
    dims = zip(words[2::2], words[3::2], strict=True)
    return Region(words[0], words[1], tuple((size, stride) for size, stride in dims if size != 1))
