"""What one of the doctor's checks found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        level: `"ok"`, `"warn"` (may be meant, may be in the way) or `"fail"` (a sync cannot work).
        text: What was found, and what to do about it.
    """

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:>4}  {self.text}"
