"""The optimizer of the settings, its schedule, and gradient clipping over parameters of several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipes.config import OptimConfig


class Optimization:
    """Optimizer and schedule of a model; the same calls on every rank.

    Args:
        parameters: What is trained.
        config: The settings.
        steps: Steps of the whole job, for the schedule.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimConfig, steps: int) -> None:
        self._config = config
        # A group a mesh: one kernel over many parameters takes those of one mesh only.
        self._groups = by_mesh(parameters)
        self.optimizer = optimizer_of(self._groups, config)
        self._schedule = schedule_of(self.optimizer, config, steps)

    def step(self) -> float:
        """Clip, take one step, forget the gradients. Collective. Returns the norm before clipping."""
        norm = clip_grad_norm(self._groups, self._config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._schedule.step()
        return norm


def optimizer_of(groups: Iterable[list[nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of the settings, with a parameter group for each of the lists."""
    params = [{"params": group} for group in groups]
    if config.name == "sgd":
        return torch.optim.SGD(params, lr=config.lr, weight_decay=config.weight_decay)
    first, second = config.betas
    return torch.optim.AdamW(params, lr=config.lr, betas=(first, second), weight_decay=config.weight_decay)


def schedule_of(
    optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate's course: warm-up, then what `schedule` says, over `steps` optimizer steps."""

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "constant":
            return warmup
        return warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Trainable parameters, those of one mesh together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def clip_grad_norm(groups: Iterable[list[nn.Parameter]], max_norm: float) -> float:
    """All ranks, collective: scale all gradients down together if their norm is larger than `max_norm`.

    Args:
        groups: Parameters, each list of one mesh.
        max_norm: Largest norm that stays.

    Returns:
        The norm before.
    """
    squares = 0.0
    groups = list(groups)
    for group in groups:
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    total = math.sqrt(squares)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, torch.tensor(total, device=group[0].device))
    return total
