"""The plan of a sync as it travels: every tensor, where it lies, and the chunks of those that lie in several places.

As everything in `payload`, it is checked field by field before any of it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fsdp_ipc.vllm_plugin.json_fields import (
    MAX_BYTES,
    MAX_DIMS,
    MAX_ENDPOINTS,
    MAX_NAME,
    MAX_PARTS,
    MAX_ROWS,
    array_of,
    integer_of,
    names_text,
    object_of,
    shown,
    text_of,
)

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
"""Wire dtypes by the name that travels, which is torch's name without the module."""

_CAST_FROM = frozenset({torch.float32})
_CAST_TO = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a tensor that one trainer rank holds.

    Attributes:
        device: Key of the rank's device.
        allocation: Of that rank.
        offset: First byte in it.
        nbytes: Number of bytes.
        distance: Ranks from this worker's own to that one, around the ring of those that hold chunks; 0 is its own.
    """

    device: str
    allocation: int
    offset: int
    nbytes: int
    distance: int


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Where one named tensor lies: allocation, byte offset, and the bucket with which it becomes complete.

    Its memory holds elements of dtype `held`: `dtype`, unless `cast_from` says that they are cast on the way. With
    `shards` its bytes are counted in a tensor of which each rank holds a chunk of `chunk_bytes`, whose first byte is at
    `base` of the allocation, or would be; `parts` are those bytes in order, once it is known which worker asks.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    allocation: int
    offset: int
    cast_from: torch.dtype | None = None
    shards: int = -1
    chunk_bytes: int = 0
    base: int = 0
    parts: tuple[Part, ...] = ()

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
    """Every tensor of a sync.

    `local` rows, by device key, are seen only by the worker on that device. `holders[n][key]` are the devices from which
    the worker on `key` reads chunk 0, 1, ... of rows with `shards == n`.
    """

    tensors: tuple[TensorRow, ...]
    num_buckets: int
    packed: bool
    local: Mapping[str, tuple[TensorRow, ...]] = field(default_factory=dict)
    holders: tuple[Mapping[str, tuple[str, ...]], ...] = ()

    @classmethod
    def from_json(cls, obj: object) -> Plan:
        """Check a decoded plan.

        Raises:
            ValueError: Naming the field or the tensor that is wrong.
        """
        optional = ("local", "holders")
        fields = object_of(obj, "plan", required=("tensors", "num_buckets", "packed"), optional=optional)
        num_buckets = integer_of(fields["num_buckets"], "plan.num_buckets", 1, MAX_ROWS)
        packed = fields["packed"]
        if not isinstance(packed, bool):
            raise ValueError(f"plan.packed: expected true or false, got {shown(packed)}")
        holders = _holders(fields.get("holders", []))
        tensors = _rows(fields["tensors"], "plan.tensors", num_buckets, len(holders))
        local: dict[str, tuple[TensorRow, ...]] = {}
        sections = fields.get("local") or {}
        if not isinstance(sections, dict) or len(sections) > MAX_ENDPOINTS:
            raise ValueError(f"plan.local: expected an object of device keys, got {shown(sections)}")
        for key, rows in sections.items():
            local[text_of(key, "plan.local", MAX_NAME)] = _rows(rows, f"plan.local[{key!r}]", num_buckets)
        return cls(tensors=tensors, num_buckets=num_buckets, packed=packed, local=local, holders=holders)

    def buckets_for(self, device_key: str) -> list[list[TensorRow]]:
        """The rows that the worker of `device_key` loads, by bucket, in the order of the plan.

        Raises:
            ValueError: A name comes twice for this worker, nothing comes at all, or tensors lie in too many parts.
        """
        buckets: list[list[TensorRow]] = [[] for _ in range(self.num_buckets)]
        seen: set[str] = set()
        twice: list[str] = []
        room = MAX_PARTS
        for row in (*self.tensors, *self.local.get(device_key, ())):
            if row.name in seen:
                twice.append(row.name)
            seen.add(row.name)
            if row.shards >= 0:
                row = self._resolved(row, device_key, room)
                room -= len(row.parts)
            buckets[row.bucket].append(row)
        if twice:
            raise ValueError(f"plan: sent more than once: {names_text(twice)}. Send each name exactly once.")
        if not seen:
            raise ValueError(f"plan: no tensor for this worker (device key {device_key!r})")
        return buckets

    def _resolved(self, row: TensorRow, device_key: str, room: int) -> TensorRow:
        """The row with its parts, of which there may be so many, as the worker of `device_key` reads them."""
        held = self.holders[row.shards].get(device_key)
        if held is None:
            raise ValueError(
                f"plan: who holds the chunks of {row.name!r} for device {device_key!r} is not said"
            )
        own = held.index(device_key) if device_key in held else 0
        first, end = row.offset, row.offset + row.nbytes
        if end > len(held) * row.chunk_bytes:
            raise ValueError(
                f"plan: tensor {row.name!r} needs bytes {first} to {end} of {len(held)} chunks of {row.chunk_bytes}"
            )
        num_parts = -(-end // row.chunk_bytes) - first // row.chunk_bytes if end > first else 0
        if num_parts > room:
            raise ValueError(
                f"plan: tensor {row.name!r} lies in {num_parts} chunks; with those before more than {MAX_PARTS} parts"
            )
        parts = []
        while first < end:
            chunk = first // row.chunk_bytes
            nbytes = min(end, (chunk + 1) * row.chunk_bytes) - first
            offset = row.base + first - chunk * row.chunk_bytes
            if offset < 0:
                raise ValueError(f"plan: tensor {row.name!r} begins at byte {offset} of its allocation")
            parts.append(Part(held[chunk], row.allocation, offset, nbytes, (chunk - own) % len(held)))
            first += nbytes
        return replace(row, parts=tuple(parts))


def check_bounds(
    buckets: Sequence[Sequence[TensorRow]], sizes: Mapping[str, Sequence[int]], own: str
) -> set[tuple[str, int]]:
    """Refuse a row that does not lie wholly inside the allocations that it names.

    Args:
        buckets: Rows, from `Plan.buckets_for`.
        sizes: By device key, the bytes of the allocations of the trainer rank there.
        own: Device key of this worker.

    Returns:
        The allocations, as device key and number, that the rows lie in.

    Raises:
        ValueError: Naming the tensor, what it needs and what the allocation has.
    """
    used = set()
    for rows in buckets:
        for row in rows:
            alone = Part(own, row.allocation, row.offset, row.nbytes, 0)
            for part in row.parts if row.shards >= 0 else (alone,):
                there = sizes.get(part.device, ())
                if part.allocation >= len(there):
                    raise ValueError(
                        f"plan: tensor {row.name!r} lies in allocation {part.allocation} of device {part.device}, but "
                        f"this worker was given {len(there)} of it"
                    )
                if part.offset + part.nbytes > there[part.allocation]:
                    raise ValueError(
                        f"plan: tensor {row.name!r} needs bytes {part.offset} to {part.offset + part.nbytes} of "
                        f"allocation {part.allocation} of device {part.device}, which has {there[part.allocation]}"
                    )
                used.add((part.device, part.allocation))
    return used


def _rows(obj: object, where: str, num_buckets: int, num_tables: int = 0) -> tuple[TensorRow, ...]:
    rows = []
    for index, row in enumerate(array_of(obj, where, MAX_ROWS)):
        at = f"{where}[{index}]"
        if not isinstance(row, list) or len(row) not in (6, 7, 10):
            raise ValueError(
                f"{at}: expected [name, dtype, shape, bucket, allocation, offset], perhaps the dtype in memory, and "
                f"perhaps the table, the bytes and the base of its chunks, got {shown(row)}"
            )
        name = text_of(row[0], f"{at}.name", MAX_NAME)
        if not name or not name.isprintable():
            raise ValueError(f"{at}.name: expected printable text, got {shown(row[0])}")
        at = f"{at} ({name})"
        dtype = DTYPES.get(row[1]) if isinstance(row[1], str) else None
        if dtype is None:
            raise ValueError(f"{at}.dtype: expected one of {', '.join(DTYPES)}, got {shown(row[1])}")
        shape = tuple(
            integer_of(dim, f"{at}.shape", 0, MAX_BYTES) for dim in array_of(row[2], f"{at}.shape", MAX_DIMS)
        )
        cast_from = None if len(row) == 6 or row[6:7] == [""] else _cast_from(row[6], dtype, at)
        held = dtype if cast_from is None else cast_from
        nbytes = held.itemsize
        for dim in shape:
            nbytes *= dim
            if nbytes > MAX_BYTES:
                raise ValueError(f"{at}.shape: {list(shape)} is more than {MAX_BYTES} bytes")
        offset = integer_of(row[5], f"{at}.offset", 0, MAX_BYTES)
        if offset % held.itemsize:
            raise ValueError(
                f"{at}.offset: {offset} is not a multiple of the {held.itemsize}-byte elements in memory"
            )
        shards, chunk_bytes, base = -1, 0, 0
        if len(row) == 10:
            if not num_tables:
                raise ValueError(f"{at}.shards: the plan has no table of holders")
            shards = integer_of(row[7], f"{at}.shards", 0, num_tables - 1)
            chunk_bytes = integer_of(row[8], f"{at}.chunk_bytes", 1, MAX_BYTES)
            base = integer_of(row[9], f"{at}.base", -MAX_BYTES, MAX_BYTES)
            for field_name, value in (("chunk_bytes", chunk_bytes), ("base", base)):
                if value % held.itemsize:
                    raise ValueError(f"{at}.{field_name}: {value} is not a multiple of {held.itemsize}")
        rows.append(
            TensorRow(
                name=name,
                dtype=dtype,
                shape=shape,
                bucket=integer_of(row[3], f"{at}.bucket", 0, num_buckets - 1),
                allocation=integer_of(row[4], f"{at}.allocation", 0, MAX_ROWS),
                offset=offset,
                cast_from=cast_from,
                shards=shards,
                chunk_bytes=chunk_bytes,
                base=base,
            )
        )
    return tuple(rows)


def _holders(obj: object) -> tuple[Mapping[str, tuple[str, ...]], ...]:
    tables = []
    for number, table in enumerate(array_of(obj, "plan.holders", MAX_ENDPOINTS)):
        where = f"plan.holders[{number}]"
        if not isinstance(table, dict) or len(table) > MAX_ENDPOINTS:
            raise ValueError(f"{where}: expected an object of device keys, got {shown(table)}")
        tables.append(
            {
                text_of(reader, where, MAX_NAME): tuple(
                    text_of(key, f"{where}[{reader!r}]", MAX_NAME)
                    for key in array_of(held, f"{where}[{reader!r}]", MAX_ENDPOINTS)
                )
                for reader, held in table.items()
            }
        )
    return tuple(tables)


def _cast_from(obj: object, dtype: torch.dtype, at: str) -> torch.dtype:
    """The dtype in memory of a tensor that is cast on arrival: from a wider floating dtype only."""
    held = DTYPES.get(obj) if isinstance(obj, str) else None
    if held not in _CAST_FROM or dtype not in _CAST_TO:
        raise ValueError(f"{at}.held: expected float32 to be cast to bfloat16 or float16, got {shown(obj)}")
    return held
