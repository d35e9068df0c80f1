"""A push with the servers ready for it: they sleep while the trainer works, wake in parts, pause, and resume."""

from __future__ import annotations

import torch

from fsdp_ipc import TransferStats, WeightSender
from recipes.config import HookConfig
from recipes.inference import Inference
from recipes.job import Stages
from recipes.ranks import on_rank0
from recipes.report import Report


class Rhythm:
    """What happens to the servers around training and a push, in the one order that is safe. Rank 0 calls it.

    Nothing may run on a server whose weights are awake and whose cache is not (vllm-project/vllm#44395): with several
    replicas a dummy batch does so by itself. So generation is paused before anything sleeps, and resumed only after all
    is awake and the cache of the old weights is gone.

    Args:
        inference: The servers.
        config: The settings.
    """

    def __init__(self, inference: Inference, config: HookConfig) -> None:
        self._client, self._config = inference.client, config
        self.sleeps = config.sleep_level > 0 and inference.can_sleep

    def before_training(self) -> None:
        """The rollouts are in: give the GPU to the trainer."""
        if self.sleeps:
            self._client.pause("wait")
            self._client.sleep(self._config.sleep_level, mode="wait")

    def before_push(self) -> None:
        """Training is done: weights need their memory, the cache does not yet."""
        if self.sleeps:
            self._client.wake_up("weights")
        elif self._config.pause:
            self._client.pause("wait")

    def after_push(self) -> str | None:
        """The new weights are in: go on generating with them. Returns a warning for the log, if there is one."""
        if self.sleeps:
            self._client.wake_up("kv_cache")
        done: bool | None = None
        if self._config.reset_prefix_cache:
            done = self._client.reset_prefix_cache()
        if self.sleeps or self._config.pause:
            self._client.resume()
        return (
            "the server did not reset its prefix cache: old prompts may use old weights"
            if done is False
            else None
        )


class Pusher:
    """Calls the servers' rhythm on rank 0 and pushes on all ranks; built on all of them, collectively.

    Args:
        inference: The servers.
        config: The settings.
        sender: Of all ranks.
        report: Is told of every push.
    """

    def __init__(
        self, inference: Inference, config: HookConfig, sender: WeightSender, report: Report
    ) -> None:
        self._rhythm: Rhythm | None = None
        self._sender, self._report = sender, report

        def meet() -> bool:
            self._rhythm = Rhythm(inference, config)
            return self._rhythm.sleeps

        self.sleeps = on_rank0(meet)

    def call(self, name: str) -> None:
        """All ranks, collective: a step of the rhythm."""
        # On rank 0 alone there is a rhythm.
        warning = on_rank0(lambda: getattr(self._rhythm, name)())  # noqa: PLW0108
        if warning:
            self._report.say(warning)

    def rest(self, stages: Stages) -> None:
        """All ranks, collective: nothing is asked of the servers for now; the GPUs are the trainer's."""
        with stages("sleep"):
            self.call("before_training")

    def wake(self, stages: Stages) -> None:
        """All ranks, collective: rollouts again, with the weights of before."""
        if self.sleeps:
            with stages("wake"):
                _free_cached_memory()
                self.call("before_push")
                self.call("after_push")

    def push(self, version: int, stages: Stages) -> TransferStats:
        """All ranks, collective: push the weights of now, with the servers ready for it."""
        with stages("wake"):
            if self.sleeps:
                _free_cached_memory()
            self.call("before_push")
        with stages("sync"):
            stats = self._sender.send(version)
        with stages("wake"):
            self.call("after_push")
        return stats


def _free_cached_memory() -> None:
    # The server needs back what the trainer's allocator keeps for itself.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
