"""What one sync did and where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """What one `send` did, as this rank saw it.

    Attributes:
        version: The version that was asked for, or None; vLLM publishes it from release 0.27 on.
        sync: Number of the sync, from 1.
        backend: `"fsdp_ipc"` or `"ipc"`.
        bytes: Bytes that every worker was given to read.
        num_tensors: Checkpoint tensors sent.
        num_buckets: Buckets they were gathered in.
        resident_bytes: Of `bytes`, those read from the trainer's own memory without a copy.
        peer_bytes: Of `bytes` (or of their wider form in memory), those that lay in other ranks' memory; a worker that needs
            only slices of its tensors reads fewer.
        seconds: The whole of `send`.
        stage_s: Seconds by stage, as this rank spent them one after the other; what is in none of them is not listed.
        worker: What the worker on this rank's device reported, where it reports.
    """

    __module__ = "fsdp_ipc"

    version: str | None
    sync: int
    backend: str
    bytes: int
    num_tensors: int
    num_buckets: int
    resident_bytes: int
    peer_bytes: int
    seconds: float
    stage_s: dict[str, float] = field(default_factory=dict)
    worker: dict[str, Any] | None = None

    @property
    def gb_per_s(self) -> float:
        """Bytes over the whole time, in 1e9 bytes a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain dict for a line of JSON."""
        return {**asdict(self), "gb_per_s": self.gb_per_s}


class StageTimer:
    """Seconds by stage of one sync, with the begin of every span for a timeline."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.stage_s: dict[str, float] = {}
        self.spans: list[tuple[str, int, float, float]] = []
        self.on_gathered: Callable[[int], None] | None = None
        """Called with the bucket at the end of each `gather`; must not raise."""

    @contextmanager
    def stage(self, name: str, bucket: int = -1) -> Iterator[None]:
        """Add the time of the block to `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.stage_s[name] = self.stage_s.get(name, 0.0) + ended - began
            self.spans.append((name, bucket, began - self.began, ended - self.began))
        if self.on_gathered is not None and name == "gather" and bucket >= 0:
            self.on_gathered(bucket)

    def seconds(self) -> float:
        """Seconds since the sync began."""
        return time.perf_counter() - self.began
