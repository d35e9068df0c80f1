"""The handle itself: a name for memory that travels as plain JSON and is checked field by field on arrival.

Nothing is unpickled. A handle from the wire decides which file or GPU memory this process maps, so every field has a
type, a length and a range, and one that does not fit is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from fsdp_ipc import cuda_ipc, shm
from fsdp_ipc.cuda_ipc import CudaMemory

_MAX_BYTES = 1 << 46  # more than any device has; keeps sums of offsets and sizes far from overflow
_DEVICE = re.compile(r"[0-9A-Za-z_.:/-]{1,255}")
_REF_COUNTER = re.compile(rb"/torch_[0-9]{1,20}_[0-9]{1,20}(_[0-9]{1,20})?")


@dataclass(frozen=True, kw_only=True)
class ShmMemory:
    """A file in `/dev/shm`.

    Attributes:
        file: Name without a directory.
        file_bytes: Exact size of the file.
    """

    file: str
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class IpcHandle:
    """Names a run of bytes on one device for another process; JSON-safe.

    Attributes:
        device: Key of the device, as `device_key` gives it.
        nbytes: Bytes that may be read.
        offset: Where they start in `memory` (the file or the CUDA storage), in bytes.
        memory: The mapped whole.
    """

    device: str
    nbytes: int
    offset: int
    memory: ShmMemory | CudaMemory

    @property
    def kind(self) -> str:
        """The data plane: `"cuda"` or `"shm"`."""
        return "cuda" if isinstance(self.memory, CudaMemory) else "shm"

    def to_json(self) -> dict[str, Any]:
        """Return the handle as plain JSON; byte strings become base64."""
        common = {"kind": self.kind, "device": self.device, "nbytes": self.nbytes, "offset": self.offset}
        memory = self.memory
        if isinstance(memory, ShmMemory):
            return common | {"file": memory.file, "file_bytes": memory.file_bytes}
        return common | {
            "memory_handle": _to_base64(memory.memory_handle),
            "storage_bytes": memory.storage_bytes,
            "storage_offset": memory.storage_offset,
            "ref_counter": _to_base64(memory.ref_counter),
            "ref_counter_offset": memory.ref_counter_offset,
            "event": _to_base64(memory.event),
            "event_sync": memory.event_sync,
        }

    @classmethod
    def from_json(cls, obj: object) -> IpcHandle:
        """Read a handle that came over the wire, checking every field before anything is made of it.

        Raises:
            ValueError: A field is missing, unknown, or has the wrong type, length or range; the text names it.
        """
        fields = _Fields(obj)
        kind = fields.take("kind")
        memory: ShmMemory | CudaMemory
        if kind == "shm":
            memory = ShmMemory(
                file=fields.file_name("file"), file_bytes=fields.integer("file_bytes", 1, _MAX_BYTES)
            )
            whole = memory.file_bytes
        elif kind == "cuda":
            memory = CudaMemory(
                memory_handle=fields.memory_handle("memory_handle"),
                storage_bytes=fields.integer("storage_bytes", 1, _MAX_BYTES),
                storage_offset=fields.integer("storage_offset", 0, _MAX_BYTES),
                ref_counter=fields.ref_counter("ref_counter"),
                ref_counter_offset=fields.integer("ref_counter_offset", 0, cuda_ipc.REF_COUNTERS_IN_FILE - 1),
                event=fields.binary("event", cuda_ipc.EVENT_HANDLE_BYTES),
                event_sync=fields.boolean("event_sync"),
            )
            whole = memory.storage_bytes
        else:
            raise ValueError(f"handle field 'kind': expected 'cuda' or 'shm', got {kind!r}")
        offset = fields.integer("offset", 0, whole - 1)
        nbytes = fields.integer("nbytes", 1, whole - offset)
        device = fields.device("device")
        fields.finish()
        return cls(device=device, nbytes=nbytes, offset=offset, memory=memory)


class _Fields:
    """The fields of a handle on the wire, each taken once and checked; what is left over is an error."""

    def __init__(self, obj: object) -> None:
        if not isinstance(obj, dict):
            raise ValueError(f"expected a handle as a JSON object, got {type(obj).__name__}")
        self._left = dict(obj)

    def take(self, name: str) -> object:
        if name not in self._left:
            raise ValueError(f"handle field {name!r} is missing")
        return self._left.pop(name)

    def finish(self) -> None:
        if self._left:
            raise ValueError(f"unknown handle fields: {', '.join(sorted(map(str, self._left)))}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(
                f"handle field {name!r}: expected an integer from {low} to {high}, got {value!r:.80}"
            )
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise ValueError(f"handle field {name!r}: expected true or false, got {value!r:.80}")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self.take(name)
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise ValueError(f"handle field {name!r}: expected a string {pattern.pattern}, got {value!r:.80}")
        return value

    def device(self, name: str) -> str:
        return self.text(name, _DEVICE)

    def file_name(self, name: str) -> str:
        return self.text(name, shm.DATA_NAME)

    def binary(self, name: str, length: int | None = None) -> bytes:
        value = self.take(name)
        # 1,024 characters are several times what any field needs; nothing longer is decoded.
        if not isinstance(value, str) or len(value) > 1024:
            raise ValueError(f"handle field {name!r}: expected a base64 string, got {value!r:.80}")
        try:
            data = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"handle field {name!r}: expected a base64 string, got {value!r:.80}") from None
        if length is not None and len(data) != length:
            raise ValueError(f"handle field {name!r}: expected {length} bytes, got {len(data)}")
        return data

    def memory_handle(self, name: str) -> bytes:
        data = self.binary(name)
        if cuda_ipc.is_expandable(data):
            raise ValueError(
                f"handle field {name!r}: the memory lies in expandable segments; turn them off in the trainer"
            )
        if len(data) != cuda_ipc.MEMORY_HANDLE_BYTES or data[1:2] != b"c":
            raise ValueError(
                f"handle field {name!r}: expected {cuda_ipc.MEMORY_HANDLE_BYTES} bytes of type 'c', got {len(data)} "
                f"bytes of type {data[1:2]!r}; trainer and server need torch releases of one generation"
            )
        return data

    def ref_counter(self, name: str) -> bytes:
        # The consumer decrements a word in the file of this name, so no name but torch's own is let through.
        data = self.binary(name)
        if _REF_COUNTER.fullmatch(data) is None:
            raise ValueError(f"handle field {name!r}: expected {_REF_COUNTER.pattern!r}, got {data!r:.80}")
        return data


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
