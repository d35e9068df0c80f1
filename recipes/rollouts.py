"""Rollouts: completions of a step's prompts with their log-probabilities, and their rewards, asked for concurrently."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from recipes.inference import Inference
from recipes.tasks import Problem, Task


@dataclass(frozen=True)
class Rollout:
    """One completion.

    Attributes:
        group: Number of its prompt within the rank's share.
        prompt_ids: Tokens of the prompt.
        token_ids: Tokens of the completion.
        logprobs: Log-probability of each of them under the weights that it was made with.
        text: The completion.
        reward: Its reward.
        version: The weights that it was made with: the optimizer steps that they had taken.
    """

    group: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    reward: float
    version: int


def roll_out(
    inference: Inference,
    task: Task,
    problems: Sequence[Problem],
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
    version: int,
    seed: int,
) -> list[Rollout]:
    """This rank: ask for `samples` completions of each problem, all at once, over all servers in turn.

    Args:
        inference: The servers.
        task: Judges the completions.
        problems: This rank's share of the step's problems.
        samples: Completions a problem.
        max_tokens: Most tokens of a completion.
        temperature: Of the sampling.
        version: The weights that the servers hold.
        seed: Of this step's sampling on this rank.

    Returns:
        The rollouts, those of one problem together.

    Raises:
        RuntimeError: A server refused, or left out tokens or log-probabilities.
    """

    def ask(place: tuple[int, Problem, str]) -> list[Rollout]:
        group, problem, url = place
        body = {
            "prompt": problem.prompt,
            "n": samples,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,  # else a generation_config.json would cut the distribution that the loss assumes
            "top_k": -1,
            "logprobs": 0,  # those of the chosen tokens
            "return_token_ids": True,
            "seed": (seed * 10007 + group) % 2**31,
        }
        choices = inference.ask(url, None, body)
        return [_rollout(group, problem, task, choice, version) for choice in choices]

    places = list(
        zip(itertools.count(), problems, itertools.islice(itertools.cycle(inference.urls), len(problems)))
    )
    with ThreadPoolExecutor(max(1, len(places))) as pool:
        return [rollout for rollouts in pool.map(ask, places) for rollout in rollouts]


def _rollout(group: int, problem: Problem, task: Task, choice: dict[str, Any], version: int) -> Rollout:
    tokens, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not tokens or not prompt or logprobs is None or len(logprobs) != len(tokens):
        raise RuntimeError(
            f"expected a completion with token_ids, prompt_token_ids and as many logprobs, got {str(choice)[:500]}"
        )
    text = str(choice["text"])
    return Rollout(group, prompt, tokens, logprobs, text, task.reward(problem, text), version)


@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors, padded on the right; all `[num_rollouts, ...]`.

    Attributes:
        tokens: Prompts and completions, `[n, length]` int64.
        is_completion: Whether `tokens[:, t + 1]` belongs to the completion, `[n, length - 1]` bool.
        logprobs: Of the rollout, at the same places, `[n, length - 1]` fp32.
        advantages: `[n]` fp32.
    """

    tokens: torch.Tensor
    is_completion: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor

    def parts(self, size: int) -> list[Batch]:
        """Micro-batches of `size` rollouts or fewer."""
        fields = [self.tokens, self.is_completion, self.logprobs, self.advantages]
        return [Batch(*part) for part in zip(*(field.split(size) for field in fields), strict=True)]


def collate(rollouts: Sequence[Rollout], advantages: Sequence[float], device: torch.device) -> Batch:
    """Put rollouts into one batch.

    Args:
        rollouts: The rollouts.
        advantages: One each.
        device: Where to.
    """
    lengths = [len(r.prompt_ids) + len(r.token_ids) for r in rollouts]
    tokens = torch.zeros(len(rollouts), max(lengths), dtype=torch.int64)
    mask = torch.zeros(len(rollouts), max(lengths) - 1, dtype=torch.bool)
    logprobs = torch.zeros(len(rollouts), max(lengths) - 1)
    for row, rollout in enumerate(rollouts):
        begin, end = len(rollout.prompt_ids) - 1, lengths[row] - 1
        tokens[row, : lengths[row]] = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        mask[row, begin:end] = True
        logprobs[row, begin:end] = torch.tensor(rollout.logprobs)
    return Batch(
        tokens.to(device), mask.to(device), logprobs.to(device), torch.tensor(list(advantages)).to(device)
    )
