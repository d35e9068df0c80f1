"""Schemas of the recipes' settings, one dataclass a group of `conf/`; Hydra refuses names and types that are not here.

`recipes.checks` refuses values that cannot work, `recipes.launch` says how Hydra behaves under torchrun.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Absolute, so that it is found however the recipe was started (by name, by path, or imported).
CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


@dataclass(kw_only=True)
class ModelConfig:
    """Sizes of a Qwen3 (or Qwen3-MoE), or a checkpoint directory in their place.

    Attributes:
        path: Directory of a Hugging Face checkpoint, relative to where the job was started; None: the sizes.
            Sizes are read only without a path.
        vocab_size: Entries of the vocabulary, at least the 257 of the byte tokenizer.
        num_experts: Experts a layer; 0: a dense model, and the next two are not read.
        num_experts_per_tok: Experts that a token is sent to.
        moe_intermediate_size: Inner width of an expert.
    """

    path: str | None = None
    vocab_size: int = 257
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0


@dataclass(kw_only=True)
class MeshConfig:
    """How the ranks are laid out; -1 for one axis means: the ranks that the others leave.

    Attributes:
        dp_replicate: Copies of the sharded model (HSDP).
        dp_shard: Ranks that FSDP2 shards a copy over.
        tp: Ranks that a layer's matrices are cut over.
        ep: Ranks that whole experts are dealt out to; they are among those of `dp_shard`, which it must divide.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    ep: int = 1


@dataclass(kw_only=True)
class TrainConfig:
    """The training loop.

    Attributes:
        steps: Optimizer steps.
        batch_size: Sequences a rank and forward pass.
        seq_len: Tokens a sequence; of GRPO, the rollouts decide.
        compute_dtype: Dtype of forward and backward; the parameters are fp32.
    """

    steps: int = 200
    batch_size: int = 1
    seq_len: int = 512
    compute_dtype: str = "float32"
    seed: int = 0


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer.

    Attributes:
        name: adamw or sgd.
        lr: Peak learning rate, after `warmup_steps`.
        schedule: What follows the warm-up: cosine (down to a twentieth) or constant.
        clip_norm: Largest norm of the gradient of all parameters together.
    """

    name: str = "adamw"
    lr: float = 3.0e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_steps: int = 20
    schedule: str = "cosine"
    clip_norm: float = 1.0


@dataclass(kw_only=True)
class DataConfig:
    """What the model learns from.

    Attributes:
        kind: text (learnt by heart), or a task with a reward: letters, sums, jsonl.
        path: Of text, the file (None: the Zen of Python); of jsonl, one object a line with `prompt` and `answer`.
            Relative to where the job was started.
        prompt: Of text and letters, what the server is asked to continue.
        max_tokens: Tokens of a completion.
    """

    kind: str = "text"
    path: str | None = None
    prompt: str = "The Zen of Python, by Tim Peters"
    max_tokens: int = 190


@dataclass(kw_only=True)
class TransferConfig:
    """How the weights travel.

    Attributes:
        backend: Weight-transfer back end: auto, fsdp_ipc or ipc.
        wire_dtype: Dtype on the wire; None: that of each parameter.
        keep: Name patterns of parameters that keep their own dtype; None: the library's choice.
        packed: Pack tensors into staging buckets; False: one handle a tensor.
        bucket_mb: Size of a staging slot, in MiB; None: the largest tensor's, at least 2048 unless all fits in less.
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
    """The vLLM server that the job starts on each node, or those that it finds.

    Attributes:
        url: Base URL of a running server, or a list of them; None: start one and stop it at the end.
        backend: Weight-transfer back end of the started server.
        devices: GPUs of the started server, as indices, UUIDs or nested lists; None: the trainer's.
        replicas: Data-parallel size of the started server; None: the node's ranks over `tensor_parallel_size`.
        tensor_parallel_size: Workers that one replica is cut over.
        host: Address that the started server listens on.
        allow_remote: Permit a `host` that other machines can reach. The routes of weight transfer ask for no
            password: whoever reaches them can change the weights.
        sleep_mode: Start it so that it can sleep while the trainer works (GPUs only).
        max_num_seqs: Sequences that a replica works on at once.
        gpu_memory_utilization: Share of a GPU that the server takes; the trainer needs the rest.
        enforce_eager: Leave out compiling and capturing graphs, which take longer than a short job.
        start_timeout_s: Seconds until a started server must be healthy.
        extra_args: Further arguments of the server's command line.
    """

    url: Any = None
    backend: str = "fsdp_ipc"
    devices: Any = None
    replicas: int | None = None
    tensor_parallel_size: int = 1
    host: str = "127.0.0.1"
    allow_remote: bool = False
    sleep_mode: bool = False
    dtype: str = "bfloat16"
    max_model_len: int = 1024
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.4
    enforce_eager: bool = True
    start_timeout_s: float = 600.0
    extra_args: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class HookConfig:
    """When the weights are pushed, and what happens to the server around it.

    Attributes:
        every: Optimizer steps between two pushes; the last step always pushes.
        sleep_level: Of a server that can sleep, how deep it does while the trainer works: 1 keeps its weights on the
            host, 2 drops them, 0 leaves it awake.
        pause: Pause generation while weights are pushed.
        reset_prefix_cache: Drop what the server remembers of the old weights.
    """

    every: int = 25
    sleep_level: int = 1
    pause: bool = True
    reset_prefix_cache: bool = True


