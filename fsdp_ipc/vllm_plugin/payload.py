"""What travels through vLLM's routes on the native wire, checked field by field before any of it is used.

Everything arrives as JSON from a peer that may be wrong, old or hostile. Nothing here opens, maps or reads memory;
a value that passes is of the right type, in range and, for tensors, inside the allocation that it names.
Reference: `init_info` and `update_info` of `wire.native`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_ipc.handles import IpcHandle

PROTOCOL = 1

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
    )
    if hasattr(torch, name)
}

_CAST_FROM = frozenset({torch.float32})
_CAST_TO = frozenset({torch.bfloat16, torch.float16})
"""Wire dtypes by the name that travels, which is torch's name without the module."""

MAX_ROWS = 4_000_000
MAX_ENDPOINTS = 65_536
MAX_NAME = 1_024
MAX_TEXT = 65_536
MAX_DIMS = 16
MAX_BYTES = 1 << 50
MAX_SYNC = (1 << 32) - 1

_SESSION = re.compile(r"[0-9a-f]{32}")
_CONTROL_FILE = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One trainer rank: the key of its device and the file name of its control block."""

    device: str
    control: str


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """The handshake: which session this is and which trainer ranks take part, in group order."""

    session: str
    token: str | None
    endpoints: tuple[Endpoint, ...]
    timeout_s: float

    @classmethod
    def from_json(cls, obj: object) -> InitInfo:
        """Check a decoded `init_info`.

        Raises:
            ValueError: Naming the field that is missing, unknown or out of range.
        """
        fields = _object(
            obj, "init_info", required=("protocol", "session", "endpoints", "timeout_s"), optional=("token",)
        )
        protocol = _integer(fields["protocol"], "init_info.protocol", 0, 1 << 31)
        if protocol != PROTOCOL:
            raise ValueError(
                f"init_info.protocol: this worker speaks {PROTOCOL}, the trainer {protocol}. "
                "Install the same fsdp_ipc version beside the trainer and beside vLLM."
            )
        rows = _array(fields["endpoints"], "init_info.endpoints", MAX_ENDPOINTS)
        if not rows:
            raise ValueError("init_info.endpoints: expected at least one trainer rank, got none")
        endpoints = []
        for index, row in enumerate(rows):
            where = f"init_info.endpoints[{index}]"
            entry = _object(row, where, required=("device", "control"))
            control = _text(entry["control"], f"{where}.control", MAX_NAME)
            # The name is joined to a directory later on, so it must not be able to leave it.
            if not _CONTROL_FILE.fullmatch(control) or control.startswith("."):
                raise ValueError(f"{where}.control: expected a plain file name, got {control!r}")
            endpoints.append(
                Endpoint(device=_text(entry["device"], f"{where}.device", MAX_NAME), control=control)
            )
        token = fields.get("token")
        return cls(
            session=_session(fields["session"], "init_info.session"),
            token=None if token is None else _text(token, "init_info.token", MAX_NAME),
            endpoints=tuple(endpoints),
            timeout_s=_seconds(fields["timeout_s"], "init_info.timeout_s"),
        )


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Where one named tensor lies: allocation, byte offset, and the bucket with which it becomes complete.

    Its memory holds elements of dtype `held`: `dtype`, unless `cast_from` says that they are cast on the way.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    allocation: int
    offset: int
    cast_from: torch.dtype | None = None

    @property
    def held(self) -> torch.dtype:
        """Dtype of the elements in memory."""
        return self.dtype if self.cast_from is None else self.cast_from

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor where it lies."""
        return math.prod(self.shape) * self.held.itemsize


