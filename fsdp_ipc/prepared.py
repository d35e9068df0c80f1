"""A sender for whatever a trainer library has made of a model: looks, says what it found, refuses what can't be right.

accelerate, `transformers.Trainer` and the like decide at run time whether a model is sharded at all. `Accelerator(cpu=True,
fsdp_plugin=…)`, for one, silently makes it DDP.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.naming import Naming
from fsdp_ipc.sender import WeightSender
from fsdp_ipc.source import DTensorSource, refuse_flattened

logger = logging.getLogger(__name__)

Kind = Literal["fsdp2", "dtensor", "ddp", "plain"]


@dataclass(frozen=True)
class Found:
    """How a model is held by the ranks.

    Attributes:
        kind: `"fsdp2"`; `"dtensor"` (tensor parallel alone, or sharded by hand); `"ddp"` or `"plain"`: whole on every rank.
        text: The same for people, with what to do where it is not what one wants.
    """

    kind: Kind
    text: str


def look_into(model: nn.Module, accelerator: Any = None) -> Found:
    """Find out how a model is held. Not collective.

    Args:
        model: Prepared, or the raw one that was prepared: accelerate shards in place, and DDP shares the parameters.
        accelerator: The `accelerate.Accelerator`, which knows why a model is not sharded.

    Raises:
        TypeError: `model` is no module.
        ValueError: FSDP1 or DeepSpeed ZeRO-3 shards it, which can't be read as whole parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    refuse_flattened(model)
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    is_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    kind: Kind
    if is_fsdp or sharded:
        kind = "fsdp2" if is_fsdp else "dtensor"
        meshes = Counter(str(tuple(p.device_mesh.shape)) for p in sharded)
        over = ", ".join(f"{count} over a mesh of {shape}" for shape, count in meshes.items())
        how = "sharded with FSDP2" if is_fsdp else "held as DTensors without FSDP2"
        text = f"{how}: of {sum(1 for _ in model.parameters())} parameters {over or 'none is a DTensor'}"
    else:
        kind = "ddp" if _is_ddp(model) else "plain"
        text = "wrapped in DDP" if kind == "ddp" else "not wrapped"
        text += ": every rank holds all of it, and nothing is gathered"
        text += _cure(model, accelerator)
    return Found(kind, f"{_name(model)} is {text}")


def sender_for(
    model: nn.Module,
    client: WeightSyncClient | None,
    *,
    accelerator: Any = None,
    dtype: torch.dtype | None = None,
    keep: Sequence[str] | None = None,
    naming: Naming | None = None,
    **settings: Any,
) -> WeightSender:
    """All ranks, collective: a sender for a prepared or raw model, which says in the log (rank 0) what it found.

    Args:
        model: As `accelerator.prepare` returned it or took it, or as a `transformers.Trainer` has it.
        client: As for `WeightSender`.
        accelerator: The `accelerate.Accelerator`, if there is one.
        dtype: As for `DTensorSource`.
        keep: As for `DTensorSource`.
        naming: As for `DTensorSource`.
        settings: Further arguments of `WeightSender`.

    Raises:
        ValueError: As `look_into`, and as `WeightSender`.
    """
    found = look_into(model, accelerator)
    if dist.is_initialized() and dist.get_rank() == 0:
        whole = found.kind in ("ddp", "plain") and dist.get_world_size() > 1
        logger.log(logging.WARNING if whole else logging.INFO, "weight sync: %s", found.text)
    source = DTensorSource(model, dtype=dtype, keep=keep, naming=naming)
    if "group" not in settings and source.mesh() is None and dist.is_initialized():
        # No mesh to be had from plain tensors; every rank has the model.
        settings["group"] = getattr(model, "process_group", None) or dist.group.WORLD
    return WeightSender(source, client, **settings)


def _inner(model: nn.Module) -> nn.Module:
    """Without DDP and `torch.compile` around it."""
    while True:
        inner = (
            model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        )
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _name(model: nn.Module) -> str:
    """The class as the user wrote it; `fully_shard` puts one in front of it."""
    kind = type(_inner(model))
    return next((k for k in kind.__mro__ if not issubclass(k, FSDPModule)), kind).__name__


def _is_ddp(model: nn.Module) -> bool:
    compiled = getattr(model, "_orig_mod", None)
    return isinstance(model, DistributedDataParallel) or isinstance(compiled, DistributedDataParallel)


def _cure(model: nn.Module, accelerator: Any) -> str:
    """What to do if sharding was asked for and did not happen."""
    if accelerator is None:
        return ". If it should be sharded, pass the module that `fully_shard` or `accelerator.prepare` was called on"
    kind = str(getattr(accelerator, "distributed_type", "")).removeprefix("DistributedType.")
    if kind == "FSDP":
        return ". The accelerator shards with FSDP, but has not prepared this model: call accelerator.prepare(model) first"
    prepared = any(_inner(known) is _inner(model) for known in getattr(accelerator, "_models", ()))
    return ("" if prepared else ". The accelerator has not prepared it") + (
        f". The accelerator runs as {kind}, which does not shard: on a CPU accelerate falls back to DDP whatever its FSDP "
        "plugin says, and elsewhere it needs ACCELERATE_USE_FSDP=true or an fsdp_plugin"
    )
