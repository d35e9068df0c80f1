"""Hydra under torchrun: every rank runs it, all name the same run directory, and only rank 0 writes to it."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from recipes.checks import check, check_here, check_length
from recipes.config import SCHEMAS, JobConfig, settings_in_use
from recipes.ranks import check_ranks, joined, own_device
from recipes.report_data import record_run
from recipes.tasks import check_data

_QUIET = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
_Job = TypeVar("_Job", bound=JobConfig)


def register_configs() -> None:
    """Tell Hydra the schemas and the `launched` resolver; call before `@hydra.main` runs."""
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=name, node=schema)
    if not OmegaConf.has_resolver("launched"):
        OmegaConf.register_new_resolver("launched", lambda: launch_time(), use_cache=True)  # noqa: PLW0108 - without its parameter


def load(cfg: DictConfig, kind: type[_Job]) -> _Job:
    """Turn Hydra's configuration into plain objects and check it: the first line of a recipe.

    Args:
        cfg: What Hydra composed.
        kind: The recipe's schema.

    Returns:
        The settings; no part of them is an OmegaConf object.

    Raises:
        ValueError: A value that cannot work, with what can.
        RuntimeError: A sweep under torchrun.
    """
    refuse_sweep()
    job = OmegaConf.to_object(cfg)
    assert isinstance(job, kind)
    check(job)
    # Relative paths mean the place where the job was started, whether or not Hydra changed directory since.
    if job.model.path is not None:
        job.model.path = to_absolute_path(job.model.path)
        if not (Path(job.model.path) / "config.json").is_file():
            raise ValueError(
                f"model.path={job.model.path!r} is not a checkpoint directory: no config.json in it"
            )
        check_length(job)
    if job.data.path is not None:
        job.data.path = to_absolute_path(job.data.path)
        check_data(job.data)
    return job


def start(
    cfg: DictConfig,
    kind: type[_Job],
    run: Callable[[_Job, torch.device, Path], None],
    *,
    refuse: Callable[[_Job], None] | None = None,
) -> None:
    """What a recipe does under `@hydra.main`, on every rank: settings, device, process group, then the job.

    Args:
        cfg: What Hydra composed.
        kind: The recipe's schema.
        run: The job: settings, this rank's device, run directory.
        refuse: Raises for settings that this recipe alone can't do.

    Raises:
        SystemExit: Settings that cannot work: the first rank of each node tells of them in one line.
        Exception: What the job raises; torchrun repeats it at the end of its own words, by way of `record`.
    """

    def settings() -> _Job:
        job = load(cfg, kind)
        if refuse is not None:
            refuse(job)
        check_ranks(job.launcher.ranks)
        check_here(job, has_gpu=torch.cuda.is_available())
        return job

    try:
        job = record(settings)()
    except (ValueError, RuntimeError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{HydraConfig.get().job.name}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    assert job is not None  # `record` alone says that it may be
    record(_run)(job, run)


def _run(job: _Job, run: Callable[[_Job, torch.device, Path], None]) -> None:
    device, out = own_device(job.launcher.device), run_dir()
    with joined(device, job.launcher.timeout_s + job.inference.start_timeout_s):
        if os.environ.get("RANK", "0") == "0" and (job.logger.metrics or job.logger.report):
            record_run(out, config=settings_in_use(job))
        run(job, device, out)


def refuse_sweep() -> None:
    """Raise for `--multirun` under torchrun, before any job of the sweep has done anything."""
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN and "RANK" in os.environ:
        raise RuntimeError(
            "--multirun under torchrun would run several jobs in one process group; start torchrun once for each "
            "setting instead, for example from a shell loop"
        )


def run_dir() -> Path:
    """The job's directory, the same on every rank of a node; only rank 0 writes to it."""
    return Path(HydraConfig.get().runtime.output_dir).resolve()


def quiet_other_ranks(argv: list[str] | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Make Hydra write no files and configure no logging on ranks other than 0, by overrides on `sys.argv`."""
    argv = sys.argv if argv is None else argv
    if environ.get("RANK", "0") != "0":
        argv += _QUIET


def launch_time(environ: Mapping[str, str] = os.environ) -> str:
    """Tell when the job was started, as a name for its directory: the same text on every rank.

    Ranks reach this line seconds apart, so under torchrun it is the start of torchrun itself. Where there is one torchrun
    a node, it is the rendezvous' id, which alone is the same in all of them.
    """
    now = datetime.datetime.now().astimezone()
    if int(environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        name = environ.get("TORCHELASTIC_RUN_ID", "none")
        if name == "none":
            name = f"{environ['MASTER_ADDR']}-{environ['MASTER_PORT']}"
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    if "TORCHELASTIC_RUN_ID" in environ:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        ticks_after_boot = int(fields[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        started = int(boot.split()[1]) + ticks_after_boot / os.sysconf("SC_CLK_TCK")
        now = datetime.datetime.fromtimestamp(started, tz=now.tzinfo)
    return now.strftime("%Y-%m-%d_%H-%M-%S")
