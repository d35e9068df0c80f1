"""The toy trainer of the sender's tests: odd widths, a tie, a bias, a persistent buffer, fp32 beside bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender


class Toy(nn.Module):
    """Every parameter is uneven over 2 and over 4 ranks; one has a single row."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.one = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias_of_router", torch.linspace(6.8, 7.1, 5))
        self.register_buffer("inv_freq", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return self.head(self.norm(hidden)) + self.one(hidden)


def build(seed: int = 1, width: int = 13) -> Toy:
    """The unsharded toy of a seed."""
    torch.manual_seed(seed)
    return Toy(width)


def shard(model: Toy, mesh: DeviceMesh) -> Toy:
    """FSDP2, the tied pair and the norm in the root's group."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module) -> None:
    """One optimizer step, the same on every rank count (every rank sees the same tokens)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """All ranks, collective: what a worker must hold of a sharded toy, by torch's own gather of its state dict."""
    state = model.state_dict()
    return _cast({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}, dtype)


def expected(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """What a worker must hold of an unsharded toy."""
    return _cast(model.state_dict(), dtype)


def _cast(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    wanted = {}
    for name, value in state.items():
        if name == "head.weight":
            continue
        cast = dtype is not None and name != "bias_of_router"
        wanted[name] = value.to(dtype) if cast else value.clone()
    return wanted


def make_sender(
    model: nn.Module,
    url: str | Sequence[str],
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    **settings: Any,
) -> WeightSender:
    """A sender with a client on every rank (only the sender's is used)."""
    return WeightSender(DTensorSource(model, dtype=dtype), HTTPWeightSyncClient(url), group=group, **settings)
