"""One GPU over HTTP: train in this process, with a vLLM server beside it that this process starts and stops.

`conf/http_one_gpu.yaml` has the command line and the settings; on a machine without GPUs everything runs on its CPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from recipes.config import CONF_DIR, JobConfig
from recipes.inference import start_servers
from recipes.job import model_dir_on_all, model_of, sender_of
from recipes.launch import load, register_configs, run_dir
from recipes.mesh import layout_of
from recipes.probe import WorkerProbe, prove
from recipes.ranks import joined, own_device
from recipes.report import Push, Report
from recipes.train import continuation, read_text, trainer_of


def run(job: JobConfig, device: torch.device, out: Path) -> None:
    """Run the job: the one rank of a process group of one.

    Args:
        job: The settings.
        device: The GPU, or the CPU.
        out: Directory for the server's log and the model's files.
    """
    layout = layout_of(job.mesh, device.type)
    model_dir = model_dir_on_all(job, out)
    with ExitStack() as stack:
        report = stack.enter_context(Report(steps=job.train.steps, active=True, prompt=job.data.prompt))
        inference = start_servers(job.inference, model_dir, out, stack, report, device)

        def ask() -> str:
            return inference.complete(job.data.prompt, job.data.max_tokens)

        model = model_of(job, model_dir, layout)
        trainer = trainer_of(job, model, model_dir, layout, device)
        inference.wait(report.waiting)
        report.before = ask()
        report.expected = continuation(read_text(job.data), job.data.prompt)
        proofs = []
        sender = stack.enter_context(sender_of(job, model, inference.client))
        for step in range(1, job.train.steps + 1):
            report.step(step, loss := trainer.step())
            if step % job.hook.every and step != job.train.steps:
                continue
            stats = sender.send(version=step)
            inference.client.reset_prefix_cache()  # it may hold what the old weights made of the prompt
            proofs.append(prove(model, [WorkerProbe(inference.url, 1)], device, dtype=job.inference.dtype))
            report.pushed(Push.of(stats, loss=loss, text=ask(), expected=report.expected))
            report.say(f"  {proofs[-1]}")
        report.finish({"proofs": proofs})


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="http_one_gpu")
def _main(cfg: DictConfig) -> None:
    job = load(cfg, JobConfig)
    device = own_device(job.launcher.device)
    with joined(device, job.launcher.timeout_s + job.inference.start_timeout_s):
        run(job, device, run_dir())


def main() -> None:
    """Entry point of `python -m recipes.http_one_gpu`."""
    register_configs()
    _main()


if __name__ == "__main__":
    main()
