"""Verification, the trainer's half: digests of the full wire tensors, taken on the device as soon as they are gathered.

Each rank digests its own staging memory (and the parameters of its own that it exports), which is what its worker
reads, before it announces a bucket. The worker compares with what its live parameters hold after loading
(`vllm_plugin.verify`), before the version is published. Ranks also compare with each other what all of them sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from fsdp_ipc.digest import Digester, Run, spell
from fsdp_ipc.digest_file import DigestFile, Region
from fsdp_ipc.dtypes import dtype_from_name, num_bytes
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.rows import TensorRow
from fsdp_ipc.stage import Stage

__all__ = ["SAMPLE_SHARES", "SentVerifier", "Verify", "check_verify", "shares"]

Verify = Literal["off", "sample", "full"]

SAMPLE_SHARES = 8
"""With `verify="sample"` a sync digests one share of so many, in turn; after as many syncs every tensor was looked at."""

_MAX_TOLD = 64


def check_verify(verify: str) -> None:
    """Refuse a setting that is none.

    Raises:
        ValueError: It is not one of the three.
    """
    if verify not in ("off", "sample", "full"):
        raise ValueError(f"verify={verify!r}: expected 'off', 'sample' or 'full'")


def shares(nbytes: Sequence[int], num_shares: int) -> list[int]:
    """Spread tensors over shares of about equal bytes: the same on both sides, from their sizes alone.

    Returns:
        The share of each tensor.
    """
    if num_shares <= 1:
        return [0] * len(nbytes)
    taken = [0] * num_shares
    chosen = [0] * len(nbytes)
    # Largest first, each to the lightest share so far.
    for index in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        share = min(range(num_shares), key=taken.__getitem__)
        chosen[index] = share
        taken[share] += nbytes[index]
    return chosen


class SentVerifier:
    """Digests of what a rank sends, and the file by which its worker gets them.

    Args:
        verify: `"sample"` or `"full"`.
        group: The trainer ranks.
        device: Device of the staging memory.
        key: Device key of this rank.
    """

    def __init__(self, verify: Verify, group: TrainerGroup, device: torch.device, key: str) -> None:
        self._num_shares = SAMPLE_SHARES if verify == "sample" else 1
        self._group, self._device, self._key = group, device, key
        self._plan = ""
        self._bound: tuple[str, int] | None = None
        self._file: DigestFile | None = None
        self._names: dict[str, str] = {}
        self._rows: list[list[TensorRow]] = []
        self._shares: list[int] = []
        self._digesters: dict[tuple[int, int], Digester] = {}
        self._stage: Stage | None = None
        self._sums = self._host = self._weights = torch.empty(0, dtype=torch.int64)
        self._share = 0
        self._error: Exception | None = None
        self._asked = 0
        self._regions: list[Region] = []

    def prepare(self, stage: Stage, sync: int) -> None:
        """All ranks, collective: make ready for a sync, before anything of it is gathered."""
        plan, group = stage.plan, self._group
        if plan.digest != self._plan or self._file is None:
            with group.together("verify"):
                rows = [*plan.rows, *plan.local_rows[group.rank]]
                self._rows = [[] for _ in range(plan.num_buckets)]
                for row in rows:
                    self._rows[row.bucket].append(row)
                local = {row.name for row in plan.local_rows[group.rank]}
                self._weights = torch.tensor(
                    [
                        0 if row.name in local else 2 * n + 1
                        for n, row in enumerate(row for bucket in self._rows for row in bucket)
                    ],
                    dtype=torch.int64,
                )
                sizes = [num_bytes(row.dtype, row.shape) for bucket in self._rows for row in bucket]
                self._shares = shares(sizes, self._num_shares)
                if self._file is not None:
                    self._file.close()
                self._file = DigestFile.create(len(rows), group.rank)
                self._take(0, [])
            assert self._file is not None
            names = group.gather_objects((self._key, self._file.name), "verify")
            self._names, self._plan = dict(names), plan.digest
        if self._bound != (plan.digest, stage.epoch):
            self._digesters.clear()
            self._bound = (plan.digest, stage.epoch)
        if (request := self._file.asked(self._asked)) is not None:
            self._take(*request)
        self._stage, self._error = stage, None
        self._share = sync % self._num_shares
        self._sums.zero_()

    def _take(self, number: int, regions: list[Region]) -> None:
        """Take a worker's request, whose regions get sums of their own after those of the tensors."""
        rows = [row for bucket in self._rows for row in bucket]
        if any(r.last >= _numel(rows[r.row]) or r.numel > _numel(rows[r.row]) for r in regions):
            number, regions = 0, []
        self._asked, self._regions = number, regions
        self._digesters.clear()
        count = len(rows) + len(regions)
        self._sums = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._host = torch.zeros(count, dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def fields(self, new: bool) -> dict[str, Any]:
        """What the sender adds to the update: the files by device, or none where the workers have them."""
        return {"digests": self._names if new else {}}

    def digest(self, bucket: int) -> None:
        """This rank, after the gather of a bucket, on the same stream: queue the digests of its tensors.

        What goes wrong is kept for `publish`, since the other ranks are on their way to the next collective.
        """
        if self._error is not None:
            return
        try:
            digester = self._digesters.get((bucket, self._share))
            if digester is None:
                digester = self._digester(bucket)
                # Others hold views, and staging memory is not to be kept alive from here.
                if digester.prepared:
                    self._digesters[bucket, self._share] = digester
            digester.add(self._sums)
        except Exception as error:  # noqa: BLE001  told in `publish`
            self._error = error

    def publish(self, sync: int) -> tuple[Exception | None, list[str]]:
        """This rank, when all buckets are complete: hand the digests to the worker.

        Returns:
            What went wrong, if anything did; and what must be the same on all ranks.
        """
        try:
            if self._error is not None:
                raise self._error
            assert self._file is not None
            self._host.copy_(self._sums)
            digests, parts = self._host[: len(self._shares)], self._host[len(self._shares) :]
            self._file.write(sync, self._share, self._num_shares, digests, honoured=self._asked, parts=parts)
        except Exception as error:  # noqa: BLE001  the vote that follows tells it
            return error, []
        return None, self._common()

    def told(self, report: dict[str, Any] | None) -> dict[str, Any] | None:
        """The worker's report; what a worker that does not verify was given counts as unverified."""
        if report is None or "verified" in report:
            return report
        asked = sum(share == self._share for share in self._shares)
        return {**report, "verified": 0, "unverified": {"the worker does not verify": asked}}

    def close(self) -> None:
        """This rank: unlink the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file, self._plan, self._stage = None, "", None
        self._digesters.clear()

    def _digester(self, bucket: int) -> Digester:
        assert self._stage is not None
        memory = self._stage.memory
        first = sum(len(rows) for rows in self._rows[:bucket])
        runs = [
            Run(_bytes(memory[row.allocation], row), 0, slot)
            for slot, row in enumerate(self._rows[bucket], first)
            if self._shares[slot] == self._share
        ]
        last = first + len(self._rows[bucket])
        for slot, region in enumerate(self._regions, len(self._shares)):
            if first <= region.row < last and self._shares[region.row] == self._share:
                row = self._rows[bucket][region.row - first]
                size = dtype_from_name(row.dtype).itemsize
                held = _bytes(memory[row.allocation], row)
                runs += [
                    Run(held[at * size : (at + count) * size], at * size, slot)
                    for at, count in _stretches(region)
                ]
        return Digester(runs, self._device)

    def _common(self) -> list[str]:
        """By bucket, a sum over what every rank sends, which a gather that went wrong on one rank makes differ."""
        if self._group.size == 1:
            return []
        # Not a Python loop over what may be tens of thousands of tensors.
        upto = (self._host[: len(self._shares)] * self._weights).cumsum(0)
        ends, told, before = 0, [], 0
        for bucket, rows in enumerate(self._rows):
            ends += len(rows)
            if rows:
                total = int(upto[ends - 1])
                told.append(
                    f"digest {spell(total - before)} of the tensors of bucket {bucket} ({rows[0].name}, ...)"
                )
                before = total
        return told if len(told) <= _MAX_TOLD else [f"digest {spell(before)} of all tensors"]


def _bytes(memory: torch.Tensor, row: TensorRow) -> torch.Tensor:
    return memory[row.offset : row.offset + num_bytes(row.dtype, row.shape)]


def _stretches(region: Region) -> Iterator[tuple[int, int]]:
    """First element and number of elements of each stretch of neighbours."""
    dims = list(region.dims)
    count = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    number = 1
    for size, _ in dims:
        number *= size
    for index in range(number):
        at, rest = region.offset, index
        for size, stride in reversed(dims):
            rest, step = divmod(rest, size)
            at += step * stride
        yield at, count


def _numel(row: TensorRow) -> int:
    return num_bytes(row.dtype, row.shape) // dtype_from_name(row.dtype).itemsize
