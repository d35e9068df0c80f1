"""Push a checkpoint once into a server that started with random weights, and compare what it says before and after.

Started by torchrun, one rank a GPU (or on the CPU); `conf/push.yaml` has the command line and the settings. Each rank reads
its own shards out of the checkpoint's files, in the checkpoint's dtype.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from recipes.config import CONF_DIR, PushJobConfig
from recipes.inference import start_servers
from recipes.job import Metrics, Stages, sender_of, title_of
from recipes.launch import quiet_other_ranks, register_configs, start
from recipes.mesh import layout_of
from recipes.models import build_model
from recipes.pushing import Pusher
from recipes.ranks import on_rank0
from recipes.report import Push, Report, printable
from recipes.report_data import Said


def run(job: PushJobConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    Args:
        job: The settings.
        device: This rank's device.
        out: The run directory; rank 0 writes to it.
    """
    from transformers import AutoConfig

    is_first, began = dist.get_rank() == 0, time.monotonic()
    assert job.model.path is not None  # `checks.check` has seen to it
    model_dir = Path(job.model.path)
    layout = layout_of(job.mesh, device.type)
    with ExitStack() as stack:
        report = stack.enter_context(Report(steps=1, active=is_first, machine=job.logger.json))
        metrics = stack.enter_context(Metrics(out, active=is_first and job.logger.metrics))
        left = out if job.logger.metrics else None
        inference = start_servers(job.inference, model_dir, out, stack, report, device)
        stages = Stages()
        with stages("load"):
            config = AutoConfig.from_pretrained(model_dir)
            dtype = getattr(config, "dtype", None) or torch.float32
            model = build_model(model_dir, layout, has_weights=True, seed=0, compute_dtype=dtype, dtype=dtype)
        with stages("wait for server"):
            inference.wait(report.waiting)
        report.ready(server_s := time.monotonic() - began)

        def ask() -> list[str]:
            with stages("complete"):
                return on_rank0(lambda: [inference.complete(p, job.data.max_tokens) for p in job.prompts])

        before = ask()
        sender = stack.enter_context(sender_of(job, model, inference.client, out, report.callbacks(left)))
        pusher = Pusher(inference, job.hook, sender, report)
        pusher.rest(stages)
        stats = pusher.push(1, stages)
        after = ask()
        report.pushed(Push.of(stats))
        texts = list(zip(job.prompts, before, after, strict=True))
        report.said = [Said(prompt=prompt, before=old, after=new) for prompt, old, new in texts]
        for prompt, old, new in texts:
            report.say(f"{prompt!r}\n  before: {printable(old)!r}\n  after:  {printable(new)!r}")
        metrics.row(1, stages, stats)
        report.finish(
            {
                "world_size": dist.get_world_size(),
                "parameters": sum(p.numel() for p in model.parameters()),
                "said_before": before,
                "said_after": after,
                "server_ready_s": round(server_s, 2),
                "load_s": round(stages.seconds["load"], 2),
            },
            out=out if job.logger.report else None,
            title=title_of("push", job),
            config=job,
        )


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="push")
def _main(cfg: DictConfig) -> None:
    start(cfg, PushJobConfig, run)


def main() -> None:
    """Entry point of `python -m recipes.push`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
