"""A bar for syncs that take long enough to be watched."""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any

from fsdp_ipc.callbacks.base import Sync, SyncCallback
from fsdp_ipc.stats import TransferStats


class SyncProgress(SyncCallback):
    """Shows a bar of buckets for a sync that takes longer than `after_s`, on the sender rank.

    Only on a terminal and where rich is installed; nothing is shown otherwise.

    Args:
        after_s: Seconds after which the bar appears; it goes when the sync ends.
        progress: A `rich.progress.Progress` that is shown already and gets the bar as a further task: a terminal has
            room for one. None makes one on standard error.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, *, after_s: float = 1.0, progress: Any = None) -> None:
        self._after_s = after_s
        self._given = progress
        self._can_show = importlib.util.find_spec("rich") is not None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._progress: Any = None
        self._task: Any = None
        self._done, self._total = 0, 0

    def on_sync_start(self, sync: Sync) -> None:
        """Sender: wait for the time to show."""
        if not sync.is_sender or not self._can_show or not self._on_terminal():
            return
        self._done = self._total = 0
        self._timer = threading.Timer(self._after_s, self._show, (sync,))
        self._timer.daemon = True
        self._timer.start()

    def on_bucket(self, sync: Sync, bucket: int, num_buckets: int) -> None:
        """Sender: one bucket more."""
        del sync
        self._done, self._total = bucket + 1, num_buckets
        with self._lock:
            if self._progress is not None:
                self._progress.update(self._task, completed=self._done, total=self._total)

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Sender: take the bar away."""
        del sync, stats
        self._hide()

    def on_sync_error(self, sync: Sync, error: BaseException) -> None:
        """Sender: take the bar away."""
        del sync, error
        self._hide()

    def close(self) -> None:
        """Take away what is left."""
        self._hide()

    def _on_terminal(self) -> bool:
        if self._given is not None:
            return bool(self._given.console.is_terminal)
        return sys.stderr.isatty()

    def _show(self, sync: Sync) -> None:
        with self._lock:
            if self._timer is None:
                return  # hidden before it was shown
            progress = self._given
            if progress is None:
                progress = _bar()
                progress.start()
            name = "weights" if sync.version is None else f"weights {sync.version}"
            self._task = progress.add_task(name, total=self._total or None, completed=self._done)
            self._progress = progress

    def _hide(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
            progress, self._progress = self._progress, None
        if timer is not None:
            timer.cancel()
        if progress is not None:
            progress.remove_task(self._task)
            if progress is not self._given:
                progress.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    return Progress(
        *columns, TextColumn("buckets"), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    )
