"""Where everything lies in a control block (`control`): the words of each side, and the texts behind them."""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = 0x66736470_69706302  # "fsdpipc" and the version of this layout
HEADER_BYTES = 4096
MAX_TEXT_BYTES = 64 << 10
MAX_REPORT_BYTES = 1 << 20
MAX_U32 = (1 << 32) - 1
REPORT = 2  # word: length of the report, 0 while there is none


@dataclass(frozen=True)
class Side:
    """Where one side keeps its words (8-byte indices) and the text of its failure (byte offset)."""

    name: str
    first_word: int
    text_offset: int

    @property
    def progress(self) -> int:
        """Word `sync << 32 | count`."""
        return self.first_word

    @property
    def failed(self) -> int:
        """Word `sync << 32 | bytes of the text`, 0 without a failure."""
        return self.first_word + 1

    @property
    def pid(self) -> int:
        """Word: process id, 0 while this side has not opened the block."""
        return self.first_word + 2

    @property
    def start_time(self) -> int:
        """Word: when the process began, which tells it from a later one with the same id."""
        return self.first_word + 3

    @property
    def namespace(self) -> int:
        """Word: the PID namespace in which the process id holds."""
        return self.first_word + 4

    @property
    def closed(self) -> int:
        """Word: 1 once this side has closed the block."""
        return self.first_word + 5

    @property
    def repeat(self) -> int:
        """Word `sync << 32 | what this side says`, of a sync that goes like the one before."""
        return self.first_word + 6


# Each side's words begin on a cache line of their own.
TRAINER = Side("trainer", 8, HEADER_BYTES)
WORKER = Side("worker", 16, HEADER_BYTES + MAX_TEXT_BYTES)
REPORT_OFFSET = HEADER_BYTES + 2 * MAX_TEXT_BYTES
FILE_BYTES = REPORT_OFFSET + MAX_REPORT_BYTES


def check_u32(what: str, value: int) -> None:
    """Refuse what does not fit 32 bits."""
    if type(value) is not int or not 0 <= value <= MAX_U32:
        raise ValueError(f"expected {what} as an integer from 0 to {MAX_U32}, got {value!r}")


def progress_word(sync: int, count: int) -> int:
    """A word that grows with the sync and, within it, with the count."""
    check_u32("sync", sync)
    check_u32("count", count)
    return sync << 32 | count


def spell(word: int) -> str:
    """A word as errors show it."""
    return f"bucket count {word & MAX_U32} of sync {word >> 32}"
