"""What each rank of the trainer group says at the beginning of an exchange, and how they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

_STEP_BYTES = 16


class Ballot(NamedTuple):
    """What each rank says at the beginning of an exchange; of equal length in all, so that none can be misread."""

    kind: int
    failed: int
    value: int
    same: int
    step: str

    def encode(self) -> list[int]:
        """As int64 numbers; the step is cut to 16 bytes."""
        step = self.step.encode()[:_STEP_BYTES].ljust(_STEP_BYTES, b"\0")
        halves = (step[: _STEP_BYTES // 2], step[_STEP_BYTES // 2 :])
        return [*self[:4], *(int.from_bytes(half, "little", signed=True) for half in halves)]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Ballot:
        """The inverse of `encode`."""
        halves = [number.to_bytes(_STEP_BYTES // 2, "little", signed=True) for number in numbers[4:]]
        kind, failed, value, same = numbers[:4]
        return cls(kind, failed, value, same, b"".join(halves).rstrip(b"\0").decode(errors="ignore"))


def digest64(value: object) -> int:
    """64 bits of a digest of a value's `repr`."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


def differences(told: Sequence[Sequence[tuple[str, int]]]) -> dict[int, str]:
    """Cause by rank: the values, each with its digest, in which a rank differs from rank 0."""
    first = told[0]
    differing = {
        at
        for values in told
        for at in range(max(len(values), len(first)))
        if values[at : at + 1] != first[at : at + 1]
    }
    texts = [", ".join(text for at, (text, _) in enumerate(values) if at in differing) for values in told]
    odd = {rank: f"has {texts[rank]}" for rank, values in enumerate(told) if values != first}
    return {0: f"has {texts[0]}; all ranks must agree", **odd}
