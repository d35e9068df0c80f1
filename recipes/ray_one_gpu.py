"""Ray: a vLLM actor and a trainer rank share a GPU, as two halves of one bundle of a placement group.

One such pair by default, `ranks` of them on as many GPUs, or on the CPU of a machine without any. The ranks shard one
model with FSDP2; rank 0 drives all the actors. `conf/ray_one_gpu.yaml` has the command line and the settings.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc.clients.ray import RayWeightSyncClient
from recipes.bench import EXTENSION
from recipes.config import CONF_DIR, JobConfig, load, register_configs, run_dir
from recipes.models import build_model
from recipes.probe import WorkerProbe, prove
from recipes.ranks import joined, own_device
from recipes.report import Push, Report
from recipes.serve import free_port, server_env, usable_cpus, with_root
from recipes.train import GROUP_TIMEOUT_S, model_dir_of, sender_of, trainer_of


@dataclass(kw_only=True)
class RayJobConfig(JobConfig):
    """The job's settings.

    Attributes:
        ranks: Pairs of a vLLM actor and a trainer rank, one a GPU.
    """

    ranks: int = 1


class ActorProbe(WorkerProbe):
    """Asks the worker of an actor that is vLLM's `LLM`."""

    def __init__(self, actor: Any) -> None:
        super().__init__("", 1)
        self._actor = actor

    def _request(self, method: str, args: list[str]) -> None:
        ray.get(self._actor.collective_rpc.remote(method, args=tuple(args)), timeout=self.timeout_s)


def train(job: RayJobConfig, model_dir: Path, engines: list[Any]) -> tuple[list[Push], list[str]]:
    """One trainer rank, as a Ray task. Collective over all of them."""
    device = own_device()
    with joined(device, GROUP_TIMEOUT_S):
        mesh = init_device_mesh(device.type, (job.ranks,), mesh_dim_names=("dp_shard",))
        has_weights, dtype = job.model.path is not None, getattr(torch, job.train.compute_dtype)
        model = build_model(
            model_dir, mesh, has_weights=has_weights, seed=job.train.seed, compute_dtype=dtype
        )
        trainer = trainer_of(job, model, model_dir, device)
        pushes, proofs = [], []
        with sender_of(job, model, RayWeightSyncClient(engines)) as sender:
            for step in range(1, job.train.steps + 1):
                loss = trainer.step()
                if step % job.train.push_every and step != job.train.steps:
                    continue
                pushes.append(Push.of(sender.send(version=step), loss=loss))
                proofs.append(prove(model, [ActorProbe(e) for e in engines], device, dtype=job.server.dtype))
        dist.barrier()  # nobody leaves while others still compare
        return pushes, proofs


def start_engine(job: RayJobConfig, model_dir: Path, place: dict[str, Any], env: dict[str, str]) -> Any:
    """Start an actor of vLLM's own class: it has the methods that the client calls."""
    from vllm import LLM

    settings: dict[str, Any] = {"gpu_memory_utilization": job.server.gpu_memory_utilization}
    return ray.remote(**place, runtime_env={"env_vars": env})(LLM).remote(
        model=str(model_dir),
        load_format="dummy",
        dtype=job.server.dtype,
        max_model_len=job.server.max_model_len,
        enforce_eager=True,  # compiling takes longer than the whole job
        weight_transfer_config={"backend": job.server.backend},
        worker_extension_cls=EXTENSION,  # for the proof; a job of yours needs none
        **(settings if place["num_gpus"] else {}),
    )


def run(job: RayJobConfig, out: Path) -> None:
    """Run the job: actors and ranks in Ray, a rank beside each actor."""
    on_gpu = torch.cuda.is_available()
    ray.init(num_gpus=job.ranks if on_gpu else 0, num_cpus=2 * job.ranks, include_dashboard=False)
    try:
        group: PlacementGroup = placement_group([{"CPU": 2, "GPU": 1} if on_gpu else {"CPU": 2}] * job.ranks)
        places = [
            {
                "num_cpus": 1,
                "num_gpus": 0.5 if on_gpu else 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            }
            for index in range(job.ranks)
        ]
        wanted = server_env(
            os.environ, num_replicas=job.ranks, config=job.server, on_gpu=on_gpu, num_cpus=usable_cpus()
        )
        env = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        env["PYTHONPATH"] = with_root(os.environ.get("PYTHONPATH"))
        model_dir = model_dir_of(job, out)
        engines = [start_engine(job, model_dir, place, env) for place in places]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.ranks)}
        results = []
        for rank, place in enumerate(places):
            own = {**meet, "RANK": str(rank), "LOCAL_RANK": "0", "PYTHONPATH": env["PYTHONPATH"]}
            task = ray.remote(**place, max_retries=0, runtime_env={"env_vars": own})(train)
            results.append(task.remote(job, model_dir, engines))
        with Report(steps=job.train.steps, active=True) as report:
            pushes, proofs = ray.get(results)[0]
            for push, proof in zip(pushes, proofs, strict=True):
                report.pushed(push)
                report.say(f"  {proof}")
            report.finish({"proofs": proofs, "ranks": job.ranks})
    finally:
        ray.shutdown()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="ray_one_gpu")
def _main(cfg: DictConfig) -> None:
    job = load(cfg)
    assert isinstance(job, RayJobConfig)
    run(job, run_dir().resolve())


def main() -> None:
    """Entry point of `python -m recipes.ray_one_gpu`."""
    register_configs()
    ConfigStore.instance().store(name="ray_schema", node=RayJobConfig)
    _main()


if __name__ == "__main__":
    main()
