"""Stand-ins for inference workers behind `tests.fake_server`: the stock `ipc` engine without CUDA, and adapters."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdp_ipc.wire.stock import DEVICE_INDEX_ARG, NUM_REBUILD_ARGS, StockDialect

UUIDS = tuple(f"{i:08x}-aaaa-bbbb-cccc-{i:012x}" for i in range(16))


class Worker(Protocol):
    """One inference worker behind the server; what it raises becomes the 500 answer's text."""

    def init(self, init_info: dict[str, Any]) -> None: ...

    def start(self) -> None: ...

    def update(self, update_info: dict[str, Any]) -> None: ...

    def finish(self) -> None: ...


class EngineWorker:
    """Adapts a vLLM-style worker engine (`init_transfer_engine`, `update_weights`, ...) to `Worker`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def init(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(dict(init_info)))

    def start(self) -> None:
        self.engine.start_weight_update()

    def update(self, update_info: dict[str, Any]) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(dict(update_info)))

    def finish(self) -> None:
        self.engine.finish_weight_update()


class AnyWorker:
    """Takes everything and remembers it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def init(self, init_info: dict[str, Any]) -> None:
        self.seen.append(("init", init_info))

    def start(self) -> None:
        self.seen.append(("start", None))

    def update(self, update_info: dict[str, Any]) -> None:
        self.seen.append(("update", update_info))

    def finish(self) -> None:
        self.seen.append(("finish", None))