@dataclass(kw_only=True)
class LoggerConfig:
    """What is left in the run directory.

    Attributes:
        metrics: metrics.jsonl, one object a step.
        report: report.html, made of it at the end.
        tensorboard: Event files of the same figures; needs the package `tensorboard`.
        json: Standard output has one line of JSON and nothing else.
    """

    metrics: bool = True
    report: bool = True
    tensorboard: bool = False
    json: bool = False


@dataclass(kw_only=True)
class LauncherConfig:
    """What the job expects of the one who starts its ranks.

    Attributes:
        ranks: Ranks on each node, checked at the start; None: as many as there are.
        device: auto, cuda or cpu.
        timeout_s: Time-out of the ranks' collectives, the start of a server not counted.
    """

    ranks: int | None = None
    device: str = "auto"
    timeout_s: float = 600.0


@dataclass(kw_only=True)
class JobConfig:
    """Everything that `recipes.train` is told; the other recipes' settings are this and a little more.

    Attributes:
        complete: Whether to ask the server for completions; False measures the pushes alone.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    inference: ServerConfig = field(default_factory=ServerConfig)
    hook: HookConfig = field(default_factory=HookConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    complete: bool = True


@dataclass(kw_only=True)
class GrpoConfig:
    """Group-relative policy optimization.

    Attributes:
        prompts: Prompts a step, over all ranks.
        samples: Completions a prompt, whose rewards are compared with each other.
        temperature: Of the sampling, at which log-probabilities are taken too. Other than 1, a server that the job only finds
            must run with `--logprobs-mode processed_logprobs`; one that it starts does.
        epochs: Passes over the rollouts of a step, an optimizer step each.
        clip_low: How far below 1 the ratio of the probabilities counts.
        clip_high: How far above 1.
        normalize: Divide a group's advantages by the standard deviation of its rewards.
        max_staleness: Most steps that the weights behind a rollout may be old; more is an error.
    """

    prompts: int = 8
    samples: int = 8
    temperature: float = 1.0
    epochs: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize: bool = True
    max_staleness: int = 8


@dataclass(kw_only=True)
class GrpoJobConfig(JobConfig):
    """What `recipes.grpo` is told."""

    grpo: GrpoConfig = field(default_factory=GrpoConfig)


@dataclass(kw_only=True)
class PushJobConfig(JobConfig):
    """What `recipes.push` is told.

    Attributes:
        prompts: What the server is asked to continue, before and after.
    """

    prompts: list[str] = field(default_factory=list)


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


SCHEMAS: dict[str, type[JobConfig]] = {
    "job_schema": JobConfig,
    "grpo_schema": GrpoJobConfig,
    "push_schema": PushJobConfig,
    "remote_schema": RemoteJobConfig,
    "ray_schema": RayJobConfig,
}


_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")


def settings_in_use(job: JobConfig) -> dict[str, Any]:
    """The settings that a job reads, for its report: without those of other recipes, data, models and servers."""
    unread = {
        GrpoJobConfig: ["train.seq_len", "complete"],
        PushJobConfig: ["train", "optim", "data.kind", "data.path", "data.prompt", "hook.every", "complete"],
    }.get(type(job), [])  # the other recipes read all
    if job.data.kind not in ("text", "jsonl"):
        unread.append("data.path")
    if job.data.kind not in ("text", "letters"):
        unread.append("data.prompt")
    if job.model.path is not None:
        unread += [f"model.{name}" for name in vars(job.model) if name != "path"]
    elif job.model.num_experts == 0:
        unread += [f"model.{name}" for name in _EXPERTS]
    if job.inference.url is not None:
        unread += [
            f"inference.{name}" for name in vars(job.inference) if name not in ("url", "start_timeout_s")
        ]
    settings = asdict(job)
    for name in unread:
        group, _, key = name.partition(".")
        (settings.get(group, {}) if key else settings).pop(key or group, None)
    return settings
