"""Rank-local delivery of experts over the stock wire, whose workers can't be asked which experts they hold.

From vLLM 0.29 an update may hold an entry for each worker. Which experts a worker holds then follows from its rank and from
the server's placement, which the user states and the server's own settings must not contradict: a worker that lacks some
of its experts would serve uninitialised memory, so in any doubt every worker gets everything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.delivery import ExpertPlacement
from fsdp_ipc.wire.stock import StockDialect

logger = logging.getLogger(__name__)

PlacementStrategy = Literal["linear", "round_robin"]

# With data parallelism, vLLM places experts in turn for these only, and else in line, whatever it was told.
_ROUND_ROBIN_BACKENDS = ("deepep_low_latency", "nixl_ep")


def stock_placement(
    strategy: PlacementStrategy | None, dialect: StockDialect, client: WeightSyncClient, num_ranks: int
) -> ExpertPlacement | None:
    """Sender: how the server's workers hold experts, or None if each of them must get all; the log says why.

    Args:
        strategy: What the user states, None for nothing.
        dialect: Of the server.
        client: Asked for the server's settings, where it can ask.
        num_ranks: Trainer ranks; rank i must be the one beside worker i.
    """
    if strategy is None:
        return None
    cause = None
    if not dialect.list_payload:
        cause = f"{dialect} takes the same payload for all workers"
    elif hasattr(client, "server_info"):
        info = client.server_info()
        if len(info.num_workers) > 1:
            cause = f"there are {len(info.num_workers)} servers, each with all of the experts"
        elif info.world_size is not None and info.world_size != num_ranks:
            cause = f"there are {info.world_size} workers and {num_ranks} trainer ranks"
        elif info.parallel_config is not None:
            cause = _contradiction(strategy, info.parallel_config)
    if cause is not None:
        logger.warning("every worker gets all experts, although expert_placement=%r: %s", strategy, cause)
        return None
    logger.info("each worker gets its own experts only, by %s placement over %d workers", strategy, num_ranks)
    return ExpertPlacement(strategy, num_ranks)


def _contradiction(strategy: PlacementStrategy, config: Mapping[str, Any]) -> str | None:
    """Why the server's own settings do not let a worker's experts be told from its rank; None if they do."""
    balancer = config.get("eplb_config")
    redundant = balancer.get("num_redundant_experts", 0) if isinstance(balancer, Mapping) else 0
    if not config.get("enable_expert_parallel", False):
        return "the server runs without expert parallelism, so every worker holds all experts"
    if config.get("enable_eplb", False):
        return "the server balances its experts (EPLB), so they move"
    if redundant or config.get("num_redundant_experts", 0):
        return "the server has redundant experts"
    if (stated := config.get("expert_placement_strategy", "linear")) != strategy:
        return f"the server places them by {stated!r}"
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        if config.get(name, 1) != 1:
            return f"the server has {name}={config[name]}"
    if strategy == "round_robin" and config.get("data_parallel_size", 1) > 1:
        backend = config.get("all2all_backend")
        if backend not in _ROUND_ROBIN_BACKENDS:
            return f"vLLM places experts in line with the all2all backend {backend!r}"
    return None
