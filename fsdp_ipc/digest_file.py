"""The private file in `/dev/shm` by which a trainer rank tells its worker the digests of what it meant to send.

64-bit words: a header that says whose they are and of which sync, then one digest for each tensor of the plan, in the
order of the buckets. The number of the sync is written last and wiped first, so that old digests never pass for new ones.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple, Self

import torch

from fsdp_ipc import shm

__all__ = ["DigestFile", "SentDigests"]

_MAGIC = 0x66736470_69706401  # "fsdpid" and the version of this layout
_HEADER_WORDS = 8
_SYNC, _RANK, _SHARE, _NUM_SHARES, _ROWS = range(1, 6)


class SentDigests(NamedTuple):
    """What a trainer rank wrote for one sync.

    Attributes:
        rank: Its rank in the trainer group.
        share: Which share of the tensors was digested.
        num_shares: How many shares there are; with one, every tensor was.
        digests: int64 `[rows]`; only those of the share mean anything.
    """

    rank: int
    share: int
    num_shares: int
    digests: torch.Tensor


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

    def write(self, sync: int, share: int, num_shares: int, digests: torch.Tensor) -> None:
        """Publish the digests of one sync (the trainer).

        Args:
            sync: Its number.
            share: Which share of the tensors they cover.
            num_shares: Of how many.
            digests: int64 `[rows]` on the CPU.
        """
        words = self._words
        words[_SYNC] = 0
        words[_SHARE], words[_NUM_SHARES] = share, num_shares
        self._digests().copy_(digests)
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
        return SentDigests(int(words[_RANK]), share, num_shares, self._digests().clone())

    def _digests(self) -> torch.Tensor:
        return torch.frombuffer(
            self._map, dtype=torch.int64, offset=8 * _HEADER_WORDS, count=max(self.num_rows, 1)
        )[: self.num_rows]

    def close(self) -> None:
        """Let go of the file; the trainer's side also unlinks it. Idempotent."""
        self._words.release()
        if self._file is not None:
            self._file.close()


def _nbytes(num_rows: int) -> int:
    return 8 * (_HEADER_WORDS + max(num_rows, 1))