@dataclass
class StockWorker:
    """The stock `ipc` engine of one release, without CUDA: every check that it makes, and some that it should make.

    Attributes:
        dialect: Release.
        uuid: The GPU that it runs on.
        read: Gives the exported bytes for the rebuild arguments, `uint8`; without it nothing is read.
        allow_insecure: `VLLM_ALLOW_INSECURE_SERIALIZATION`.
        weights: What the last finished sync delivered, if `read` is given.
        history: The same of every finished sync.
        names: Names of the running sync, in order of arrival.
        finished_names: Names of the last finished sync.
        violations: What a sender of ours must never do.
    """

    dialect: StockDialect
    uuid: str = UUIDS[0]
    read: Callable[[tuple[Any, ...]], torch.Tensor] | None = None
    allow_insecure: bool = True
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    history: list[dict[str, torch.Tensor]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    finished_names: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    num_opens: int = 0

    def __post_init__(self) -> None:
        self.packed = False
        self._open: tuple[Any, ...] | None = None
        self._released: set[tuple[Any, ...]] = set()
        self._views: dict[str, torch.Tensor] = {}

    def init(self, init_info: dict[str, Any]) -> None:
        allowed = {"packed"} if self.dialect.packed_at == "init" else set()
        if unknown := set(init_info) - allowed:
            raise ValueError(f"Invalid init_info for IPCWeightTransferEngine: unexpected {sorted(unknown)}")
        self.packed = bool(init_info.get("packed", False))

    def start(self) -> None:
        self.names, self._views = [], {}

    def update(self, update_info: dict[str, Any]) -> None:
        info = dict(update_info)
        allowed = {"names", "dtype_names", "shapes", "ipc_handles", "ipc_handles_pickled", "tensor_sizes"}
        if self.dialect.packed_at == "update":
            allowed.add("packed")
        if unknown := set(info) - allowed:
            raise ValueError(f"Invalid update_info for IPCWeightTransferEngine: unexpected {sorted(unknown)}")
        packed = bool(info.get("packed", False)) if self.dialect.packed_at == "update" else self.packed
        handles = self._handles(info)
        names, shapes = info["names"], info["shapes"]
        if not len(names) == len(shapes) == len(info["dtype_names"]):
            raise ValueError("names, dtype_names and shapes differ in length")
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        if twice := [name for i, name in enumerate(names) if name in (*self.names, *names[:i])]:
            self._violate(f"sent twice in one sync: {twice}")
        if packed:
            self._packed(info, handles, names, shapes, dtypes)
        else:
            self._unpacked(handles, names, shapes, dtypes)
        self.names += names

    def finish(self) -> None:
        # Tensors of an unpacked update are read when their layer is complete, at the latest now.
        self.weights = {name: view.clone() for name, view in self._views.items()}
        self.finished_names = self.names
        self.history.append(self.weights)
        self._close()

    def _handles(self, info: dict[str, Any]) -> Any:
        pickled = info.get("ipc_handles_pickled")
        if pickled is not None:
            if not self.allow_insecure:
                raise ValueError(
                    "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW_INSECURE_SERIALIZATION=1"
                )
            return pickle.loads(base64.b64decode(pickled))
        if info.get("ipc_handles") is None:
            raise ValueError("neither `ipc_handles` nor `ipc_handles_pickled`")
        return info["ipc_handles"]

    def _packed(self, info: Any, handles: Any, names: Any, shapes: Any, dtypes: Any) -> None:
        if info.get("tensor_sizes") is None:
            raise ValueError("`tensor_sizes` is required when packed=True")
        if not isinstance(handles, dict):
            raise AssertionError
        sizes = info["tensor_sizes"]
        args = self._own(handles)
        chunk = self._rebuild(args)
        offset = 0
        for name, shape, dtype, size in zip(names, shapes, dtypes, sizes, strict=True):
            if not shape and not self.dialect.packed_scalars:
                raise TypeError("view() received an invalid combination of arguments - got ()")
            if offset % dtype.itemsize:
                raise RuntimeError(
                    f"self.storage_offset() must be divisible by {dtype.itemsize} to view Byte as {dtype}, "
                    f"but got {offset}"
                )
            if size != math.prod(shape) * dtype.itemsize:
                raise RuntimeError(f"shape {shape} is invalid for input of size {size}: {name}")
            if chunk is not None:
                self._views[name] = chunk[offset : offset + size].clone().view(dtype).view(shape)
            offset += size
        if self.dialect.export_per_chunk:
            self._close()

    def _unpacked(self, handles: Any, names: Any, shapes: Any, dtypes: Any) -> None:
        if not isinstance(handles, list):
            raise AssertionError
        if len(handles) != len(names):
            raise ValueError("`ipc_handles` should be of the same size as `names`")
        for name, handle, shape, dtype in zip(names, handles, shapes, dtypes, strict=True):
            args = self._own(handle)
            self.num_opens += 1
            if self.read is not None:
                size = math.prod(shape) * dtype.itemsize
                self._views[name] = self.read(args)[:size].view(dtype).view(shape)

    def _own(self, handles: dict[str, Any]) -> tuple[Any, ...]:
        if self.uuid not in handles:
            raise ValueError(
                f"IPC handle not found for GPU UUID {self.uuid}. Available UUIDs: {list(handles.keys())}"
            )
        args = handles[self.uuid]
        if not isinstance(args, tuple) or len(args) != NUM_REBUILD_ARGS:
            raise TypeError(f"rebuild_cuda_tensor() takes {NUM_REBUILD_ARGS} arguments, got {args!r}")
        local = list(args)
        local[DEVICE_INDEX_ARG] = 0
        return tuple(local)

    def _rebuild(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        if self._open != args:
            self._close()
            if args in self._released:
                self._violate(
                    "an export was opened again after it was released: its memory leaks on the trainer"
                )
            self.num_opens += 1
            self._open = args
        return None if self.read is None else self.read(args)

    def _close(self) -> None:
        if self._open is not None:
            self._released.add(self._open)
        self._open = None

    def _violate(self, text: str) -> None:
        self.violations.append(text)


def fake_rebuild_args(
    handle: bytes, nbytes: int, *, serial: int = 0, device_index: int = 0
) -> tuple[Any, ...]:
    """Rebuild arguments in the shape of torch's, for exports that are none: a test's `read` finds `handle` at 7.

    Args:
        handle: Whatever tells `read` which bytes are meant.
        nbytes: Bytes of the export.
        serial: Different for each export, as the reference counter's offset is.
        device_index: Device of the exporter.
    """
    return (
        torch.Tensor,
        torch.Size([nbytes]),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device_index,
        handle,
        nbytes,
        0,
        False,
        b"counter",
        serial,
        b"event",
        True,
    )
