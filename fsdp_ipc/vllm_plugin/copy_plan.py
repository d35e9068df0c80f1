"""The verified copy plan: what vLLM's loaders copy, learned once, proved, and replayed.

The first sync goes through vLLM's layer-wise reload while `CopyRecorder` watches. A module whose live tensors came out as
plain copies of incoming tensors, bit for bit, joins the plan; later syncs copy straight from the trainer's memory into
its live tensors, one `torch._foreach_copy_` a bucket. All other modules keep going through vLLM's reload, in the same
sync. The plan is dropped, and learned again, when the names change or a live tensor moved.

A module stays on the loader if its tensors are computed (quantised, repacked), if it keeps state outside its
parameters, if attention derives weights from it, or if the data could not have shown a reordering (constant data; tried
again in the next sync).
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fsdp_ipc.vllm_plugin.copy_lesson import Lesson
from fsdp_ipc.vllm_plugin.copy_memory import Piece
from fsdp_ipc.vllm_plugin.copy_replay import CopyPlan, kernels_of
from fsdp_ipc.vllm_plugin.loader import (
    LayerwiseLoader,
    LoadCounts,
    NamedTensors,
    WeightLoader,
    half_open_layers,
    heal,
)

__all__ = ["CopyPlanLoader"]

logger = logging.getLogger(__name__)


class CopyPlanLoader:
    """Loads syncs into one model: through vLLM's reload at first, by replaying proven copies afterwards.

    Implements `WeightLoader`.

    Args:
        model: vLLM's model on this worker.
        model_config: vLLM's `ModelConfig` of that model.
        reload: Makes the loader that is the reference, for a model (or a part of one) and a callback that gets each
            incoming tensor. Default: `LayerwiseLoader`.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        *,
        reload: Callable[[nn.Module, Callable[[str, torch.Tensor], None] | None], WeightLoader] | None = None,
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.examined = False
        """Whether the names of the sync were shown beforehand to fill every parameter."""
        self.casts: Mapping[str, torch.dtype] = {}
        self._reload = reload or (lambda part, seen: LayerwiseLoader(part, model_config, on_incoming=seen))
        self._plan: CopyPlan | None = None
        self._inner: WeightLoader | None = None
        self._lesson: Lesson | None = None
        self._unexamined: str | None = None
        """The key of a sync whose live tensors were not looked at yet, but for their memory."""
        self._num_tensors = 0
        if reload is None:
            LayerwiseLoader(model, model_config)  # refuses now what it could not load later

    def drop(self, reason: str) -> None:
        """Forget the plan. The next sync goes through vLLM's reload and learns a new one."""
        if self._plan is not None:
            logger.info("The copy plan is dropped: %s.", reason)
        self._plan = None

    def where(self) -> tuple[object, Callable[[str], list[tuple[torch.Tensor, Piece]] | str]]:
        """Where incoming tensors lie after `finish`, and an object that is another whenever that may have changed."""
        plan = self._plan
        if plan is None or not plan.learned or not plan.holds():
            return object(), lambda _: "no copy plan was learned"
        return plan.sources, plan.landed

    def start(self, plan_key: str) -> None:
        """Open an update: see what can be replayed, and open vLLM's reload for the rest."""
        self.abort()
        self._num_tensors = 0
        digest, _, epoch = plan_key.rpartition(":")
        if self._plan is not None and self._plan.digest != digest:
            self.drop("the names changed")
        if self._plan is not None:
            # Where nothing goes through the loader, the rest is looked at while the GPU copies.
            later = self._plan.learned and self._plan.part is None
            if not (self._plan.reaches() if later else self._plan.holds()):
                self.drop("a parameter's memory moved")
            elif later:
                self._unexamined = plan_key
        if self._plan is None or self._plan.part is not None:
            self._heal()
        plan = self._plan
        if plan is None:
            plan = self._plan = CopyPlan(digest=digest, kernels=kernels_of(self.model))
        plan.bind(epoch)
        part = self.model if not plan.learned else plan.part
        if part is None:
            return
        if not getattr(self.model, "_do_torchao_reload", False) and plan.has_doubts():
            self._lesson = Lesson(self.model, plan)
        self._inner = self._reload(part, self._lesson.recorder.incoming if self._lesson else None)
        if isinstance(self._inner, LayerwiseLoader):
            self._inner.examined, self._inner.casts = self.examined, self.casts
        self._inner.start(plan_key)
        if self._lesson is not None:
            self._lesson.recorder.expect(part.modules())

    def load(self, bucket: int, tensors: NamedTensors, *, keep_alive: bool) -> None:
        """Load one bucket. Work on the device is only queued; the caller waits for it before the memory is reused.

        Args:
            bucket: Its number.
            tensors: Its tensors. The same list object as in the last sync, while neither names nor memory changed.
            keep_alive: Whether the tensors stay valid until `finish`.
        """
        plan = self._opened()
        self._num_tensors += len(tensors)
        rest = plan.replay(bucket, tensors, self.casts) if plan.learned else tensors
        plan_key, self._unexamined = self._unexamined, None
        if plan_key is not None and not plan.holds():
            # The trainer still has all of this sync, so it can begin anew.
            self.drop("a parameter was replaced")
            self.start(plan_key)
            self._num_tensors += len(tensors)
            rest = tensors
        if rest and self._inner is not None:
            with self._watched():
                # A watched sync hands out copies, so that memory which outlives the reload shows who keeps it.
                self._inner.load(bucket, rest, keep_alive=keep_alive and self._lesson is None)

    def finish(self) -> LoadCounts:
        """Close the update; decide what the next one can replay."""
        plan = self._opened()
        was_learned, replayed, reasons = plan.learned, plan.num_proven, plan.reasons()
        queued = self._inner is not None
        if self._inner is not None:
            with self._watched():
                counts = self._inner.finish()
            self._inner = None
            if self._lesson is None and not was_learned:
                self._plan = None
                return counts
        if self._lesson is not None:
            lesson, self._lesson = self._lesson, None
            lesson.conclude()
            if not was_learned:
                reasons = Counter({"first sync with these names": lesson.num_loaded()})
                logger.info(
                    "Copy plan: %d parameters will be replayed, %d stay on vLLM's loaders%s.",
                    plan.num_proven,
                    sum(plan.reasons().values()),
                    f" {dict(plan.reasons())}" if plan.reasons() else "",
                )
        plan.learned = True
        return LoadCounts(
            num_tensors=self._num_tensors,
            replayed_params=replayed,
            loader_params=sum(reasons.values()),
            reasons=dict(reasons),
            queued=queued,
        )

    def abort(self) -> None:
        """Close an open update without its weights, and forget what it taught. Idempotent."""
        self._lesson = self._unexamined = None
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.abort()
            if self._plan is not None and not self._plan.learned:
                self._plan = None

    def _opened(self) -> CopyPlan:
        if self._plan is None:
            raise RuntimeError("No update is open; call start first.")
        return self._plan

    def _heal(self) -> None:
        """Put back what somebody else's reload left open."""
        if "vllm" in sys.modules and half_open_layers(self.model):
            logger.warning("A reload of this model was left half-open; restoring its parameters first.")
            heal(self.model, self.model_config)

    def _watched(self) -> AbstractContextManager[Any]:
        return self._lesson.recorder if self._lesson is not None else nullcontext()
