"""A trainer that never imports vLLM pushes into a server that runs already, started by somebody else.

Its environment needs torch, the HTTP client and what its own model needs. The server runs on the same machine, on the
trainer's GPUs; `conf/http_remote_trainer.yaml` has both command lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import HTTPWeightSyncClient
from recipes.config import CONF_DIR, RemoteJobConfig, load, quiet_other_ranks, register_configs, run_dir
from recipes.probe import WorkerProbe, prove
from recipes.ranks import joined, on_rank0, own_device
from recipes.report import Push, Report
from recipes.train import GROUP_TIMEOUT_S, Policy, model_of, sender_of, trainer_of


def run(job: RemoteJobConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    Args:
        job: The settings.
        device: This rank's device.
        out: Not written to: there is no server of our own.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert job.model.path is not None and job.server.url is not None  # mandatory in the configuration
    url, model_dir = job.server.url, Path(job.model.path)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    policy = Policy(job, model_dir, out / "server.log", world_size, on_gpu=device.type == "cuda")
    with Report(steps=job.train.steps, active=rank == 0, prompt=job.data.prompt) as report:
        on_rank0(lambda: policy.wait(report.waiting))
        report.before = on_rank0(policy.ask)
        model = model_of(job, model_dir, mesh)
        trainer = trainer_of(job, model, model_dir, device)
        proofs = []
        with sender_of(job, model, HTTPWeightSyncClient(url)) as sender:
            for step in range(1, job.train.steps + 1):
                report.step(step, loss := trainer.step())
                if step % job.train.push_every and step != job.train.steps:
                    continue
                stats = sender.send(version=step)
                if job.prove:
                    proofs.append(
                        prove(model, [WorkerProbe(url, world_size)], device, dtype=job.server.dtype)
                    )
                report.pushed(Push.of(stats, loss=loss, text=on_rank0(policy.ask)))
        report.finish({"proofs": proofs, "vllm_imported": "vllm" in sys.modules})


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="http_remote_trainer")
def _main(cfg: DictConfig) -> None:
    job = load(cfg)
    assert isinstance(job, RemoteJobConfig)
    device = own_device()
    with joined(device, GROUP_TIMEOUT_S):
        run(job, device, run_dir())


def main() -> None:
    """Entry point of `python -m recipes.http_remote_trainer`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