@dataclass(frozen=True)
class Plan:
    """Every tensor of a sync. `local` rows, by device key, are seen only by the worker on that device."""

    tensors: tuple[TensorRow, ...]
    num_buckets: int
    packed: bool
    local: Mapping[str, tuple[TensorRow, ...]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, obj: object) -> Plan:
        """Check a decoded plan.

        Raises:
            ValueError: Naming the field or the tensor that is wrong.
        """
        fields = _object(obj, "plan", required=("tensors", "num_buckets", "packed"), optional=("local",))
        num_buckets = _integer(fields["num_buckets"], "plan.num_buckets", 1, MAX_ROWS)
        packed = fields["packed"]
        if not isinstance(packed, bool):
            raise ValueError(f"plan.packed: expected true or false, got {_shown(packed)}")
        tensors = _rows(fields["tensors"], "plan.tensors", num_buckets)
        local: dict[str, tuple[TensorRow, ...]] = {}
        sections = fields.get("local") or {}
        if not isinstance(sections, dict) or len(sections) > MAX_ENDPOINTS:
            raise ValueError(f"plan.local: expected an object of device keys, got {_shown(sections)}")
        for key, rows in sections.items():
            local[_text(key, "plan.local", MAX_NAME)] = _rows(rows, f"plan.local[{key!r}]", num_buckets)
        return cls(tensors=tensors, num_buckets=num_buckets, packed=packed, local=local)

    def buckets_for(self, device_key: str) -> list[list[TensorRow]]:
        """The rows that the worker of `device_key` loads, by bucket, in the order of the plan.

        Raises:
            ValueError: A name comes twice for this worker, or nothing comes at all.
        """
        buckets: list[list[TensorRow]] = [[] for _ in range(self.num_buckets)]
        seen: set[str] = set()
        twice: list[str] = []
        for row in (*self.tensors, *self.local.get(device_key, ())):
            if row.name in seen:
                twice.append(row.name)
            seen.add(row.name)
            buckets[row.bucket].append(row)
        if twice:
            raise ValueError(f"plan: sent more than once: {names_text(twice)}. Send each name exactly once.")
        if not seen:
            raise ValueError(f"plan: no tensor for this worker (device key {device_key!r})")
        return buckets


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """One sync. `plan` and `allocations` are None when the worker has them from an earlier sync.

    `digests` is None without verification; else the file of each device's trainer rank, or empty likewise.
    """

    session: str
    sync: int
    plan: Plan | None
    plan_digest: str
    allocations: Mapping[str, tuple[IpcHandle, ...]] | None
    epoch: int
    digests: Mapping[str, str] | None = None

    @classmethod
    def from_json(cls, obj: object) -> UpdateInfo:
        """Check a decoded `update_info`; the handles' own fields are checked by `IpcHandle.from_json`.

        Raises:
            ValueError: Naming the field that is missing, unknown or out of range.
        """
        required = ("session", "sync", "plan", "plan_digest", "allocations", "epoch")
        fields = _object(obj, "update_info", required=required, optional=("digests",))
        allocations: dict[str, tuple[IpcHandle, ...]] | None = None
        if fields["allocations"] is not None:
            sections = fields["allocations"]
            if not isinstance(sections, dict) or not sections or len(sections) > MAX_ENDPOINTS:
                raise ValueError(
                    f"update_info.allocations: expected an object of device keys, got {_shown(sections)}"
                )
            allocations = {
                _text(key, "update_info.allocations", MAX_NAME): tuple(
                    _handle(handle, f"update_info.allocations[{key!r}][{index}]", key)
                    for index, handle in enumerate(
                        _array(handles, f"update_info.allocations[{key!r}]", MAX_ROWS)
                    )
                )
                for key, handles in sections.items()
            }
        digest = _text(fields["plan_digest"], "update_info.plan_digest", MAX_NAME)
        if not digest:
            raise ValueError("update_info.plan_digest: expected a digest, got an empty string")
        return cls(
            session=_session(fields["session"], "update_info.session"),
            sync=_integer(fields["sync"], "update_info.sync", 1, MAX_SYNC),
            plan=None if fields["plan"] is None else Plan.from_json(fields["plan"]),
            plan_digest=digest,
            allocations=allocations,
            epoch=_integer(fields["epoch"], "update_info.epoch", 0, 1 << 53),
            digests=_digest_files(fields.get("digests")),
        )


