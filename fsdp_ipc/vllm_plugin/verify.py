"""Verification, the worker's half: digests of what the live parameters hold, in the order of the tensors that were sent.

The copy plan knows where each piece of a wire tensor lies in which live parameter; digests of pieces add up to the
digest of the tensor (`fsdp_ipc.digest`), whether it was merged with others, is one expert of many, or is padded. They
are compared with the trainer's, which come through a file of their own, after the loader is done and before vLLM
publishes the version. What can't be mapped back is counted with its reason, never passed over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_ipc.digest import Digester, Run, spell
from fsdp_ipc.digest_file import DigestFile, Region
from fsdp_ipc.verify import shares
from fsdp_ipc.vllm_plugin.copy_layout import Layout, covers
from fsdp_ipc.vllm_plugin.copy_memory import Piece
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow

__all__ = ["LiveVerifier", "VerificationError", "VerifyCounts"]

_MAX_RUNS = 4096
"""A piece in more runs than this is first put in order in scratch memory, if its runs are short."""

_SHORT_RUN = 1024
_MAX_NAMED = 8

PART = "this worker holds a part of it, which the trainer digests from the next sync on"

Landed = Sequence[tuple[torch.Tensor, Piece]] | str
"""The pieces of a wire tensor, each with the live tensor that it lies in; or why they are not known."""


class VerificationError(RuntimeError):
    """The live parameters do not hold what the trainer meant to send."""


@dataclass(kw_only=True)
class VerifyCounts:
    """What the verification of one sync covered, for the report.

    Attributes:
        verified: Tensors whose digests were compared, and agreed.
        verified_parts: Of those, tensors of which this worker holds, and compared, a part only.
        unverified: Why tensors could not be compared, with how many of this sync's share.
        share: Which share of the tensors it was the turn of, from 0.
        num_shares: Of how many.
        seconds: Time that it took.
    """

    verified: int = 0
    verified_parts: int = 0
    unverified: dict[str, int] = field(default_factory=dict)
    share: int = 0
    num_shares: int = 1
    seconds: float = 0.0


@dataclass(eq=False)
class _Ordered:
    """A piece that is put in order in scratch memory before it is digested."""

    view: torch.Tensor
    scratch: torch.Tensor


@dataclass(eq=False)
class _Bound:
    """One share of the tensors, bound to the live parameters.

    Attributes:
        slots: For each sum, the row that it belongs to.
        digester: What makes the sums.
        ordered: Pieces with a scratch, and the digester of each.
        unverified: As in `VerifyCounts`.
        sums: int64 `[slots]`.
        num_tensors: Tensors among the slots.
        parts: Slots of tensors of which this worker holds a part, and for each of their regions its number.
    """

    slots: torch.Tensor
    digester: Digester
    ordered: list[tuple[_Ordered, Digester]]
    unverified: dict[str, int]
    sums: torch.Tensor
    num_tensors: int
    parts: tuple[torch.Tensor, torch.Tensor]


class LiveVerifier:
    """Compares digests for one worker; keeps what it prepared from sync to sync.

    Args:
        device: Device of the live parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file: DigestFile | None = None
        self._basis: tuple[Any, ...] = ()
        self._bound: dict[tuple[int, bool], _Bound] = {}
        self._asked = 0
        self._regions: dict[int, list[int]] = {}
        self._names: list[str] = []
        self._kept: tuple[object, ...] = ()

    def open(self, name: str, num_rows: int) -> None:
        """Take the trainer rank's file, unless it is the one that is open."""
        if self._file is not None and (self._file.name, self._file.num_rows) == (name, num_rows):
            return
        self.close()
        self._file = DigestFile.open(name, num_rows)

    def check(
        self,
        sync: int,
        buckets: Sequence[Sequence[TensorRow]],
        basis: object,
        landed: Callable[[str], Landed],
        who: str,
    ) -> VerifyCounts:
        """Compare this sync's share of the tensors.

        Args:
            sync: Its number.
            buckets: All rows of the plan.
            basis: What was prepared before holds as long as this is the same object and the rows are.
            landed: For the name of a wire tensor, where its pieces lie.
            who: This worker, for the error.

        Raises:
            VerificationError: A live parameter holds something else; names the tensors and both digests.
            ValueError: The trainer left no digests of this sync.
        """
        began = time.monotonic()
        if self._file is None:
            raise ValueError("fsdp_ipc: the trainer asked for verification but named no file of digests.")
        sent = self._file.read(sync)
        if self._basis != (id(basis), id(buckets), sent.num_shares):
            self._bound.clear()
            self._basis = (id(basis), id(buckets), sent.num_shares)
            self._kept = basis, buckets  # so that their ids stay theirs
            self._names = [row.name for rows in buckets for row in rows]
            self._ask(buckets, landed)
        # Regions were asked for at the end of an earlier sync, or are from now on.
        honoured = bool(self._asked) and sent.honoured == self._asked
        bound = self._bound.get((sent.share, honoured))
        if bound is None:
            rows = [row for bucket in buckets for row in bucket]
            chosen = shares([row.nbytes for row in rows], sent.num_shares)
            mine = [(n, row) for n, row in enumerate(rows) if chosen[n] == sent.share]
            bound = _bind(mine, landed, self._device, self._regions if honoured else {})
            self._bound[sent.share, honoured] = bound
        bound.sums.zero_()
        bound.digester.add(bound.sums)
        for ordered, digester in bound.ordered:
            ordered.scratch.copy_(ordered.view)
            digester.add(bound.sums)
        found = bound.sums.cpu()
        expected = sent.digests[bound.slots]
        if honoured:
            slots, regions = bound.parts
            expected[slots] = 0
            expected.index_add_(0, slots, sent.parts[regions])
        wrong = (found != expected).nonzero().flatten().tolist()
        if wrong:
            raise VerificationError(self._text(sync, who, sent.rank, bound, wrong, expected, found))
        return VerifyCounts(
            verified=bound.num_tensors,
            verified_parts=len(bound.parts[0].unique()),
            unverified=dict(bound.unverified),
            share=sent.share,
            num_shares=sent.num_shares,
            seconds=time.monotonic() - began,
        )

    def _ask(self, buckets: Sequence[Sequence[TensorRow]], landed: Callable[[str], Landed]) -> None:
        """Ask the trainer for digests of the slices that this worker holds of tensors."""
        assert self._file is not None
        asked: list[Region] = []
        self._regions = {}
        for index, row in enumerate(row for rows in buckets for row in rows):
            places = landed(row.name) if row.nbytes else ""
            if isinstance(places, str) or _complete(row, places) != PART:
                continue
            found = [_region(index, piece.source) for _, piece in places]
            regions = [region for region in found if region is not None]
            if len(regions) == len(found) and len(asked) + len(regions) <= self._file.max_regions:
                self._regions[index] = list(range(len(asked), len(asked) + len(regions)))
                asked += regions
        self._asked = self._file.ask(asked)

    def close(self) -> None:
        """Let go of the file and of what was prepared. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file, self._basis, self._kept = None, (), ()
        self._bound.clear()

    def _text(
        self,
        sync: int,
        who: str,
        rank: int,
        bound: _Bound,
        wrong: Sequence[int],
        expected: torch.Tensor,
        found: torch.Tensor,
    ) -> str:
        shown = [
            f"{self._names[int(bound.slots[n])]!r} (sent {spell(int(expected[n]))}, held {spell(int(found[n]))})"
            for n in wrong[:_MAX_NAMED]
        ]
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        return (
            f"fsdp_ipc: {who} does not hold what trainer rank {rank} sent in sync {sync}: {len(wrong)} of "
            f"{len(bound.slots)} digests differ: {', '.join(shown)}{more}. The version is not published; send again. If "
            'it comes back, check the memory of this device, and send with verify="full" to see all tensors at once.'
        )


def _bind(
    rows: Sequence[tuple[int, TensorRow]],
    landed: Callable[[str], Landed],
    device: torch.device,
    regions: Mapping[int, Sequence[int]],
) -> _Bound:
    slots: list[int] = []
    runs: list[Run] = []
    ordered: list[tuple[_Ordered, int, Layout]] = []
    reasons: Counter[str] = Counter()
    parts: list[tuple[int, int]] = []
    for index, row in rows:
        places = landed(row.name) if row.nbytes else "it has no elements"
        if isinstance(places, str):
            reasons[places] += 1
            continue
        groups = _complete(row, places)
        if groups == PART and index in regions:
            parts += [(len(slots), region) for region in regions[index]]
            groups = [list(places)]
        if isinstance(groups, str):
            reasons[groups] += 1
            continue
        for group in groups:
            for live, piece in group:
                _add(live, piece.source, piece.target, len(slots), runs, ordered)
            slots.append(index)
    largest = max((entry.view.nbytes for entry, _, _ in ordered), default=0)
    scratch = torch.empty(largest, dtype=torch.uint8, device=device)
    steps = []
    for entry, slot, source in ordered:
        entry.scratch = scratch[: entry.view.nbytes].view(entry.view.dtype).view(entry.view.shape)
        # In scratch the elements lie densely in the order of the source.
        size = entry.view.element_size()
        own = [
            Run(_flat(entry.scratch)[at * size : (at + n) * size], first * size, slot)
            for first, at, n in _runs(source, Layout.of(entry.scratch, int(entry.scratch.storage_offset())))
        ]
        steps.append((entry, Digester(own, device)))
    return _Bound(
        slots=torch.tensor(slots, dtype=torch.int64),
        digester=Digester(runs, device),
        ordered=steps,
        unverified=dict(reasons),
        sums=torch.zeros(len(slots), dtype=torch.int64, device=device),
        num_tensors=len(set(slots)),
        parts=(
            torch.tensor([slot for slot, _ in parts], dtype=torch.int64),
            torch.tensor([region for _, region in parts], dtype=torch.int64),
        ),
    )


def _complete(
    row: TensorRow, places: Sequence[tuple[torch.Tensor, Piece]]
) -> list[list[tuple[torch.Tensor, Piece]]] | str:
    """The pieces, in sets that each make up the whole tensor; or why they don't.

    A tensor that lies in several live tensors as a whole (a tie that the server copied) gives one set for each.
    """
    if any(piece.dtype != row.dtype for _, piece in places):
        return "cast when loaded"
    whole = Layout(0, row.shape, torch.empty(row.shape, device="meta").stride())
    by_live: dict[int, list[tuple[torch.Tensor, Piece]]] = {}
    for live, piece in places:
        by_live.setdefault(id(live), []).append((live, piece))
    sets = list(by_live.values())
    if all(covers(whole, [piece.source for _, piece in one]) is None for one in sets):
        return sets
    together = list(places)
    wrong = covers(whole, [piece.source for _, piece in together])
    if wrong is None:
        return [together]
    return PART if wrong == "gap" else "this worker holds parts of it twice"


def _region(index: int, source: Layout) -> Region | None:
    """A piece as the trainer understands it; None if it has too many dims."""
    dims: list[tuple[int, int]] = []
    for n, s in sorted(
        ((n, s) for n, s in zip(source.size, source.stride, strict=True) if n > 1), key=lambda dim: -dim[1]
    ):
        if dims and dims[-1][1] == n * s:
            dims[-1] = (dims[-1][0] * n, s)
        else:
            dims.append((n, s))
    return Region(index, source.offset, tuple(dims)) if len(dims) <= 3 else None


def _add(
    live: torch.Tensor,
    source: Layout,
    target: Layout,
    slot: int,
    runs: list[Run],
    ordered: list[tuple[_Ordered, int, Layout]],
) -> None:
    """Enter a piece: as the runs that it lies in, or to be put in order first where these would be too many."""
    size = live.element_size()
    found = list(_runs(source, target, at_most=_MAX_RUNS))
    if len(found) <= _MAX_RUNS or found[0][2] * size >= _SHORT_RUN:
        if len(found) > _MAX_RUNS:
            found = list(_runs(source, target))
        for first, at, count in found:
            view = live.data.as_strided((count,), (1,), live.storage_offset() + at)
            runs.append(Run(view.view(torch.uint8), first * size, slot))
        return
    dims = sorted(range(len(source.size)), key=lambda dim: -source.stride[dim])
    view = target.view_of(live.data).permute(dims)
    source = Layout(source.offset, tuple(source.size[d] for d in dims), tuple(source.stride[d] for d in dims))
    ordered.append((_Ordered(view, view), slot, source))


def _runs(source: Layout, target: Layout, *, at_most: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Stretches in which both layouts go on element by element: place in the source, in the target, elements.

    With `at_most`, one more than so many are given at most.
    """
    dims: list[tuple[int, int, int]] = []
    for n, s, t in sorted(
        ((n, s, t) for n, s, t in zip(source.size, source.stride, target.stride, strict=True) if n > 1),
        key=lambda dim: -dim[1],
    ):
        if dims and dims[-1][1] == n * s and dims[-1][2] == n * t:
            dims[-1] = (dims[-1][0] * n, s, t)
        else:
            dims.append((n, s, t))
    count = 1
    if dims and dims[-1][1:] == (1, 1):
        count = dims.pop()[0]
    number = 1
    for n, _, _ in dims:
        number *= n
    for index in range(number if at_most is None else min(number, at_most + 1)):
        first, at, rest = source.offset, target.offset, index
        for n, s, t in reversed(dims):
            rest, step = divmod(rest, n)
            first, at = first + step * s, at + step * t
        yield first, at, count


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
