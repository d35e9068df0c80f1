"""Which experts this worker holds, told to the trainer so that it need not send the others."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def held_experts(model: nn.Module) -> dict[str, list[int]] | None:
    """Global expert ids by layer prefix (`"model.layers.0.mlp.experts"`), in local order.

    Only for models under plain expert parallelism. None where every worker holds every expert, and where placement is
    anything but fixed: load balancing or redundant experts move experts after the handshake.
    """
    try:
        return _held_experts(model)
    except Exception:
        # Sending all experts is always right; a vLLM release that names things differently costs speed only.
        logger.warning("Could not read this model's expert placement; all experts will be sent.", exc_info=True)
        return None


def _held_experts(model: nn.Module) -> dict[str, list[int]] | None:
    held: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        # `_expert_map` is the layer's table, global id to local slot or -1, present only under expert parallelism.
        table: Any = getattr(module, "_expert_map", None)
        if not isinstance(table, torch.Tensor):
            continue
        if getattr(module, "enable_eplb", False):
            return None
        slots = table.tolist()
        local = sorted((slot, expert) for expert, slot in enumerate(slots) if slot >= 0)
        if [slot for slot, _ in local] != list(range(len(local))):
            return None
        held[name.removesuffix(".routed_experts")] = [expert for _, expert in local]
    return held or None
