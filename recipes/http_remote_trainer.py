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

from recipes.checks import urls_of
from recipes.config import CONF_DIR, RemoteJobConfig
from recipes.inference import Inference
from recipes.job import model_of, sender_of
from recipes.launch import load, quiet_other_ranks, register_configs
from recipes.mesh import layout_of
from recipes.probe import WorkerProbe, prove
from recipes.ranks import joined, on_rank0, own_device
from recipes.report import Push, Report
from recipes.train import trainer_of


def run(job: RemoteJobConfig, device: torch.device) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    Args:
        job: The settings.
        device: This rank's device.
    """
    is_first, world_size = dist.get_rank() == 0, dist.get_world_size()
    assert job.model.path is not None  # `checks.check` has seen to it
    model_dir, inference = Path(job.model.path), Inference(urls_of(job.inference))
    layout = layout_of(job.mesh, device.type)

    def ask() -> str:
        return on_rank0(lambda: inference.complete(job.data.prompt, job.data.max_tokens))

    with Report(steps=job.train.steps, active=is_first, prompt=job.data.prompt) as report:
        inference.wait(report.waiting)
        report.before = ask()
        model = model_of(job, model_dir, layout)
        trainer = trainer_of(job, model, model_dir, layout, device)
        proofs = []
        with sender_of(job, model, inference.client) as sender:
            for step in range(1, job.train.steps + 1):
                report.step(step, loss := trainer.step())
                if step % job.hook.every and step != job.train.steps:
                    continue
                stats = sender.send(version=step)
                on_rank0(
                    inference.client.reset_prefix_cache
                )  # it may hold what the old weights made of the prompt
                if job.prove:
                    probes = [WorkerProbe(inference.url, world_size)]
                    proofs.append(prove(model, probes, device, dtype=job.inference.dtype))
                report.pushed(Push.of(stats, loss=loss, text=ask()))
        report.finish({"proofs": proofs, "vllm_imported": "vllm" in sys.modules})


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="http_remote_trainer")
def _main(cfg: DictConfig) -> None:
    job = load(cfg, RemoteJobConfig)
    device = own_device(job.launcher.device)
    with joined(device, job.launcher.timeout_s):
        run(job, device)


def main() -> None:
    """Entry point of `python -m recipes.http_remote_trainer`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
