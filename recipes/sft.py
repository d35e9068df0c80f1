"""Supervised fine-tuning with accelerate and its FSDP2 plugin; a hook pushes, and the server's text is the evaluation.

Started by torchrun, one rank a GPU (or on the CPU); `conf/sft.yaml` has the command line and the settings. Without GPUs
accelerate takes no notice of the plugin and wraps the model in DDP; the weights are pushed all the same.
"""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from fsdp_ipc import TransferStats, WeightSyncHook, look_into
from fsdp_ipc.callbacks import PauseServer, ResetPrefixCache, SyncCallback
from recipes.config import CONF_DIR, JobConfig
from recipes.inference import start_servers
from recipes.job import Metrics, Stages, model_dir_on_all, sender_of, title_of
from recipes.launch import quiet_other_ranks, register_configs, start
from recipes.optim import optimizer_of, schedule_of
from recipes.ranks import on_rank0
from recipes.report import Push, Report
from recipes.train import Windows, continuation, next_token_loss, read_text, tokens_of


def run(job: JobConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    Args:
        job: The settings.
        device: This rank's device.
        out: The run directory; rank 0 writes to it.
    """
    is_first, began = dist.get_rank() == 0, time.monotonic()
    text = read_text(job.data)
    with ExitStack() as stack:
        report = stack.enter_context(
            Report(steps=job.train.steps, active=is_first, machine=job.logger.json, prompt=job.data.prompt)
        )
        report.expected = continuation(text, job.data.prompt)
        metrics = stack.enter_context(Metrics(out, active=is_first and job.logger.metrics))
        left = out if job.logger.metrics else None
        model_dir = model_dir_on_all(job, out)
        inference = start_servers(job.inference, model_dir, out, stack, report, device)
        model = _whole_model(job, model_dir)
        accelerator = _accelerator(job, model, device)
        model, optimizer = accelerator.prepare(model, optimizer_of([list(model.parameters())], job.optim))
        found = look_into(model, accelerator).text
        report.say(f"accelerate made of it: {found}")
        schedule = schedule_of(optimizer.optimizer, job.optim, job.train.steps)
        windows = Windows(tokens_of(text, model_dir).to(device), job.train, dist.get_rank())

        def ask() -> str | None:
            if not job.complete:
                return None
            return on_rank0(lambda: inference.complete(job.data.prompt, job.data.max_tokens))

        inference.wait(report.waiting)
        report.ready(server_s := time.monotonic() - began)
        report.before = ask()
        callbacks: list[SyncCallback] = [PauseServer("wait")] if job.hook.pause else []
        callbacks += [ResetPrefixCache()] if job.hook.reset_prefix_cache else []
        sender = stack.enter_context(
            sender_of(job, model, inference.client, out, [*callbacks, *report.callbacks(left)])
        )
        pushed: list[TransferStats] = []
        # The hook hangs on the optimizer: the loop below has no line of ours.
        stack.enter_context(WeightSyncHook(optimizer, sender, every=job.hook.every, on_sync=pushed.append))
        for step in range(1, job.train.steps + 1):
            stages = Stages()
            pushed.clear()
            with stages("train"):
                loss = next_token_loss(model, windows.batch())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), job.optim.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            report.step(step, loss.item())
            if step == job.train.steps and not pushed:
                pushed.append(sender.send(step))
            for stats in pushed:
                stages.seconds["sync"] = stats.seconds
                stages.seconds["train"] = max(0.0, stages.seconds["train"] - stats.seconds)
                with stages("complete"):
                    answer = ask()
                report.pushed(Push.of(stats, loss=loss.item(), text=answer, expected=report.expected))
            metrics.row(step, stages, pushed[0] if pushed else None, loss=loss.item())
        report.finish(
            {
                "world_size": dist.get_world_size(),
                "device": device.type,
                "accelerate": found,
                "server_ready_s": round(server_s, 2),
                "total_s": round(time.monotonic() - began, 2),
            },
            out=out if job.logger.report else None,
            title=title_of("sft", job),
            config=job,
        )


def _whole_model(job: JobConfig, model_dir: Path) -> nn.Module:
    """The model as accelerate wants it: whole, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(job.train.seed)
    if job.model.path is not None:
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        return loaded
    config = AutoConfig.from_pretrained(model_dir)
    made: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return made


def _accelerator(job: JobConfig, model: nn.Module, device: torch.device) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    layer = type(next(model.get_submodule("model.layers").children())).__name__
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        reshard_after_forward=True,
    )
    return Accelerator(
        cpu=device.type == "cpu",
        fsdp_plugin=plugin,
        mixed_precision="bf16" if job.train.compute_dtype == "bfloat16" else "no",
    )


def check_sft(job: JobConfig) -> None:
    """Refuse settings that accelerate's plugin or a server that stays awake cannot do.

    Raises:
        ValueError: Names the setting.
    """
    for axis, size in vars(job.mesh).items():
        if axis != "dp_shard" and size != 1:
            raise ValueError(
                f"mesh.{axis}={size}: accelerate's plugin shards over all ranks here; take mesh=fsdp"
            )
    if job.hook.sleep_level:
        raise ValueError(
            f"hook.sleep_level={job.hook.sleep_level}: this recipe's hook lets the server stay awake; take "
            "hook=now_and_then"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError(
            "recipes.sft needs accelerate: pip install accelerate (or take recipes.train, which does not)"
        )


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="sft")
def _main(cfg: DictConfig) -> None:
    start(cfg, JobConfig, run, refuse=check_sft)


def main() -> None:
    """Entry point of `python -m recipes.sft`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
