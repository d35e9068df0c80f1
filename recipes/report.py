"""What the demo shows, on one rank: the progress bar, text before and after, the table, the line for machines."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from fsdp_ipc import SyncCallback, TransferStats
from fsdp_ipc.callbacks import MetricsFile, SyncProgress
from recipes.config import JobConfig, settings_in_use
from recipes.report_data import SYNCS, Said, record_run, with_other
from recipes.report_html import write_report


@dataclass(frozen=True)
class Push:
    """One push, as told by the sender, and what the server then said.

    Attributes:
        version: The version that the server publishes.
        num_bytes: Bytes on the wire.
        num_tensors: Tensors sent.
        num_buckets: Staging buckets used.
        seconds: From `send` to its return.
        stage_s: Seconds by stage.
        loss: Loss of the step before.
        text: The server's completion; None if it was not asked.
        recited: Leading characters of the completion that are those of the text.
    """

    version: str
    num_bytes: int
    num_tensors: int
    num_buckets: int
    seconds: float
    stage_s: Mapping[str, float]
    loss: float
    text: str | None = None
    recited: int = 0

    @classmethod
    def of(
        cls, stats: TransferStats, *, loss: float = math.nan, text: str | None = None, expected: str = ""
    ) -> Self:
        """Tell of a sync.

        Args:
            stats: What `send` returned.
            loss: Loss of the step before, where there is one.
            text: The server's completion; None if it was not asked.
            expected: What a model that knows the text says.
        """
        return cls(
            version=str(stats.version),
            num_bytes=stats.bytes,
            num_tensors=stats.num_tensors,
            num_buckets=stats.num_buckets,
            seconds=stats.seconds,
            stage_s=dict(stats.stage_s),
            loss=loss,
            text=text,
            recited=matching_prefix(text or "", expected),
        )

    @property
    def loss_text(self) -> str:
        """The loss for people."""
        return "–" if math.isnan(self.loss) else f"{self.loss:.3f}"

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9 bytes) a second over the whole push."""
        return self.num_bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Report:
    """Shows the job's course on standard error and its results on standard output.

    Ranks other than 0 have one too, which is silent, so that the loop need not ask.

    Args:
        steps: Steps of the whole job.
        active: Whether this rank shows anything.
        prompt: What the server is asked to continue.
        before: The server's completion before the first push; None if it was not asked.
        expected: What a model that knows the text says.
        pushes: All pushes so far.
        said: What the server made of several prompts; empty: of `prompt`, as `before` and the pushes have it.
        machine: Standard output has the line of JSON and nothing else; the tables go to standard error.
    """

    steps: int
    active: bool
    prompt: str = ""
    before: str | None = None
    expected: str | None = None
    pushes: list[Push] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    machine: bool = False

    def __post_init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = self.active and self._console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Words(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task: TaskID = self._progress.add_task("train", total=self.steps, loss="–", sync="–", note="")
        self._noted_at = 0.0

    def callbacks(self, out: Path | None = None) -> list[SyncCallback]:
        """For the job's sender, on every rank: a bar for syncs longer than a second, and the file of the timeline.

        Args:
            out: The run directory; None leaves out the file.
        """
        files: list[SyncCallback] = [] if out is None else [MetricsFile(out / SYNCS)]
        return [SyncProgress(progress=self._progress), *files]

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Show one line above the bar."""
        if self.active:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, loss: float) -> None:
        """Show that a step is done."""
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}")

    def waiting(self, seconds: float, line: str) -> None:
        """Show what the job waits for; where nothing is live, a line every 15 s."""
        words = re.sub(r"^.*?\] ", "", line)  # without the log's time and place
        note = f"server starts, {seconds:.0f} s: {words[:70]}"
        self._progress.update(self._task, note=note)
        if self.active and not self._live and time.monotonic() - self._noted_at > 15:
            self._noted_at = time.monotonic()
            self.say(note)

    def ready(self, seconds: float) -> None:
        """Show that the server answers."""
        self._progress.update(self._task, note="")
        self.say(f"server ready after {seconds:.0f} s")

    def pushed(self, push: Push) -> None:
        """Show a push, and the server's text before the first one and after this one, side by side."""
        self.pushes.append(push)
        self._progress.update(self._task, sync=f"{push.seconds * 1e3:.0f} ms")
        self.say(
            f"pushed version {push.version}: {push.num_bytes:,} bytes in {push.seconds * 1e3:.0f} ms"
            + ("" if math.isnan(push.loss) else f", loss {push.loss_text}")
        )
        if push.text is None or not self.active:
            return
        if len(self.pushes) > 1 and push.text == self.pushes[-2].text and push.version != str(self.steps):
            self.say(f"  the server's text is the same: {push.recited} characters right")
            return
        table = Table(title=f"the server continues {self.prompt!r}", title_justify="left", expand=True)
        table.add_column("before the first push", ratio=1, overflow="fold")
        table.add_column(
            f"after version {push.version}: {push.recited} characters right", ratio=1, overflow="fold"
        )
        right, wrong = push.text[: push.recited].lstrip("\n"), push.text[push.recited :]
        table.add_row(Text(printable(self.before or "")), Text(right, "green") + Text(printable(wrong)))
        self._console.print(table)

    def finish(
        self, more: Mapping[str, Any], *, out: Path | None = None, title: str = "", config: Any = None
    ) -> None:
        """Print the table of all pushes, and one JSON line with the same as the last line of standard output.

        Args:
            more: Further facts for the JSON line.
            out: The run directory, which gets a `report.html` and its pictures; None writes none.
            title: The report's heading.
            config: The settings, for the report.
        """
        if not self.active:
            return
        self._progress.stop()
        people = self._console if self.machine else Console(file=sys.stdout)
        people.print(summary(self.pushes))
        people.print(stages(self.pushes))
        written = {}
        if out is not None:
            settings = settings_in_use(config) if isinstance(config, JobConfig) else config
            try:
                record_run(out, title=title, config=settings, said=self.said or self._said())
                path = write_report(out)
                written["report"] = str(path)
                self.say(f"report: {path}")
            except Exception as error:  # noqa: BLE001  the job itself went well
                self.say(f"no report: {type(error).__name__}: {error}")
        told = self._told()
        print(json.dumps({**more, **written, **told, "pushes": _lines(self.pushes)}), flush=True)

    def _said(self) -> list[Said]:
        asked = [push.text for push in self.pushes if push.text is not None]
        return (
            [Said(prompt=self.prompt, before=self.before, after=asked[-1])]
            if self.before is not None and asked
            else []
        )

    def _told(self) -> dict[str, Any]:
        """For the line of JSON: what the server said, where it was asked, and how much of the text it knows."""
        told: dict[str, Any] = {}
        if self.before is not None:
            told |= {"before": self.before, "after": self.pushes[-1].text if self.pushes else None}
            if self.expected:
                told["recited_chars"] = max((push.recited for push in self.pushes), default=0)
                told["expected_chars"] = len(self.expected)
        return told


class _Words(ProgressColumn):
    """What is to be said of the training; other bars beside it (a long sync) have less."""

    def render(self, task: Task) -> Text:
        """Text of a task."""
        if "loss" not in task.fields:
            return Text("buckets")
        words = Text(f"loss {task.fields['loss']}  last sync {task.fields['sync']} ")
        return words.append(task.fields["note"], "dim")


def _have_loss(pushes: Sequence[Push]) -> bool:
    """Whether the job trains: its pushes, but for the first perhaps, have a loss."""
    return any(not math.isnan(push.loss) for push in pushes)


def _lines(pushes: Sequence[Push]) -> list[dict[str, Any]]:
    """The pushes for machines."""
    has_loss = _have_loss(pushes)
    return [
        {
            "version": push.version,
            "bytes": push.num_bytes,
            "num_tensors": push.num_tensors,
            "num_buckets": push.num_buckets,
            "seconds": round(push.seconds, 6),
            "stage_s": {name: round(value, 6) for name, value in push.stage_s.items()},
            "gb_per_s": round(push.gb_per_s, 4),
            **({"loss": None if math.isnan(push.loss) else round(push.loss, 4)} if has_loss else {}),
        }
        for push in pushes
    ]


def summary(pushes: Sequence[Push]) -> Table:
    """Lay the pushes out as a table, a row a version."""
    table = Table(title="weight syncs")
    has_loss = _have_loss(pushes)
    for name in (
        "version",
        "bytes",
        "tensors",
        "buckets",
        "seconds",
        "GB/s",
        *(["loss"] if has_loss else []),
    ):
        table.add_column(name, justify="right")
    for push in pushes:
        counts = [f"{push.num_bytes:,}", str(push.num_tensors), str(push.num_buckets)]
        loss = [push.loss_text] if has_loss else []
        table.add_row(push.version, *counts, f"{push.seconds:.4f}", f"{push.gb_per_s:.3f}", *loss)
    return table


def stages(pushes: Sequence[Push]) -> Table:
    """Lay out where the time went: the first sync sets everything up, the later ones are told by their median."""
    table = Table(title="seconds by stage")
    table.add_column("stage")
    table.add_column("first sync", justify="right")
    table.add_column("later ones, median", justify="right")
    rows = [with_other(push.stage_s, push.seconds, "all") for push in pushes]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "all"]
    for name in [*names, "all"] if pushes else []:
        later = [row.get(name, 0.0) for row in rows[1:]]
        first = f"{rows[0].get(name, 0.0):.4f}"
        table.add_row(name, first, f"{statistics.median(later):.4f}" if later else "–")
    return table


def matching_prefix(text: str, expected: str) -> int:
    """Count the leading characters that two texts share."""
    return next(
        (index for index, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b),
        min(len(text), len(expected)),
    )


def printable(text: str) -> str:
    """Replace what would disturb a terminal: an untrained model may answer with any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
