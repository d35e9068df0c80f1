"""Ray: a vLLM actor and a trainer rank share a GPU, as two halves of one bundle of a placement group.

`ranks` such pairs (1) shard one model; rank 0 drives all actors. `conf/ray_one_gpu.yaml` has the command and the settings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from omegaconf import DictConfig
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

from fsdp_ipc.clients.ray import RayWeightSyncClient
from recipes.bench_config import EXTENSION
from recipes.config import CONF_DIR, RayJobConfig
from recipes.job import model_dir_of, model_of, sender_of
from recipes.launch import load, register_configs, run_dir
from recipes.mesh import layout_of
from recipes.probe import ActorProbe, prove
from recipes.ranks import joined, own_device
from recipes.report import Push, Report
from recipes.serve import free_port, server_env, usable_cpus, with_root
from recipes.train import trainer_of


def train(job: RayJobConfig, model_dir: Path, engines: list[Any]) -> tuple[list[Push], list[str]]:
    """One trainer rank, as a Ray task. Collective over all of them."""
    device = own_device()
    with joined(device, job.launcher.timeout_s):
        layout = layout_of(job.mesh, device.type)
        model = model_of(job, model_dir, layout)
        trainer = trainer_of(job, model, model_dir, layout, device)
        pushes, proofs = [], []
        with sender_of(job, model, RayWeightSyncClient(engines)) as sender:
            for step in range(1, job.train.steps + 1):
                loss = trainer.step()
                if step % job.hook.every and step != job.train.steps:
                    continue
                pushes.append(Push.of(sender.send(version=step), loss=loss))
                proofs.append(
                    prove(model, [ActorProbe(e) for e in engines], device, dtype=job.inference.dtype)
                )
        return pushes, proofs


def start_engine(job: RayJobConfig, model_dir: Path, place: dict[str, Any], env: dict[str, str]) -> Any:
    """Start an actor of vLLM's own class: it has the methods that the client calls."""
    from vllm import LLM

    share = {"gpu_memory_utilization": job.inference.gpu_memory_utilization} if place["num_gpus"] else {}
    return ray.remote(**place, runtime_env={"env_vars": env})(LLM).remote(
        model=str(model_dir),
        load_format="dummy",
        dtype=job.inference.dtype,
        max_model_len=job.inference.max_model_len,
        enforce_eager=True,  # compiling takes longer than the whole job
        weight_transfer_config={"backend": job.inference.backend},
        worker_extension_cls=EXTENSION,  # for the proof; a job of yours needs none
        **share,
    )


def run(job: RayJobConfig, out: Path) -> None:
    """Run the job: actors and ranks in Ray, a rank beside each actor."""
    on_gpu, count = torch.cuda.is_available(), job.ranks
    gpus = count if on_gpu else 0
    ray.init(num_gpus=gpus, num_cpus=2 * count, include_dashboard=False, log_to_driver=False)
    try:
        group = placement_group([{"CPU": 2, "GPU": 1} if on_gpu else {"CPU": 2}] * count)
        half = {"num_cpus": 1, "num_gpus": gpus / count / 2}
        places = [{**half, "scheduling_strategy": InGroup(group, index)} for index in range(count)]
        cpus = usable_cpus()
        wanted = server_env(
            os.environ, num_replicas=count, config=job.inference, on_gpu=on_gpu, num_cpus=cpus
        )
        own = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        own["PYTHONPATH"] = with_root(os.environ.get("PYTHONPATH"))
        model_dir = model_dir_of(job, out)
        engines = [start_engine(job, model_dir, place, own) for place in places]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        meet |= {"LOCAL_RANK": "0", "PYTHONPATH": own["PYTHONPATH"]}
        envs = [{"env_vars": {**meet, "RANK": str(rank)}} for rank in range(count)]
        ranks = [
            ray.remote(**p, max_retries=0, runtime_env=e)(train) for p, e in zip(places, envs, strict=True)
        ]
        results = [rank.remote(job, model_dir, engines) for rank in ranks]
        pushes, proofs = ray.get(results)[0]  # all ranks tell the same
        with Report(steps=job.train.steps, active=True) as report:
            for push in pushes:
                report.pushed(push)
            report.finish({"proofs": proofs, "ranks": count})
    finally:
        ray.shutdown()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="ray_one_gpu")
def _main(cfg: DictConfig) -> None:
    job = load(cfg, RayJobConfig)
    run(job, run_dir())


def main() -> None:
    """Entry point of `python -m recipes.ray_one_gpu`."""
    register_configs()
    _main()


if __name__ == "__main__":
    main()
