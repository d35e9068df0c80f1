"""Colocated GRPO: rollouts from data-parallel vLLM, rewards by program, an FSDP2 update, a push, and again.

Started by torchrun, one rank a GPU (or on the CPU); `conf/grpo.yaml` has the command line and the settings. Trainer and
server share the GPUs: where the server can sleep, it does so while the trainer works.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from recipes.config import CONF_DIR, GrpoJobConfig
from recipes.grpo_loss import group_advantages, policy_loss
from recipes.inference import Inference, start_servers
from recipes.job import Metrics, Stages, model_dir_on_all, model_of, sender_of, stage_medians, title_of
from recipes.launch import quiet_other_ranks, register_configs, start
from recipes.mesh import Layout, layout_of
from recipes.optim import Optimization
from recipes.pushing import Pusher
from recipes.ranks import on_rank0
from recipes.report import Push, Report
from recipes.rollouts import Rollout, collate, roll_out
from recipes.tasks import Task, task_of


@dataclass(frozen=True)
class Update:
    """What one update of the policy did, over all ranks."""

    loss: float
    grad_norm: float
    clipped: float
    divergence: float


class Learner:
    """The policy and its optimizer; the same calls on every rank.

    Args:
        model: The sharded policy.
        job: The settings.
        layout: The meshes.
        device: This rank's device.
    """

    def __init__(self, model: nn.Module, job: GrpoJobConfig, layout: Layout, device: torch.device) -> None:
        self._model, self._config, self._layout, self._device = model, job.grpo, layout, device
        self._micro = job.train.batch_size
        steps = job.train.steps * job.grpo.epochs
        self._optimization = Optimization(model.parameters(), job.optim, steps)

    def update(self, rollouts: list[Rollout]) -> Update:
        """Take `epochs` optimizer steps on this rank's rollouts. Collective."""
        advantages = group_advantages(rollouts, normalize=self._config.normalize)
        batch = collate(rollouts, advantages, self._device)
        tokens = self._sum(float(batch.is_completion.sum()))
        sums, norm = torch.zeros(3, dtype=torch.float64), 0.0
        for _ in range(self._config.epochs):
            sums.zero_()
            for part in batch.parts(self._micro):
                logits = self._model(input_ids=part.tokens[:, :-1], use_cache=False).logits
                loss = policy_loss(logits, part, self._config)
                # FSDP2 averages gradients over the ranks that read different data; the loss is a mean over all tokens.
                (loss.total * (self._layout.data_size / tokens)).backward()
                sums += torch.tensor([loss.total.item(), loss.clipped, loss.divergence], dtype=torch.float64)
                del logits, loss
            norm = self._optimization.step()
        total, clipped, divergence = (self._sum(value) / tokens for value in sums.tolist())
        return Update(total, norm, clipped, divergence)

    def mean(self, values: list[float]) -> float:
        """All ranks, collective: the mean of all ranks' values."""
        return self._sum(sum(values)) / self._sum(float(len(values)))

    def _sum(self, value: float) -> float:
        """All ranks, collective: the sum over the ranks that read different data."""
        box = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(box)
        return float(box) * self._layout.data_size / dist.get_world_size()


class Sampler:
    """Draws each step's problems and has them answered; the same calls on every rank.

    Args:
        inference: The servers.
        job: The settings.
        layout: The meshes.
        task: The problems and their judge.
    """

    def __init__(self, inference: Inference, job: GrpoJobConfig, layout: Layout, task: Task) -> None:
        self._inference, self._job, self._layout, self._task = inference, job, layout, task
        self._random = random.Random(job.train.seed)  # noqa: S311 - problems, no secrets

    def rollouts(self, step: int, version: int) -> list[Rollout]:
        """This rank's rollouts of a step. Collective.

        Args:
            step: The step.
            version: What was pushed last.

        Raises:
            RuntimeError: The servers hold other weights than were pushed last, before or after.
        """
        problems = [self._task.draw(self._random) for _ in range(self._job.grpo.prompts)]
        mine = problems[self._layout.data_rank :: self._layout.data_size]
        on_rank0(lambda: self._check_version(version))
        rollouts: list[Rollout] = []
        error: Exception | None = None
        if self._layout.tp is None or self._layout.tp.get_local_rank() == 0:
            try:
                rollouts = roll_out(
                    self._inference,
                    self._task,
                    mine,
                    samples=self._job.grpo.samples,
                    max_tokens=self._job.data.max_tokens,
                    temperature=self._job.grpo.temperature,
                    version=version,
                    seed=(self._job.train.seed * 1009 + step) * 1013 + self._layout.data_rank,
                )
            except Exception as caught:  # noqa: BLE001 - raised below, after the others know
                error = caught
        together(error)
        rollouts = self._layout.same_on_tp(rollouts)
        on_rank0(lambda: self._check_version(version))
        return rollouts

    def _check_version(self, version: int) -> None:
        told = self._inference.version()
        if told is not None and told != str(version):
            raise RuntimeError(
                f"the server holds weights of version {told!r}, and {version} was pushed last: does another job push into it?"
            )


