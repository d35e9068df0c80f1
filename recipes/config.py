"""Schemas of the recipes' settings, their checks, and how Hydra behaves under torchrun.

Every rank runs Hydra. All of them name the same run directory, and only rank 0 writes to it.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf

# Absolute, so that it is found however the recipe was started (by name, by path, or imported).
CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
_QUIET = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]


@dataclass(kw_only=True)
class ModelConfig:
    """Sizes of a Qwen3, or a checkpoint directory in their place.

    Attributes:
        path: Directory of a Hugging Face checkpoint, relative to where the job was started; None: the sizes.
            Sizes are read only without a path.
    """

    path: str | None = None
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 0
    tie_word_embeddings: bool = False


@dataclass(kw_only=True)
class TrainConfig:
    """The training loop.

    Attributes:
        steps: Optimizer steps.
        push_every: Steps between two pushes of the weights; the last step always pushes.
        lr: Peak learning rate, after `warmup_steps` and before the cosine decay.
        batch_size: Sequences a rank and step.
        seq_len: Tokens a sequence.
        compute_dtype: Dtype of forward and backward; the parameters are fp32.
    """

    steps: int = 200
    push_every: int = 25
    lr: float = 3.0e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    batch_size: int = 1
    seq_len: int = 512
    compute_dtype: str = "float32"
    seed: int = 0


@dataclass(kw_only=True)
class DataConfig:
    """What the model learns by heart.

    Attributes:
        path: Text file, relative to where the job was started; None: the Zen of Python.
        prompt: What the server is asked to continue; must be in the text to be of use.
        max_tokens: Tokens of a completion.
    """

    path: str | None = None
    prompt: str = "The Zen of Python, by Tim Peters"
    max_tokens: int = 190


@dataclass(kw_only=True)
class SyncConfig:
    """How the weights travel.

    Attributes:
        backend: Weight-transfer back end: auto, fsdp_ipc or ipc.
        wire_dtype: Dtype on the wire; None: that of each parameter.
        keep: Name patterns of parameters that keep their own dtype; None: the library's choice.
        packed: Pack tensors into staging buckets; False: one handle a tensor.
        bucket_mb: Size of a staging slot, in MiB; None: the largest tensor's, at least 1024.
        num_slots: Staging slots.
    """

    backend: str = "auto"
    wire_dtype: str | None = "bfloat16"
    keep: list[str] | None = None
    packed: bool = True
    bucket_mb: float | None = None
    num_slots: int = 2


@dataclass(kw_only=True)
class ServerConfig:
    """The vLLM server that the job starts, or the one that it finds.

    Attributes:
        url: Base URL of a running server; None: start one and stop it at the end.
        backend: Weight-transfer back end of the started server.
        devices: GPUs of the started server, as indices, UUIDs or nested lists; None: the trainer's.
        gpu_memory_utilization: Share of a GPU that the server takes; the trainer needs the rest.
        start_timeout_s: Seconds until a started server must be healthy.
        extra_args: Further arguments of the server's command line.
    """

    url: str | None = None
    backend: str = "fsdp_ipc"
    devices: Any = None
    dtype: str = "bfloat16"
    max_model_len: int = 1024
    gpu_memory_utilization: float = 0.4
    start_timeout_s: float = 600.0
    extra_args: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class JobConfig:
    """Everything that `recipes.train` is told.

    Attributes:
        complete: Whether to ask the server for completions; False measures the pushes alone.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    complete: bool = True


@dataclass(kw_only=True)
class RemoteJobConfig(JobConfig):
    """What `recipes.http_remote_trainer` is told.

    Attributes:
        prove: Compare the workers' parameters with the trainer's after each push. The server must be able to import
            `recipes` and be started with `--worker-extension-cls recipes.worker_extension.WorkerChecks`.
    """

    prove: bool = False


@dataclass(kw_only=True)
class RayJobConfig(JobConfig):
    """What `recipes.ray_one_gpu` is told.

    Attributes:
        ranks: Pairs of a vLLM actor and a trainer rank, one a GPU.
    """

    ranks: int = 1


def register_configs() -> None:
    """Tell Hydra the schemas and the `launched` resolver; call before `@hydra.main` runs."""
    store = ConfigStore.instance()
    store.store(name="job_schema", node=JobConfig)
    store.store(name="remote_schema", node=RemoteJobConfig)
    store.store(name="ray_schema", node=RayJobConfig)
    store.store(group="model", name="model_schema", node=ModelConfig)
    if not OmegaConf.has_resolver("launched"):
        OmegaConf.register_new_resolver("launched", lambda: launch_time(), use_cache=True)  # noqa: PLW0108 - without its parameter


