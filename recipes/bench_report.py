"""What a benchmark run leaves behind: JSON lines as they come, a table, and the timeline of one sync."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from recipes.variants import Span


class Log:
    """Prints and appends each result as it comes, so that a run that is cut off has not been for nothing.

    Args:
        path: File for the JSON lines; None (ranks other than 0) says and writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._began = time.monotonic()
        self.results: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        if self.path is not None:
            print(f"[{time.monotonic() - self._began:6.1f}] {text}", flush=True)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one JSON line."""
        if self.path is None:
            return
        line = {"kind": kind, **fields}
        if kind == "result":
            self.results.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as text, a row a variant; a variant whose weights came out wrong has no times."""
    head = [
        "case",
        "variant",
        "first",
        "median",
        "min",
        "max",
        "GB/s",
        "% copy",
        "x copy",
        "speed-up",
        "requests",
    ]
    head += ["trainer +MiB", "worker +MiB", "allocs", "stages (ms, median)", "weights"]
    rows = [head]
    for result in results:
        row = [str(result["case"]), str(result["variant"])]
        if "error" in result:
            rows.append([*row, *["–"] * (len(head) - 3), str(result["error"])[:160]])
            continue
        seconds = result["seconds"]
        row += [_ms(result["first_s"]), _ms(seconds["median"]), _ms(seconds["min"]), _ms(seconds["max"])]
        row += [f"{result['gb_per_s']:.1f}", f"{result['copy_percent']:.0f}", f"{result['times_copy']:.2f}"]
        row += [
            "–" if result.get("speed_up") is None else f"{result['speed_up']:.1f}",
            str(result["num_requests"]),
        ]
        row += [
            _mib(result.get("trainer_extra")),
            _mib(result.get("worker_extra")),
            str(result.get("allocations", "–")),
        ]
        row.append(" ".join(f"{name} {value * 1e3:.1f}" for name, value in result["stage_s"].items()) or "–")
        row.append(str(result["verdict"]))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def chrome_trace(spans: Sequence[Span], worker: Mapping[str, Any] | None, path: Path) -> None:
    """Write the stages of one sync as a trace that Perfetto and chrome://tracing open."""
    tracks = {name: number for number, name in enumerate(dict.fromkeys(span[0] for span in spans))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in tracks.items()
    ]
    for name, bucket, began, ended in spans:
        label = name if bucket < 0 else f"{name} {bucket}"
        event = {
            "ph": "X",
            "pid": 0,
            "tid": tracks[name],
            "name": label,
            "ts": began * 1e6,
            "dur": (ended - began) * 1e6,
        }
        events.append(event)
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"worker": dict(worker or {})}}))


def timeline_png(spans: Sequence[Span], title: str, path: Path) -> bool:
    """Draw the stages of one sync, a bar a stage and bucket. False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(span[0] for span in spans))
    figure, axes = pyplot.subplots(figsize=(12, 0.5 * len(names) + 1.5))
    for name, bucket, began, ended in spans:
        row = names.index(name)
        axes.barh(
            row,
            (ended - began) * 1e3,
            left=began * 1e3,
            color=f"C{bucket % 10 if bucket >= 0 else row}",
            alpha=0.8,
        )
        if bucket >= 0 and ended - began > 0.02 * spans[-1][3]:
            axes.text((began + ended) * 500, row, str(bucket), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the sync began")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _mib(nbytes: float | None) -> str:
    return "–" if nbytes is None else f"{nbytes / 2**20:.1f}"
