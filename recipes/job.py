"""What the recipes' jobs are made of: folder, model and sender of the settings, the stages' clock, the metrics file."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ipc import DTensorSource, TransferStats, WeightSender
from fsdp_ipc.callbacks import SyncCallback, TensorBoard
from fsdp_ipc.clients import WeightSyncClient
from fsdp_ipc.sender import Backend
from recipes.config import JobConfig
from recipes.mesh import Layout
from recipes.models import build_model, write_model_dir
from recipes.ranks import on_each_node

METRICS = "metrics.jsonl"


def model_dir_of(job: JobConfig, out: Path) -> Path:
    """One rank: the checkpoint's folder, or a new one below `out` with the configuration of the sizes."""
    return Path(job.model.path) if job.model.path is not None else write_model_dir(job.model, out / "model")


def model_dir_on_all(job: JobConfig, out: Path) -> Path:
    """All ranks, collective: `model_dir_of`, written once on each node."""
    return on_each_node(lambda: model_dir_of(job, out))[0]


def model_of(job: JobConfig, model_dir: Path, layout: Layout) -> nn.Module:
    """All ranks, collective: the model of the settings, laid out over the ranks."""
    return build_model(
        model_dir,
        layout,
        has_weights=job.model.path is not None,
        seed=job.train.seed,
        compute_dtype=getattr(torch, job.train.compute_dtype),
    )


def sender_of(
    job: JobConfig,
    model: nn.Module,
    client: WeightSyncClient,
    out: Path | None = None,
    callbacks: Sequence[SyncCallback] = (),
) -> WeightSender:
    """All ranks, collective: the sender that the settings describe.

    Args:
        job: The settings.
        model: The trainer's module.
        client: Drives the servers.
        out: The run directory, for what `logger` wants of every sync; None: nothing.
        callbacks: Further callbacks of the sender.
    """
    dtype = None if job.transfer.wire_dtype is None else getattr(torch, job.transfer.wire_dtype)
    loggers = [TensorBoard(out / "tensorboard")] if out is not None and job.logger.tensorboard else []
    return WeightSender(
        DTensorSource(model, dtype=dtype, keep=job.transfer.keep),
        client,
        # All ranks, whatever the model's meshes are; a model that is not sharded has none.
        group=dist.group.WORLD,
        backend=cast("Backend", job.transfer.backend),  # checked by `checks.check`
        packed=job.transfer.packed,
        bucket_bytes=None if job.transfer.bucket_mb is None else int(job.transfer.bucket_mb * 2**20),
        num_slots=job.transfer.num_slots,
        callbacks=[*callbacks, *loggers],
    )


def title_of(recipe: str, job: JobConfig) -> str:
    """The report's heading: the recipe, the model and the number of ranks."""
    name = Path(job.model.path).name if job.model.path is not None else "random weights"
    ranks = dist.get_world_size()
    return f"{recipe}: {name}, {ranks} rank{'s' if ranks > 1 else ''}"


class Stages:
    """Seconds of the stages of one step; those of the same name add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began


class Metrics:
    """One line of JSON a step in the run directory, on rank 0; nowhere on the others.

    Args:
        out: The run directory.
        active: Whether this rank writes.
    """

    def __init__(self, out: Path, *, active: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.path = out / METRICS
        self._stack = ExitStack()
        self._file = self._stack.enter_context(self.path.open("w")) if active else None

    def row(
        self, step: int, stages: Stages, stats: TransferStats | None = None, **values: float | str | None
    ) -> None:
        """Write a step.

        Args:
            step: Its number.
            stages: Its clock.
            stats: Of its push, if it had one.
            values: `loss`, `reward` and whatever else there is.
        """
        time_s = {name: round(seconds, 6) for name, seconds in stages.seconds.items()}
        row = {
            "step": step,
            **values,
            "time": {**time_s, "total": round(stages.total(), 6)},
            "sync": None if stats is None else stats.to_json(),
        }
        self.rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def stage_medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median seconds by stage, of the steps after the first, which sets everything up."""
    later = rows[1:] or rows
    names = dict.fromkeys(name for row in later for name in row["time"])
    return {name: statistics.median(row["time"].get(name, 0.0) for row in later) for name in names}
