"""Checks of single JSON values that came over the wire: the right type and range, or an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MAX_ROWS = 4_000_000
MAX_PARTS = 4_000_000
MAX_ENDPOINTS = 65_536
MAX_NAME = 1_024
MAX_TEXT = 65_536
MAX_DIMS = 16
MAX_BYTES = 1 << 50
MAX_SYNC = (1 << 32) - 1

_SESSION = re.compile(r"[0-9a-f]{32}")


def object_of(
    obj: object, where: str, *, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """An object with all required fields, and no other than these and the optional ones."""
    if not isinstance(obj, dict):
        raise ValueError(f"{where}: expected an object, got {shown(obj)}")
    if missing := [name for name in required if name not in obj]:
        raise ValueError(f"{where}: missing field(s) {', '.join(missing)}")
    if unknown := [shown(name) for name in obj if name not in required and name not in optional]:
        raise ValueError(f"{where}: unknown field(s) {', '.join(unknown[:8])}")
    return obj


def array_of(obj: object, where: str, limit: int) -> list[Any]:
    """An array of at most `limit` entries."""
    if not isinstance(obj, list):
        raise ValueError(f"{where}: expected an array, got {shown(obj)}")
    if len(obj) > limit:
        raise ValueError(f"{where}: expected at most {limit} entries, got {len(obj)}")
    return obj


def text_of(obj: object, where: str, limit: int) -> str:
    """Text of at most `limit` characters."""
    if not isinstance(obj, str) or len(obj) > limit:
        raise ValueError(f"{where}: expected text of at most {limit} characters, got {shown(obj)}")
    return obj


def integer_of(obj: object, where: str, low: int, high: int) -> int:
    """An integer from `low` to `high`."""
    # bool is an int to Python, but `true` is no count.
    if not isinstance(obj, int) or isinstance(obj, bool) or not low <= obj <= high:
        raise ValueError(f"{where}: expected an integer from {low} to {high}, got {shown(obj)}")
    return obj


def seconds_of(obj: object, where: str) -> float:
    """Seconds, more than 0."""
    if isinstance(obj, bool) or not isinstance(obj, int | float) or not 0 < obj <= 1e6:
        raise ValueError(f"{where}: expected seconds above 0 and up to 1e6, got {shown(obj)}")
    return float(obj)


def session_of(obj: object, where: str) -> str:
    """The name of a session."""
    if not isinstance(obj, str) or not _SESSION.fullmatch(obj):
        raise ValueError(f"{where}: expected 32 lower-case hex digits, got {shown(obj)}")
    return obj


def shown(obj: object) -> str:
    """A value as it may appear in an error: short, whatever was sent."""
    if isinstance(obj, dict | list):
        return f"{type(obj).__name__} of {len(obj)}"
    text = repr(obj) if not isinstance(obj, int) or abs(obj) < 1 << 64 else "a huge integer"
    return text if len(text) <= 80 else f"{text[:77]}..."


def names_text(names: Sequence[str], limit: int = 8) -> str:
    """A few names for an error message, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