@dataclass(frozen=True, kw_only=True)
class AbortInfo:
    """Drop the update that is open, if any."""

    session: str
    abort: str


def parse_update(obj: object) -> UpdateInfo | AbortInfo:
    """An `update_info` is a sync or, when it has the field `abort`, the end of one that failed.

    Raises:
        ValueError: Naming the field that is missing, unknown or out of range.
    """
    if isinstance(obj, dict) and "abort" in obj:
        fields = _object(obj, "update_info", required=("session", "abort"))
        return AbortInfo(
            session=_session(fields["session"], "update_info.session"),
            abort=_text(fields["abort"], "update_info.abort", MAX_TEXT),
        )
    return UpdateInfo.from_json(obj)


def check_bounds(buckets: Sequence[Sequence[TensorRow]], allocation_bytes: Sequence[int]) -> None:
    """Refuse a row that does not lie wholly inside the allocation that it names.

    Raises:
        ValueError: Naming the tensor, what it needs and what the allocation has.
    """
    for rows in buckets:
        for row in rows:
            if row.allocation >= len(allocation_bytes):
                raise ValueError(
                    f"plan: tensor {row.name!r} lies in allocation {row.allocation}, "
                    f"but this worker was given {len(allocation_bytes)}"
                )
            size = allocation_bytes[row.allocation]
            if row.offset + row.nbytes > size:
                raise ValueError(
                    f"plan: tensor {row.name!r} needs bytes {row.offset} to {row.offset + row.nbytes} of "
                    f"allocation {row.allocation}, which has {size}"
                )


