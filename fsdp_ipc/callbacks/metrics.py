"""What a sync took, in a file of JSON lines or in an experiment tracker."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_ipc.callbacks.base import Sync, SyncCallback
from fsdp_ipc.group import describe
from fsdp_ipc.stats import TransferStats


class MetricsFile(SyncCallback):
    """Appends one JSON object a sync to a file: `TransferStats.to_json()`, the timeline, or the error.

    Args:
        path: The file; folders above it are made. With `{rank}` in it every rank writes a file of its own, otherwise
            the sender alone does.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._every_rank = "{rank}" in self._path

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Append what was done."""
        self._write(sync, stats.to_json())

    def on_sync_error(self, sync: Sync, error: BaseException) -> None:
        """Append what went wrong."""
        facts = {"sync": sync.number, "version": sync.version, "seconds": sync.seconds}
        self._write(sync, {**facts, "error": describe(error)})

    def _write(self, sync: Sync, facts: Mapping[str, Any]) -> None:
        if not (self._every_rank or sync.is_sender):
            return
        line = {"time": sync.began_ns / 1e9, "rank": sync.rank, **facts, "spans": sync.spans}
        path = Path(self._path.replace("{rank}", str(sync.rank)))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened for each line: a job that is killed leaves whole lines, and a moved file is made anew.
        with path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


class _Tracker(SyncCallback):
    """An experiment tracker, which the sender rank tells of each sync as named numbers."""

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Sender: log."""
        if sync.is_sender:
            self._log(sync, scalars(stats))

    def on_sync_error(self, sync: Sync, error: BaseException) -> None:
        """Sender: count."""
        del error
        if sync.is_sender:
            self._log(sync, {"sync/failed": 1.0})

    def _log(self, sync: Sync, values: Mapping[str, float]) -> None:
        raise NotImplementedError


class TensorBoard(_Tracker):
    """Writes the seconds, bytes and stages of each sync for TensorBoard, on the sender rank; needs tensorboard.

    Args:
        log: Folder of the events, or a `SummaryWriter` of yours, which then stays yours to close.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, log: str | os.PathLike[str] | Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs its package: pip install tensorboard") from error
        make: Any = SummaryWriter
        self._make = None if hasattr(log, "add_scalar") else lambda: make(os.fspath(log))
        self._writer: Any = None if self._make is not None else log

    def close(self) -> None:
        """Close the writer if it was made here."""
        if self._make is not None and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log(self, sync: Sync, values: Mapping[str, float]) -> None:
        if self._writer is None and self._make is not None:
            self._writer = self._make()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step_of(sync))
        self._writer.flush()


class WandB(_Tracker):
    """Adds each sync to a run of Weights & Biases, on the sender rank; needs wandb.

    Args:
        run: The run; None takes the one that is active when a sync ends.
        commit: Whether a sync ends a step of the run. False puts its values beside those that the loop logs next, and
            leaves the counting of steps to the loop.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, run: Any = None, *, commit: bool = False) -> None:
        self._run, self._commit = run, commit

    def _log(self, sync: Sync, values: Mapping[str, float]) -> None:
        run = self._run
        if run is None:
            import wandb

            run = wandb.run
        if run is None:
            raise RuntimeError("no active run: call wandb.init() on the sender rank, or pass WandB(run)")
        run.log({**values, "sync/step": step_of(sync)}, commit=self._commit)


class MLflow(_Tracker):
    """Logs each sync as metrics of an MLflow run, on the sender rank; needs mlflow or mlflow-skinny.

    Args:
        run_id: The run; None takes the active one, and begins one where there is none.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, run_id: str | None = None) -> None:
        self._run_id = run_id

    def _log(self, sync: Sync, values: Mapping[str, float]) -> None:
        import mlflow

        mlflow.log_metrics(dict(values), step=step_of(sync), run_id=self._run_id)


def scalars(stats: TransferStats) -> dict[str, float]:
    """A sync as named numbers for a tracker."""
    return {
        "sync/seconds": stats.seconds,
        "sync/bytes": float(stats.bytes),
        "sync/gb_per_s": stats.gb_per_s,
        "sync/buckets": float(stats.num_buckets),
        **{f"sync/stage/{name}_s": value for name, value in stats.stage_s.items()},
    }


def step_of(sync: Sync) -> int:
    """The version where it is a number (a training step), else the number of the sync."""
    version = sync.version or ""
    return int(version) if version.isdecimal() else sync.number
