"""A push after every Nth optimizer step, in loops that people already have.

Each hook calls `WeightSender.send`, which is collective: it must be in place on every trainer rank, and every rank must
take the same steps. Where one rank steps alone, `send` raises on it after the control time-out (`Timeouts.control_s`)
and names the others; where ranks are a step apart, it raises on all of them at once and names the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from torch import nn
from torch.optim import Optimizer

from fsdp_ipc.stats import TransferStats


class Sender(Protocol):
    """What a hook needs of a `WeightSender`."""

    def send(self, version: int | str | None = None) -> TransferStats:
        """All ranks, collective: push the weights of now."""

    def close(self) -> None:
        """This rank: give everything back."""


class WeightSyncHook:
    """Pushes the weights after every `every` steps of an optimizer; a context manager that ends with `remove`.

    All ranks. It hangs on `Optimizer.register_step_post_hook`, so it fires for steps that were taken: not for
    accumulated micro-batches, and not for a step that a gradient scaler left out. With several optimizers it fires when
    the last of them has stepped, and not before each of them has once; where a scaler leaves out the last one only, the
    next iteration pushes what the others did. The version is the number of steps (of the last optimizer).

    Args:
        optimizers: The optimizer, or all of those that change the weights, in the order in which they step. A wrapper
            with the real one as its `optimizer` (accelerate's) is looked through.
        sender: The sender; it stays the caller's to close.
        every: Steps between two pushes.
        on_sync: Called with the stats of every push, on every rank.

    Raises:
        ValueError: No optimizer, or `every` is less than 1.
        TypeError: Something that is no optimizer.
    """

    __module__ = "fsdp_ipc"

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        sender: Sender,
        *,
        every: int = 1,
        on_sync: Callable[[TransferStats], None] | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: expected 1 or more steps between two pushes")
        given = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        if not given:
            raise ValueError("no optimizer: pass the one whose steps change the weights")
        real = [_unwrapped(optimizer) for optimizer in given]
        self._sender, self._every, self._on_sync = sender, every, on_sync
        self._steps = {id(optimizer): 0 for optimizer in real}
        self._last = id(real[-1])
        self._handles = [optimizer.register_step_post_hook(self._stepped) for optimizer in real]

    @property
    def steps(self) -> int:
        """Steps that the last optimizer has taken since the hook is in place."""
        return self._steps[self._last]

    def remove(self) -> None:
        """Stop pushing. Idempotent; the sender stays open."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._steps[id(optimizer)] += 1
        # Counting the steps of all would push in the middle of an iteration, once a scaler has left one of them out.
        if id(optimizer) == self._last and self.steps % self._every == 0 and all(self._steps.values()):
            stats = self._sender.send(self.steps)
            if self._on_sync is not None:
                self._on_sync(stats)


def trainer_callback(make_sender: Callable[[nn.Module], Sender], *, every: int = 1) -> Any:
    """A `transformers.TrainerCallback` that pushes after every `every` optimizer steps; needs transformers.

    All ranks. The sender is made when training begins, with the model as the trainer has wrapped and sharded it, and
    closed when it ends; the version is the trainer's global step.

    Args:
        make_sender: From the trainer's model to a sender, for example
            `lambda model: sender_for(model, HTTPWeightSyncClient(url))`. Called on every rank.
        every: Steps between two pushes.

    Raises:
        ValueError: `every` is less than 1.
    """
    if every < 1:
        raise ValueError(f"every={every}: expected 1 or more steps between two pushes")
    from transformers import TrainerCallback

    class WeightSyncCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        sender: Sender | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            del args, state, control
            self._close()  # a training that broke off had no end
            self.sender = make_sender(model)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            if self.sender is not None and state.global_step % every == 0:
                self.sender.send(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state, control
            self._close()

        def _close(self) -> None:
            if self.sender is not None:
                self.sender.close()
                self.sender = None

    return WeightSyncCallback()


def _unwrapped(optimizer: Any) -> Optimizer:
    while not isinstance(optimizer, Optimizer) or type(optimizer).__name__ == "AcceleratedOptimizer":
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        optimizer = inner
    return optimizer
