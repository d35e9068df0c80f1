"""The benchmark's settings and what is refused of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.checks import check_server
from recipes.config import ServerConfig
from recipes.sizes import EXPERT_STYLES, shape_of
from recipes.variants import VARIANTS, split_name

EXTENSION = "recipes.worker_extension.WorkerChecks"


@dataclass(kw_only=True)
class ShapeConfig:
    """Which model.

    Attributes:
        name: A name in `recipes.shapes.SHAPES`.
        num_layers: Layers, None for the model's own.
        experts: How the trainer holds experts and how they are sent: each, fused, unfused; several are run in turn.
    """

    name: str = "toy"
    num_layers: int | None = None
    experts: list[str] = field(default_factory=lambda: ["each"])


@dataclass(kw_only=True)
class BenchConfig:
    """Everything that `recipes.bench` is told.

    Attributes:
        dtypes: Dtypes of the trainer's parameters, run in turn; on the wire everything is bfloat16.
        variants: See `recipes.variants.VARIANTS`.
        reps: Timed pushes of each variant, after the first two.
        bucket_mb: Slot of our wire in MiB; None sizes it to the largest tensor.
        stock_bucket_mb: Buffer of the stock wire in MiB, grown to the largest tensor.
        mesh: Sizes of a mesh with the axes dp_replicate and dp_shard, or dp_shard and tp with `tp`; empty: all ranks.
        tp: Whether the last axis of `mesh` is tensor-parallel.
        urls: Servers that run already, by backend; those that are missing and wanted are started.
        server: Settings of the started servers.
        expert_parallel: The server holds each expert on one worker only.
        soak: Pushes of ours to do after the measurement, with an eye on memory; 0 for none.
        device: auto, cuda or cpu.
        timeout_s: Time-out of the job's own collectives.
    """

    shape: ShapeConfig = field(default_factory=ShapeConfig)
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16"])
    variants: list[str] = field(default_factory=lambda: list(VARIANTS[:5]))
    reps: int = 10
    bucket_mb: float | None = None
    stock_bucket_mb: float = 2048
    num_slots: int = 2
    mesh: list[int] = field(default_factory=list)
    tp: bool = False
    urls: dict[str, str] = field(default_factory=dict)
    server: ServerConfig = field(default_factory=ServerConfig)
    expert_parallel: bool = False
    soak: int = 0
    device: str = "auto"
    timeout_s: float = 300.0


def check(config: BenchConfig) -> None:
    """Refuse values that cannot work.

    Raises:
        ValueError: Names the setting, its value and what is allowed.
    """
    shape_of(config.shape.name)
    choices = {
        "shape.experts": (config.shape.experts, EXPERT_STYLES),
        "dtypes": (config.dtypes, ("bfloat16", "float32")),
        "device": ([config.device], ("auto", "cuda", "cpu")),
        "urls": (list(config.urls), ("fsdp_ipc", "ipc")),
    }
    for name in config.variants:
        split_name(name)
    for setting, (values, allowed) in choices.items():
        for value in values:
            if value not in allowed:
                raise ValueError(f"{setting}: {value!r} is none of {', '.join(allowed)}")
    check_server(config.server, "server")
    if config.reps < 1:
        raise ValueError(f"reps={config.reps}: must be 1 or more")