def together(error: Exception | None) -> None:
    """All ranks, collective: raise on all of them if one has an error."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text is not None:
            raise RuntimeError(f"on rank {rank}: {text}")


def run(job: GrpoJobConfig, device: torch.device, out: Path) -> None:
    """Run the job on this rank. Collective over all ranks of torchrun.

    1) start the server in the background, build and shard the policy, wait for the server, push version 0;
    2) each step: rollouts; the server sleeps; the update; the server's weights wake, push, its cache wakes.

    Args:
        job: The settings.
        device: This rank's device.
        out: The run directory; rank 0 writes to it.
    """
    is_first, began = dist.get_rank() == 0, time.monotonic()
    task = task_of(job.data)
    layout = layout_of(job.mesh, device.type)
    if job.grpo.prompts % layout.data_size:
        raise ValueError(
            f"grpo.prompts={job.grpo.prompts} must be a multiple of the {layout.data_size} data-parallel ranks"
        )
    with ExitStack() as stack:
        report = stack.enter_context(Report(steps=job.train.steps, active=is_first, machine=job.logger.json))
        metrics = stack.enter_context(Metrics(out, active=is_first and job.logger.metrics))
        left = out if job.logger.metrics else None
        model_dir = model_dir_on_all(job, out)
        if job.grpo.temperature != 1:  # vLLM else tells the log-probabilities of before it
            job.inference.extra_args = ["--logprobs-mode", "processed_logprobs", *job.inference.extra_args]
        inference = start_servers(job.inference, model_dir, out, stack, report, device)
        model = model_of(job, model_dir, layout)
        learner, sampler = Learner(model, job, layout, device), Sampler(inference, job, layout, task)
        inference.wait(report.waiting)
        report.ready(server_s := time.monotonic() - began)
        sender = stack.enter_context(sender_of(job, model, inference.client, out, report.callbacks(left)))
        pusher = Pusher(inference, job.hook, sender, report)
        pusher.rest(Stages())
        report.pushes.append(Push.of(pusher.push(0, Stages())))
        version = 0
        for step in range(1, job.train.steps + 1):
            stages, stats = Stages(), None
            with stages("rollout"):
                rollouts = sampler.rollouts(step, version)
                staleness = step - 1 - min(r.version for r in rollouts)
            if staleness > job.grpo.max_staleness:
                raise RuntimeError(f"rollouts are {staleness} steps old, more than grpo.max_staleness allows")
            pusher.rest(stages)
            with stages("train"):
                update = learner.update(rollouts)
            reward = learner.mean([r.reward for r in rollouts])
            length = learner.mean([float(len(r.token_ids)) for r in rollouts])
            if step % job.hook.every == 0 or step == job.train.steps:
                stats, version = pusher.push(step, stages), step
                report.pushes.append(Push.of(stats, loss=update.loss))
            else:
                pusher.wake(stages)
            metrics.row(
                step,
                stages,
                stats,
                reward=reward,
                loss=update.loss,
                grad_norm=update.grad_norm,
                clipped=update.clipped,
                divergence=update.divergence,
                staleness=staleness,
                version=version,
                completion_tokens=length,
                sample=rollouts[0].text[:200],
            )
            report.step(step, update.loss)
            report.say(f"step {step}: reward {reward:.3f}, {_times(metrics.rows[-1]['time'])}")
        summary = _summary(metrics, pusher.sleeps)
        report.say(
            f"a step takes {summary['stage_median_s']['total']:.2f} s (median after the first): "
            f"{_times(summary['stage_median_s'])}; the sync is {summary['sync_share']:.2%} of it"
        )
        report.finish(
            {
                **summary,
                "world_size": dist.get_world_size(),
                "server_ready_s": server_s,
            },
            out=out if job.logger.report else None,
            title=title_of("grpo", job),
            config=job,
        )


def _times(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items() if name != "total")


def _summary(metrics: Metrics, slept: bool) -> dict[str, Any]:
    rows = metrics.rows
    medians = stage_medians(rows)
    few = max(1, min(3, len(rows) // 2))
    return {
        "reward_first": round(statistics.fmean(row["reward"] for row in rows[:few]), 4),
        "reward_last": round(statistics.fmean(row["reward"] for row in rows[-few:]), 4),
        "stage_median_s": {name: round(value, 4) for name, value in medians.items()},
        "sync_share": round(medians.get("sync", 0.0) / medians["total"], 5),
        "max_staleness": max(row["staleness"] for row in rows),
        "slept": slept,
    }


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="grpo")
def _main(cfg: DictConfig) -> None:
    start(cfg, GrpoJobConfig, run)


def main() -> None:
    """Entry point of `python -m recipes.grpo`."""
    register_configs()
    quiet_other_ranks()
    _main()


if __name__ == "__main__":
    main()