def names_text(names: Sequence[str], limit: int = 8) -> str:
    """A few names for an error message, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _rows(obj: object, where: str, num_buckets: int) -> tuple[TensorRow, ...]:
    rows = []
    for index, row in enumerate(_array(obj, where, MAX_ROWS)):
        at = f"{where}[{index}]"
        if not isinstance(row, list) or len(row) not in (6, 7):
            raise ValueError(
                f"{at}: expected [name, dtype, shape, bucket, allocation, offset] and perhaps the dtype in memory, "
                f"got {_shown(row)}"
            )
        name = _text(row[0], f"{at}.name", MAX_NAME)
        if not name or not name.isprintable():
            raise ValueError(f"{at}.name: expected printable text, got {_shown(row[0])}")
        at = f"{at} ({name})"
        dtype = DTYPES.get(row[1]) if isinstance(row[1], str) else None
        if dtype is None:
            raise ValueError(f"{at}.dtype: expected one of {', '.join(DTYPES)}, got {_shown(row[1])}")
        shape = tuple(
            _integer(dim, f"{at}.shape", 0, MAX_BYTES) for dim in _array(row[2], f"{at}.shape", MAX_DIMS)
        )
        cast_from = None if len(row) == 6 else _cast_from(row[6], dtype, at)
        held = dtype if cast_from is None else cast_from
        nbytes = held.itemsize
        for dim in shape:
            nbytes *= dim
            if nbytes > MAX_BYTES:
                raise ValueError(f"{at}.shape: {list(shape)} is more than {MAX_BYTES} bytes")
        offset = _integer(row[5], f"{at}.offset", 0, MAX_BYTES)
        if offset % held.itemsize:
            raise ValueError(
                f"{at}.offset: {offset} is not a multiple of the {held.itemsize}-byte elements in memory"
            )
        rows.append(
            TensorRow(
                name=name,
                dtype=dtype,
                shape=shape,
                bucket=_integer(row[3], f"{at}.bucket", 0, num_buckets - 1),
                allocation=_integer(row[4], f"{at}.allocation", 0, MAX_ROWS),
                offset=offset,
                cast_from=cast_from,
            )
        )
    return tuple(rows)


def _digest_files(obj: object) -> Mapping[str, str] | None:
    if obj is None:
        return None
    if not isinstance(obj, dict) or len(obj) > MAX_ENDPOINTS:
        raise ValueError(f"update_info.digests: expected an object of device keys, got {_shown(obj)}")
    files: dict[str, str] = {}
    for key, name in obj.items():
        where = f"update_info.digests[{_shown(key)}]"
        files[_text(key, "update_info.digests", MAX_NAME)] = _text(name, where, MAX_NAME)
        if not _CONTROL_FILE.fullmatch(name) or name.startswith("."):
            raise ValueError(f"{where}: expected a plain file name, got {_shown(name)}")
    return files


def _cast_from(obj: object, dtype: torch.dtype, at: str) -> torch.dtype:
    """The dtype in memory of a tensor that is cast on arrival: from a wider floating dtype only."""
    held = DTYPES.get(obj) if isinstance(obj, str) else None
    if held not in _CAST_FROM or dtype not in _CAST_TO:
        raise ValueError(f"{at}.held: expected float32 to be cast to bfloat16 or float16, got {_shown(obj)}")
    return held


def _handle(obj: object, where: str, device: str) -> IpcHandle:
    if not isinstance(obj, dict):
        raise ValueError(f"{where}: expected a handle object, got {_shown(obj)}")
    try:
        handle = IpcHandle.from_json(obj)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    # Another rank signals when its memory may be read, so a handle under the wrong key must not pass unseen.
    if handle.device != device:
        raise ValueError(f"{where}: the handle is of device {_shown(handle.device)}, not of {_shown(device)}")
    return handle


def _object(
    obj: object, where: str, *, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    if not isinstance(obj, dict):
        raise ValueError(f"{where}: expected an object, got {_shown(obj)}")
    if missing := [name for name in required if name not in obj]:
        raise ValueError(f"{where}: missing field(s) {', '.join(missing)}")
    if unknown := [_shown(name) for name in obj if name not in required and name not in optional]:
        raise ValueError(f"{where}: unknown field(s) {', '.join(unknown[:8])}")
    return obj


def _array(obj: object, where: str, limit: int) -> list[Any]:
    if not isinstance(obj, list):
        raise ValueError(f"{where}: expected an array, got {_shown(obj)}")
    if len(obj) > limit:
        raise ValueError(f"{where}: expected at most {limit} entries, got {len(obj)}")
    return obj


def _text(obj: object, where: str, limit: int) -> str:
    if not isinstance(obj, str) or len(obj) > limit:
        raise ValueError(f"{where}: expected text of at most {limit} characters, got {_shown(obj)}")
    return obj


def _integer(obj: object, where: str, low: int, high: int) -> int:
    # bool is an int to Python, but `true` is no count.
    if not isinstance(obj, int) or isinstance(obj, bool) or not low <= obj <= high:
        raise ValueError(f"{where}: expected an integer from {low} to {high}, got {_shown(obj)}")
    return obj


def _seconds(obj: object, where: str) -> float:
    if isinstance(obj, bool) or not isinstance(obj, int | float) or not 0 < obj <= 1e6:
        raise ValueError(f"{where}: expected seconds above 0 and up to 1e6, got {_shown(obj)}")
    return float(obj)


def _session(obj: object, where: str) -> str:
    if not isinstance(obj, str) or not _SESSION.fullmatch(obj):
        raise ValueError(f"{where}: expected 32 lower-case hex digits, got {_shown(obj)}")
    return obj


def _shown(obj: object) -> str:
    """A value as it may appear in an error: short, whatever was sent."""
    if isinstance(obj, dict | list):
        return f"{type(obj).__name__} of {len(obj)}"
    text = repr(obj) if not isinstance(obj, int) or abs(obj) < 1 << 64 else "a huge integer"
    return text if len(text) <= 80 else f"{text[:77]}..."
