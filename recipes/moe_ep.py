"""Experts sharded over several ranks, packed buckets, and a server that sleeps while the trainer works.

FSDP2 shards the stacked experts over their first axis, so each rank holds whole ones; under expert parallelism so does
each worker, and it is sent those and no others. `conf/moe_ep.yaml` has the command line and the settings. A CPU server
cannot sleep, and serves experts with one replica only: there the ranks beyond the first have no worker.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from recipes.bench_config import EXTENSION, ShapeConfig
from recipes.checks import check_server
from recipes.config import CONF_DIR, ServerConfig
from recipes.launch import quiet_other_ranks, refuse_sweep, register_configs, run_dir
from recipes.probe import WorkerProbe, prove
from recipes.ranks import joined, on_rank0, own_device
from recipes.report import Push, Report
from recipes.serve import Server
from recipes.shapes import build, fill, sent_naming, write_server_dir
from recipes.sizes import shape_of

EXPERTS = "unfused"
"""The trainer holds a layer's experts in one tensor, the checkpoint has them one by one."""


@dataclass(kw_only=True)
class MoeConfig:
    """The job's settings.

    Attributes:
        pushes: Pushes, each of other weights.
        sleep_level: vLLM's: 1 keeps the weights on the host, 2 drops them; 0 leaves the server awake.
    """

    shape: ShapeConfig = field(default_factory=ShapeConfig)
    pushes: int = 3
    bucket_mb: float = 64
    sleep_level: int = 1
    inference: ServerConfig = field(default_factory=ServerConfig)


def run(config: MoeConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun."""
    world_size, on_gpu = dist.get_world_size(), device.type == "cuda"
    num_replicas = world_size if on_gpu else 1
    shape = shape_of(config.shape.name, config.shape.num_layers)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    with ExitStack() as stack:
        report = stack.enter_context(Report(steps=config.pushes, active=dist.get_rank() == 0))

        def start_server() -> tuple[str, bool]:
            args = ["--worker-extension-cls", EXTENSION, "--enable-expert-parallel"]
            config.inference.sleep_mode = config.sleep_level > 0
            config.inference.extra_args = [*args, *config.inference.extra_args]
            folder, log = write_server_dir(shape, out / "model"), out / "server.log"
            server = stack.enter_context(
                Server(
                    folder, num_replicas=num_replicas, config=config.inference, log_path=log, on_gpu=on_gpu
                )
            )
            server.wait_healthy(report.waiting)
            return server.url, HTTPWeightSyncClient(server.url).server_info().sleep_mode is True

        url, can_sleep = on_rank0(start_server)
        if not can_sleep:
            report.say(
                "this server cannot sleep (on a CPU none can, or sleep_level=0): it stays awake throughout"
            )
        client = HTTPWeightSyncClient(url)
        model = build(shape, mesh, device=device, dtype=torch.float32, experts=EXPERTS)
        source = DTensorSource(model, dtype=torch.bfloat16, naming=sent_naming(model, EXPERTS))
        sender = stack.enter_context(WeightSender(source, client, bucket_bytes=int(config.bucket_mb * 2**20)))
        probe, sharded, proofs = WorkerProbe(url, num_replicas), num_replicas > 1, []
        reload_in = None if on_gpu else out  # a CPU server packs experts
        for version in range(1, config.pushes + 1):
            if can_sleep:
                on_rank0(lambda: client.sleep(config.sleep_level))
            fill(model, seed=version)  # stands for training: new weights, with the GPU to itself
            if can_sleep:
                on_rank0(lambda: client.wake_up("weights"))  # an update needs them, but no cache yet
            stats = sender.send(version)
            if can_sleep:
                on_rank0(lambda: client.wake_up("kv_cache"))
            on_rank0(client.reset_prefix_cache)  # an update leaves keys and values of the old weights behind
            proof = prove(
                model, [probe], device, experts=EXPERTS, sharded_experts=sharded, reload_in=reload_in
            )
            proofs.append(proof)
            report.pushed(Push.of(stats))
            report.say(f"  {proofs[-1]}")
        report.finish({"proofs": proofs, "slept": can_sleep, "world_size": world_size})


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="moe_ep")
def _main(cfg: DictConfig) -> None:
    refuse_sweep()
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, MoeConfig)
    check_server(config.inference, "inference")
    device = own_device()
    with joined(device, 600 + config.inference.start_timeout_s):
        run(config, device, run_dir())


def main() -> None:
    """Entry point of `python -m recipes.moe_ep`."""
    register_configs()
    ConfigStore.instance().store(name="moe_schema", node=MoeConfig)
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
