"""Refuses settings that cannot work, by their names, before a process or a group is there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from recipes.config import GrpoJobConfig, JobConfig, PushJobConfig, RemoteJobConfig, ServerConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TASKS = ("letters", "sums", "jsonl")
"""Kinds of data with a reward."""


def check(job: JobConfig) -> None:
    """Refuse names that no recipe knows and values that cannot work.

    Raises:
        ValueError: Names the setting, its value and what is allowed.
    """
    refuse_unknown(job)
    _one_of(
        {
            "transfer.backend": (job.transfer.backend, ("auto", "fsdp_ipc", "ipc")),
            "transfer.wire_dtype": (job.transfer.wire_dtype, (None, "bfloat16", "float16", "float32")),
            "train.compute_dtype": (job.train.compute_dtype, ("bfloat16", "float32")),
            "optim.name": (job.optim.name, ("adamw", "sgd")),
            "optim.schedule": (job.optim.schedule, ("cosine", "constant")),
            "data.kind": (job.data.kind, TASKS if isinstance(job, GrpoJobConfig) else ("text",)),
            "hook.sleep_level": (job.hook.sleep_level, (0, 1, 2)),
            "launcher.device": (job.launcher.device, ("auto", "cuda", "cpu")),
        }
    )
    _positive(
        {
            "train.steps": job.train.steps,
            "train.batch_size": job.train.batch_size,
            "train.seq_len": job.train.seq_len,
            "optim.lr": job.optim.lr,
            "optim.clip_norm": job.optim.clip_norm,
            "transfer.bucket_mb": job.transfer.bucket_mb,
            "transfer.num_slots": job.transfer.num_slots,
            "data.max_tokens": job.data.max_tokens,
            "hook.every": job.hook.every,
            "launcher.ranks": job.launcher.ranks,
            "launcher.timeout_s": job.launcher.timeout_s,
        }
    )
    if len(job.optim.betas) != 2 or not all(0 <= beta < 1 for beta in job.optim.betas):
        raise ValueError(f"optim.betas={job.optim.betas}: expected two numbers from 0 up to 1")
    if job.data.kind == "jsonl" and job.data.path is None:
        raise ValueError("data.path: data.kind=jsonl needs the path of a file")
    if job.logger.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "logger.tensorboard=True: the package tensorboard is not installed: pip install tensorboard"
        )
    _check_mesh(job)
    check_server(job.inference, "inference")
    if isinstance(job, GrpoJobConfig):
        _check_grpo(job)
    if job.model.path is None and isinstance(job, PushJobConfig | RemoteJobConfig):
        raise ValueError("model.path: this recipe needs the directory of a checkpoint")
    if job.model.path is None:
        _check_sizes(job)


def refuse_unknown(settings: Any, key: str = "") -> None:
    """Refuse what a `+` on the command line has added: Hydra takes it, and nothing would read it.

    Raises:
        ValueError: Names the setting and those that there are.
    """
    known = [entry.name for entry in fields(settings)]
    for name, value in vars(settings).items():
        if name not in known:
            raise ValueError(f"{key}{name}: no such setting; there are {', '.join(known)}")
        if is_dataclass(value):
            refuse_unknown(value, f"{key}{name}.")


def check_length(job: JobConfig) -> None:
    """Refuse a server of more positions than the checkpoint has, which would say so only after a minute.

    Raises:
        ValueError: Names the setting and the checkpoint's number.
    """
    if job.inference.url is not None or job.model.path is None:
        return
    config = json.loads((Path(job.model.path) / "config.json").read_text())
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and 0 < positions < job.inference.max_model_len:
        raise ValueError(
            f"inference.max_model_len={job.inference.max_model_len}: the checkpoint at model.path has {positions} positions "
            "(max_position_embeddings): say that number or less"
        )


def check_here(job: JobConfig, *, has_gpu: bool) -> None:
    """Refuse what this machine can't do, and a checkpoint that has nothing to push.

    Args:
        job: The settings.
        has_gpu: Whether a CUDA GPU can be seen.

    Raises:
        ValueError: Names the setting and what to say instead.
    """
    if job.launcher.device == "cuda" and not has_gpu:
        raise ValueError(
            "launcher.device='cuda': no CUDA GPU can be seen here; say launcher.device=cpu or auto"
        )
    if job.launcher.device == "cpu" or not has_gpu:
        for key, backend in (
            ("transfer.backend", job.transfer.backend),
            ("inference.backend", job.inference.backend),
        ):
            if backend == "ipc":
                raise ValueError(
                    f"{key}='ipc': vLLM's stock wire moves CUDA memory only, and this job runs on the CPU; say "
                    "transfer=packed inference=colocated"
                )
    if isinstance(job, PushJobConfig) and job.model.path is not None:
        folder = Path(job.model.path)
        if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt")):
            raise ValueError(
                f"model.path={job.model.path!r}: there are no weights in it, such as model.safetensors"
            )


def check_server(server: ServerConfig, key: str) -> None:
    """Refuse settings of a server that cannot work.

    Args:
        server: The settings.
        key: Where they are in the recipe's settings, for the message.

    Raises:
        ValueError: Names the setting, its value and what is allowed.
    """
    _one_of({f"{key}.backend": (server.backend, ("fsdp_ipc", "ipc"))})
    _positive(
        {
            f"{key}.start_timeout_s": server.start_timeout_s,
            f"{key}.replicas": server.replicas,
            f"{key}.tensor_parallel_size": server.tensor_parallel_size,
            f"{key}.max_model_len": server.max_model_len,
            f"{key}.max_num_seqs": server.max_num_seqs,
        }
    )
    if not 0 < server.gpu_memory_utilization < 1:
        value = server.gpu_memory_utilization
        raise ValueError(f"{key}.gpu_memory_utilization={value!r}: must lie between 0 and 1")
    if server.host not in LOOPBACK and not server.allow_remote:
        raise ValueError(
            f"{key}.host={server.host!r} can be reached from other machines, and whoever reaches it can change the "
            f"weights. Leave it at 127.0.0.1, or say {key}.allow_remote=true in a network that you trust"
        )
    if server.allow_remote and server.host not in LOOPBACK and server.backend == "ipc":
        raise ValueError(
            f"{key}.backend='ipc' unpickles what it is sent, so it runs on the loopback interface only: take "
            f"{key}.backend=fsdp_ipc for {key}.host={server.host!r}"
        )
    for url in urls_of(server):
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"{key}.url={url!r}: expected http://host:port of a running server, or a list")


def urls_of(server: ServerConfig) -> list[str]:
    """Base URLs of the servers that run already; none if the job starts its own."""
    if server.url is None:
        return []
    urls = (
        list(server.url)
        if isinstance(server.url, Sequence) and not isinstance(server.url, str)
        else [server.url]
    )
    return [str(url).rstrip("/") for url in urls]


def _one_of(allowed: dict[str, tuple[object, Sequence[object]]]) -> None:
    for name, (value, choices) in allowed.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, choices))}")


def _positive(numbers: dict[str, float | None]) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name}={number!r}: must be greater than 0")


def _check_mesh(job: JobConfig) -> None:
    axes = vars(job.mesh)
    for name, size in axes.items():
        if size < 1 and not (size == -1 and name in ("dp_replicate", "dp_shard", "ep")):
            raise ValueError(f"mesh.{name}={size}: expected 1 or more ranks, or -1 for those that are left")
    if [axes["dp_replicate"], axes["dp_shard"]].count(-1) > 1:
        raise ValueError("mesh: only one of dp_replicate and dp_shard can be -1")
    if job.mesh.ep != 1:
        if job.mesh.tp > 1 or job.mesh.dp_replicate != 1:
            raise ValueError(f"mesh.ep={job.mesh.ep}: goes with mesh.tp=1 and mesh.dp_replicate=1 only")
        if job.model.path is None and job.model.num_experts == 0:
            raise ValueError(
                f"mesh.ep={job.mesh.ep}: the model has no experts; choose model=tiny_moe, or mesh=fsdp"
            )


def _check_grpo(job: GrpoJobConfig) -> None:
    grpo = job.grpo
    _positive(
        {
            "grpo.prompts": grpo.prompts,
            "grpo.samples": grpo.samples,
            "grpo.temperature": grpo.temperature,
            "grpo.epochs": grpo.epochs,
            "grpo.clip_low": grpo.clip_low,
            "grpo.clip_high": grpo.clip_high,
        }
    )
    if job.hook.sleep_level == 2 and job.hook.every > 1:
        raise ValueError(
            f"hook.sleep_level=2 drops the server's weights, so every step must push them: hook.every={job.hook.every} "
            "cannot be; take hook.sleep_level=1"
        )
    if grpo.samples < 2:
        raise ValueError(f"grpo.samples={grpo.samples}: a group needs 2 completions or more to compare")
    if grpo.max_staleness < job.hook.every - 1:
        raise ValueError(
            f"grpo.max_staleness={grpo.max_staleness}: with hook.every={job.hook.every} rollouts are up to "
            f"{job.hook.every - 1} steps old; push more often or allow more"
        )


def _check_sizes(job: JobConfig) -> None:
    model = job.model
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    for name, size in vars(model).items():
        if name in experts and model.num_experts == 0:
            continue
        if isinstance(size, int) and not isinstance(size, bool) and size <= 0:
            raise ValueError(
                f"model.{name}={size}: choose sizes (model=tiny) or give a checkpoint (model.path=…)"
            )
    if model.vocab_size < 257:
        raise ValueError(f"model.vocab_size={model.vocab_size}: the byte tokenizer has 257 entries")
    if model.num_attention_heads % model.num_key_value_heads:
        raise ValueError(
            f"model.num_attention_heads={model.num_attention_heads} must be a multiple of "
            f"model.num_key_value_heads={model.num_key_value_heads}"
        )
    if model.num_key_value_heads % job.mesh.tp:
        raise ValueError(
            f"mesh.tp={job.mesh.tp} must divide model.num_key_value_heads={model.num_key_value_heads}"
        )