def load(cfg: DictConfig) -> JobConfig:
    """Turn Hydra's configuration into plain objects and check it: the first line of a recipe.

    Args:
        cfg: What Hydra composed.

    Returns:
        The settings; no part of them is an OmegaConf object.

    Raises:
        ValueError: A value that cannot work, with what can.
        RuntimeError: A sweep under torchrun.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN and "RANK" in os.environ:
        raise RuntimeError(
            "--multirun under torchrun would run several jobs in one process group; start torchrun once for each "
            "setting instead, for example from a shell loop"
        )
    job = OmegaConf.to_object(cfg)
    assert isinstance(job, JobConfig)
    check(job)
    # Relative paths mean the place where the job was started, whether or not Hydra changed directory since.
    if job.model.path is not None:
        job.model.path = to_absolute_path(job.model.path)
        if not (Path(job.model.path) / "config.json").is_file():
            raise ValueError(
                f"model.path={job.model.path!r} is not a checkpoint directory: no config.json in it"
            )
    if job.data.path is not None:
        job.data.path = to_absolute_path(job.data.path)
    return job


def run_dir() -> Path:
    """The job's directory, the same on every rank of a node; only rank 0 writes to it."""
    return Path(HydraConfig.get().runtime.output_dir)


def check(job: JobConfig) -> None:
    """Refuse values that cannot work.

    Raises:
        ValueError: Names the setting, its value and what is allowed.
    """
    allowed: dict[str, tuple[object, Sequence[object]]] = {
        "sync.backend": (job.sync.backend, ("auto", "fsdp_ipc", "ipc")),
        "server.backend": (job.server.backend, ("fsdp_ipc", "ipc")),
        "sync.wire_dtype": (job.sync.wire_dtype, (None, "bfloat16", "float16", "float32")),
        "train.compute_dtype": (job.train.compute_dtype, ("bfloat16", "float32")),
    }
    for name, (value, choices) in allowed.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, choices))}")
    positive = {
        "train.steps": job.train.steps,
        "train.push_every": job.train.push_every,
        "train.batch_size": job.train.batch_size,
        "train.seq_len": job.train.seq_len,
        "train.lr": job.train.lr,
        "sync.bucket_mb": job.sync.bucket_mb,
        "sync.num_slots": job.sync.num_slots,
        "data.max_tokens": job.data.max_tokens,
        "server.start_timeout_s": job.server.start_timeout_s,
    }
    for name, number in positive.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name}={number!r}: must be greater than 0")
    if not 0 < job.server.gpu_memory_utilization < 1:
        value = job.server.gpu_memory_utilization
        raise ValueError(f"server.gpu_memory_utilization={value!r}: must lie between 0 and 1")
    if job.model.path is not None:
        return
    for name, size in vars(job.model).items():
        if isinstance(size, int) and not isinstance(size, bool) and size <= 0:
            raise ValueError(
                f"model.{name}={size}: choose sizes (model=tiny) or give a checkpoint (model.path=…)"
            )
    if job.model.num_attention_heads % job.model.num_key_value_heads:
        raise ValueError(
            f"model.num_attention_heads={job.model.num_attention_heads} must be a multiple of "
            f"model.num_key_value_heads={job.model.num_key_value_heads}"
        )


def quiet_other_ranks(argv: list[str] | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Make Hydra write no files and configure no logging on ranks other than 0, by overrides on `sys.argv`."""
    argv = sys.argv if argv is None else argv
    if environ.get("RANK", "0") != "0":
        argv += _QUIET


def launch_time(environ: Mapping[str, str] = os.environ) -> str:
    """Tell when the job was started, as a name for its directory: the same text on every rank of a node.

    Ranks reach this line seconds apart, so under torchrun it is the start of torchrun itself.
    """
    now = datetime.datetime.now().astimezone()
    if "TORCHELASTIC_RUN_ID" in environ:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        ticks_after_boot = int(fields[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        started = int(boot.split()[1]) + ticks_after_boot / os.sysconf("SC_CLK_TCK")
        now = datetime.datetime.fromtimestamp(started, tz=now.tzinfo)
    return now.strftime("%Y-%m-%d_%H-%M-%S")
