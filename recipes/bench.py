"""The benchmark: real model sizes, a real server, several ways to push, alternating in one run.

Weights are random and servers start with dummy weights, so nothing is downloaded. A variant gets times only if every
worker held exactly the trainer's weights, bit for bit, after its first push and after its last one; parameters are
scrambled on the workers before each of these two. `conf/bench.yaml` has the command lines and the settings.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipes.bench_config import EXTENSION, BenchConfig, check
from recipes.bench_report import table
from recipes.bench_run import Bench
from recipes.config import CONF_DIR, ServerConfig
from recipes.launch import quiet_other_ranks, refuse_sweep, register_configs
from recipes.ranks import joined, on_rank0, own_device
from recipes.serve import Server
from recipes.shapes import write_server_dir
from recipes.sizes import Shape, shape_of


def wanted_servers(config: BenchConfig, device: torch.device) -> list[str]:
    """Backends of the servers that the variants need and that nobody has given."""
    needed = set()
    for name in config.variants:
        ours = name.startswith(("ours", "file"))
        if ours or device.type == "cuda":
            needed.add("fsdp_ipc" if ours else "ipc")
    return sorted(needed - set(config.urls))


def server_args(shape: Shape, config: BenchConfig, device: torch.device) -> list[str]:
    """Command-line arguments of a benchmark's server, on top of those of every recipe."""
    args = ["--worker-extension-cls", EXTENSION, "--no-enable-log-requests"]
    if device.type == "cuda":
        # A fixed cache, because what others take of the GPU meanwhile would confuse vLLM's own measurement.
        args += ["--kv-cache-memory-bytes", str(1 << 29)]
    if config.expert_parallel and shape.is_moe:
        args += ["--enable-expert-parallel"]
    return args


def run(config: BenchConfig, out: Path) -> bool:
    """All ranks: start what servers are wanted, run the benchmark, stop them.

    Args:
        config: The settings.
        out: Directory for results and logs.

    Returns:
        Whether every variant that could run pushed the right weights.
    """
    check(config)
    device = own_device(config.device)
    with joined(device, config.timeout_s), ExitStack() as stack:
        if dist.get_rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
        shape = shape_of(config.shape.name, config.shape.num_layers)
        urls = on_rank0(lambda: {**config.urls, **_start(config, shape, device, out, stack)})
        bench = Bench(config, out, device, urls)
        good = bench.run()
        if dist.get_rank() == 0:
            text = table(bench.log.results)
            (out / "table.txt").write_text(text + "\n")
            print(text, flush=True)
        return good


def _start(
    config: BenchConfig, shape: Shape, device: torch.device, out: Path, stack: ExitStack
) -> dict[str, str]:
    backends = wanted_servers(config, device)
    if not backends:
        return {}
    folder = write_server_dir(shape, out / "model")
    servers = {}
    for backend in backends:
        settings = ServerConfig(**{**vars(config.server), "backend": backend})
        settings.extra_args = [*server_args(shape, config, device), *config.server.extra_args]
        servers[backend] = stack.enter_context(
            Server(
                folder,
                num_replicas=dist.get_world_size(),
                config=settings,
                log_path=out / f"server-{backend}.log",
                on_gpu=device.type == "cuda",
            )
        )
    for server in servers.values():
        server.wait_healthy()
    return {backend: server.url for backend, server in servers.items()}


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="bench")
def _main(cfg: DictConfig) -> None:
    refuse_sweep()
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, BenchConfig)
    if not run(config, Path(HydraConfig.get().runtime.output_dir)):
        raise SystemExit(1)


def main() -> None:
    """Entry point of `python -m recipes.bench`."""
    register_configs()
    ConfigStore.instance().store(name="bench_schema", node=BenchConfig)
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
