"""One GPU over HTTP: train in this process, with a vLLM server beside it that this process starts and stops.

`conf/http_one_gpu.yaml` has the command line and the settings; on a machine without GPUs everything runs on its CPU.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import HTTPWeightSyncClient
from recipes.config import CONF_DIR, JobConfig, load, register_configs, run_dir
from recipes.probe import WorkerProbe, prove
from recipes.ranks import joined, own_device
from recipes.report import Push, Report
from recipes.train import Policy, continuation, model_dir_of, model_of, read_text, sender_of, trainer_of


def run(job: JobConfig, device: torch.device, out: Path) -> None:
    """Run the job: the one rank of a process group of one.

    Args:
        job: The settings.
        device: The GPU, or the CPU.
        out: Directory for the server's log and the model's files.
    """
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    model_dir = model_dir_of(job, out)
    policy = Policy(job, model_dir, out / "server.log", 1, on_gpu=device.type == "cuda")
    report = Report(steps=job.train.steps, active=True, prompt=job.data.prompt)
    with closing(policy), report:
        model = model_of(job, model_dir, mesh)
        trainer = trainer_of(job, model, model_dir, device)
        policy.wait(report.waiting)
        report.before = policy.ask()
        report.expected = continuation(read_text(job.data), job.data.prompt)
        proofs = []
        with sender_of(job, model, HTTPWeightSyncClient(policy.url)) as sender:
            for step in range(1, job.train.steps + 1):
                report.step(step, loss := trainer.step())
                if step % job.train.push_every and step != job.train.steps:
                    continue
                stats = sender.send(version=step)
                proofs.append(prove(model, [WorkerProbe(policy.url, 1)], device, dtype=job.server.dtype))
                report.pushed(Push.of(stats, loss=loss, text=policy.ask(), expected=report.expected))
                report.say(f"  {proofs[-1]}")
        report.finish({"proofs": proofs})


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="http_one_gpu")
def _main(cfg: DictConfig) -> None:
    job = load(cfg)
    device = own_device()
    with joined(device, job.server.start_timeout_s):
        run(job, device, run_dir())


def main() -> None:
    """Entry point of `python -m recipes.http_one_gpu`."""
    register_configs()
    _main()


if __name__ == "__main__":
    main()
