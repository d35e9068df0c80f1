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
        logger.warning(
            "Could not read this model's expert placement; all experts will be sent.", exc_info=True
        )
        return None


def _held_experts(model: nn.Module) -> dict[str, list[int]] | None:
    held: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        # The layer's table from global id to local slot, or -1: a tensor only under expert parallelism.
        table: Any = getattr(module, "_expert_map", None)
        if not isinstance(table, torch.Tensor):
            continue
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        manager = getattr(module, "expert_map_manager", None)
        moving = getattr(parallel, "enable_eplb", False) or getattr(manager, "num_redundant_experts", 0)
        # Shared experts that vLLM fused into the table have no global id in a checkpoint.
        if moving or getattr(manager, "num_fused_shared_experts", 0):
            why = "vLLM moves or repeats experts" if moving else "shared experts are among them"
            logger.info("All experts of each layer will be sent to every worker: %s (%s).", why, name)
            return None
        local = sorted((slot, expert) for expert, slot in enumerate(table.tolist()) if slot >= 0)
        if [slot for slot, _ in local] != list(range(len(local))):
            return None
        held[name.removesuffix(".routed_experts")] = [expert for _, expert in local]
    return held or None
