"""Group-relative policy optimization: advantages, the clipped policy loss, and what it tells. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from recipes.config import GrpoConfig
from recipes.rollouts import Batch, Rollout


def group_advantages(rollouts: Sequence[Rollout], *, normalize: bool) -> list[float]:
    """How much better each rollout is than the others of its prompt.

    Args:
        rollouts: Rollouts of one rank, with their groups.
        normalize: Divide by the standard deviation of the group's rewards.

    Returns:
        One advantage each; 0 where all rewards of a group are the same.
    """
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    scales = {g: (statistics.pstdev(rewards) + 1e-4 if normalize else 1.0) for g, rewards in groups.items()}
    means = {g: statistics.fmean(rewards) for g, rewards in groups.items()}
    return [(r.reward - means[r.group]) / scales[r.group] for r in rollouts]


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a batch, summed over the completions' tokens.

    Attributes:
        total: To be divided by the number of tokens.
        clipped: Tokens whose ratio was clipped.
        divergence: Sum of an estimate of the Kullback-Leibler divergence from the rollouts' policy.
    """

    total: torch.Tensor
    clipped: float
    divergence: float


def policy_loss(logits: torch.Tensor, batch: Batch, config: GrpoConfig) -> PolicyLoss:
    """Clipped policy loss with the rollouts' own log-probabilities.

    Args:
        logits: `[n, length - 1, vocab]`, of the tokens but the last.
        batch: The rollouts.
        config: Clipping and temperature.
    """
    targets = batch.tokens[:, 1:]
    scaled = logits.float() / config.temperature
    logprobs = -F.cross_entropy(scaled.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    # Bounded, so that one token that the two sides see very differently cannot become infinite.
    log_ratio = torch.where(batch.is_completion, logprobs - batch.logprobs, 0.0).clamp(-10, 10)
    ratio = log_ratio.exp()
    advantages = batch.advantages[:, None]
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantages, bounded * advantages)
    divergence = (ratio - 1 - log_ratio).detach()
    return PolicyLoss(
        total=-(objective * batch.is_completion).sum(),
        clipped=float(((bounded * advantages < ratio * advantages) & batch.is_completion).sum()),
        divergence=float((divergence * batch.is_completion).sum()),
    )
