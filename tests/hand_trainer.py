"""A trainer written by hand against the native wire: what `WeightSender` does, on one process and without sharding.

It plays every trainer rank at once, so that the worker side can be tested by itself, and lets a test bend any field.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.handles import SharedBuffer, allocate, device_key

ALIGN = 256
CPU = torch.device("cpu")


class Routes(Protocol):
    """vLLM's four routes; each raises when the server refuses."""

    def init(self, init_info: dict[str, Any]) -> None: ...

    def start(self) -> None: ...

    def update(self, update_info: dict[str, Any]) -> None: ...

    def finish(self, version: str | None) -> None: ...


@dataclass
class Layout:
    """Rows of a plan, and for each the tensor whose bytes go there."""

    plan: dict[str, Any]
    tensors: list[torch.Tensor]
    allocation_bytes: list[int]
    slots: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()


def packed_layout(weights: Sequence[tuple[str, torch.Tensor]], *, num_buckets: int, slots: int = 2) -> Layout:
    """Spread the tensors over `num_buckets` buckets that take turns in `slots` allocations."""
    rows: list[list[Any]] = []
    sizes = [0] * num_buckets
    per_bucket = math.ceil(len(weights) / num_buckets)
    for index, (name, tensor) in enumerate(weights):
        bucket = index // per_bucket
        rows.append([name, str(tensor.dtype)[6:], list(tensor.shape), bucket, bucket % slots, sizes[bucket]])
        sizes[bucket] = -(-(sizes[bucket] + tensor.nbytes) // ALIGN) * ALIGN
    plan = {"tensors": rows, "num_buckets": num_buckets, "packed": True, "local": {}}
    size = max(ALIGN, *sizes)
    return Layout(plan, [tensor for _, tensor in weights], [size] * min(slots, num_buckets), slots)


def unpacked_layout(weights: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    """One allocation a tensor, one bucket, as when the trainer's own memory is exported."""
    rows = [
        [name, str(tensor.dtype)[6:], list(tensor.shape), 0, index, 0]
        for index, (name, tensor) in enumerate(weights)
    ]
    plan = {"tensors": rows, "num_buckets": 1, "packed": False, "local": {}}
    sizes = [max(1, tensor.nbytes) for _, tensor in weights]
    return Layout(plan, [tensor for _, tensor in weights], sizes, len(weights))


@dataclass
class HandTrainer:
    """All trainer ranks of one session. A context manager: leaving it frees memory and control blocks.

    Attributes:
        routes: Where requests go.
        num_ranks: Trainer ranks, one for each worker.
        timeout_s: For each wait at a control block.
        init_overrides: Fields of the handshake to replace.
        update_overrides: Fields of every update to replace.
        poison: Overwrite a slot as soon as the worker has given it back, and everything after the sync.
    """

    routes: Routes
    num_ranks: int = 1
    timeout_s: float = 60.0
    init_overrides: Mapping[str, Any] = field(default_factory=dict)
    update_overrides: dict[str, Any] = field(default_factory=dict)
    poison: bool = True
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    sync: int = 0

    def __post_init__(self) -> None:
        self.keys = [device_key(CPU, rank) for rank in range(self.num_ranks)]
        self.controls: list[ControlBlock] = []
        self.buffers: list[list[SharedBuffer]] = []
        self.known: str | None = None
        self.epoch = 0
        self.sizes: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for control in self.controls:
            control.close()
        self._free()

    def connect(self) -> list[dict[str, Any] | None]:
        """Handshake; returns what each worker said."""
        for control in self.controls:
            control.close()
        self.controls = [ControlBlock.create() for _ in range(self.num_ranks)]
        self.known, self.sync = None, 0
        self._free()
        endpoints = [
            {"device": key, "control": control.name}
            for key, control in zip(self.keys, self.controls, strict=True)
        ]
        info = {
            "protocol": 3,
            "session": self.session,
            "token": None,
            "endpoints": endpoints,
            "timeout_s": self.timeout_s,
        }
        self.routes.init({**info, **self.init_overrides})
        return [control.read_report() for control in self.controls]

    def send(
        self,
        layout: Layout,
        *,
        version: str | None = None,
        before_bucket: Callable[[int], object] | None = None,
        finish: bool = True,
        offered: bool = False,
        queue_finish: bool = False,
    ) -> list[dict[str, Any] | None]:
        """One sync; returns each worker's report. Raises what the server or a control block says.

        With `offered` the workers load it in start, and with `queue_finish` the finish is sent while they do.
        """
        self.sync += 1
        if offered:
            for control in self.controls:
                control.offer(self.sync)
        else:
            self.routes.start()
        update = None if offered else self._update_info(layout)
        failure: list[BaseException] = []

        def post() -> None:
            try:
                if update is None:
                    self.routes.start()
                else:
                    self.routes.update(update)
            except BaseException as error:  # handed to the caller below
                failure.append(error)

        thread = threading.Thread(target=post)
        thread.start()
        try:
            if offered:
                self._confirm()
            self._produce(layout, before_bucket, thread, failure)
            if queue_finish:
                self.routes.finish(version)
        except BaseException as error:
            for control in self.controls:
                control.fail(self.sync, f"trainer: {error}")
            thread.join()
            # The server's own text says more than that the worker failed.
            if failure:
                raise failure[0] from error
            raise
        thread.join()
        if failure:
            raise failure[0]
        self.known = layout.digest
        if finish and not queue_finish:
            self.routes.finish(version)
        if self.poison:
            self._poison_all()
        return [control.read_report() for control in self.controls]

    def _update_info(self, layout: Layout) -> dict[str, Any]:
        allocations: dict[str, Any] | None = None
        if self.sizes != layout.allocation_bytes:
            self._free()
            self.epoch += 1
            self.sizes = layout.allocation_bytes
            self.buffers = [[allocate(size, CPU, key=key) for size in self.sizes] for key in self.keys]
            allocations = {
                key: [buffer.handle.to_json() for buffer in buffers]
                for key, buffers in zip(self.keys, self.buffers, strict=True)
            }
        info = {
            "session": self.session,
            "sync": self.sync,
            "plan": None if self.known == layout.digest else layout.plan,
            "plan_digest": layout.digest,
            "allocations": allocations,
            "epoch": self.epoch,
        }
        return {**info, **self.update_overrides}

    def _produce(
        self,
        layout: Layout,
        before_bucket: Callable[[int], object] | None,
        thread: threading.Thread,
        failure: list[BaseException],
    ) -> None:
        for bucket in range(layout.plan["num_buckets"]):
            if before_bucket is not None:
                before_bucket(bucket)
            for control, buffers in zip(self.controls, self.buffers, strict=True):
                if bucket >= layout.slots:
                    self._wait(control, bucket - layout.slots + 1, thread, failure)
                    if self.poison:
                        buffers[bucket % layout.slots].bytes.fill_(0xFF)
                for row, tensor in zip(layout.plan["tensors"], layout.tensors, strict=True):
                    if row[3] == bucket:
                        flat = tensor.contiguous().view(-1).view(torch.uint8)
                        buffers[row[4]].bytes[row[5] : row[5] + flat.numel()].copy_(flat)
                control.produce(self.sync, bucket + 1)

    def _confirm(self) -> None:
        for control in self.controls:
            if not control.wait_taken(self.sync, 20):
                raise RuntimeError(f"sync {self.sync} was not taken")
        for control in self.controls:
            control.confirm(self.sync)

    def _wait(
        self, control: ControlBlock, count: int, thread: threading.Thread, failure: list[BaseException]
    ) -> None:
        for _ in range(int(self.timeout_s / 0.25) + 1):
            try:
                control.wait_consumed(self.sync, count, 0.25)
                return
            except TimeoutError:
                # A refused request never consumes anything.
                if failure or not thread.is_alive():
                    raise
        raise TimeoutError(f"bucket {count} was not consumed within {self.timeout_s} s")

    def _poison_all(self) -> None:
        for buffers in self.buffers:
            for buffer in buffers:
                buffer.bytes.fill_(0xFF)

    def _free(self) -> None:
        for buffers in self.buffers:
            for buffer in buffers:
                buffer.close()
        self.buffers, self.sizes = [], []
