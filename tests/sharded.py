"""A toy model with awkward shapes, and the way of its weights from source to staging, for multi-rank tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ipc.full import Held
from fsdp_ipc.gather import Gatherer
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import SharedBuffer, allocate
from fsdp_ipc.layout import local_of
from fsdp_ipc.metadata import StreamItem
from fsdp_ipc.plan import PlanLimits, TransferPlan, build_plan
from fsdp_ipc.rows import TensorRow

POISON = 0xFF


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 13)
        self.down = nn.Linear(13, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Uneven widths, a tie, biases, buffers of both kinds, a 0-d parameter and buffer, an empty one, a one-row one."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.row = nn.Parameter(torch.randn(1, 10))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(10, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("shift", torch.tensor(0.25, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.row
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def toy(seed: int = 1, **kwargs: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**kwargs)


def expected(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What must arrive, of a model that was never sharded: buffers in their own dtype, the second name of a tie left out."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}  # leaves ties out
    buffers = dict(model.named_buffers())
    wanted = {}
    for name, tensor in model.state_dict().items():
        if name in buffers:
            wanted[name] = tensor
        elif name in tensors:
            keeps = dtype is None or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2
            wanted[name] = tensor if keeps else tensor.to(dtype)
    return wanted


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, order: bool = True) -> None:
    """Names, their order, dtypes, shapes and bytes."""
    assert (list(got) == list(wanted)) if order else (set(got) == set(wanted)), (list(got), list(wanted))
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, (name, got[name].dtype, tensor.dtype)
        assert got[name].shape == tensor.shape, (name, got[name].shape, tensor.shape)
        assert torch.equal(raw(got[name]), raw(tensor)), name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def change(module: nn.Module) -> None:
    """Double and negate every parameter in place, which is exact, whatever the layout."""
    with torch.no_grad():
        for parameter in module.parameters():
            local = getattr(parameter, "_local_tensor", parameter.data)
            if local.numel():
                local.copy_(local.to(torch.float32).mul(-2).to(local.dtype))


def into_shared_memory(module: nn.Module) -> list[SharedBuffer]:
    """Put every parameter's own piece where another process can read it, as a GPU's memory can be; keep what comes back."""
    buffers = []
    for parameter in dict.fromkeys(module.parameters()):
        local = local_of(parameter)
        if local.numel():
            buffers.append(allocate(local.nbytes, torch.device("cpu"), key="cpu:test:0"))
            shared = buffers[-1].bytes.view(local.dtype).view(local.shape)
            shared.copy_(local)
            if isinstance(parameter, DTensor):
                parameter._local_tensor = shared
            else:
                parameter.data = shared
    return buffers


class Transfer:
    """A plan, its memory and its gatherer; `run` moves everything once and gives what a worker would have read."""

    def __init__(
        self,
        items: Sequence[StreamItem],
        tensors: Sequence[Held],
        *,
        limits: PlanLimits | None = None,
        group: TrainerGroup | None = None,
        **plan_args: Any,
    ) -> None:
        ranks = (
            (tuple(range(dist.get_world_size())) if group is None and dist.is_initialized() else (0,))
            if group is None
            else group.ranks
        )
        self.me = ranks.index(dist.get_rank()) if dist.is_initialized() else 0
        self.plan: TransferPlan = build_plan(items, limits or PlanLimits(), group_ranks=ranks, **plan_args)
        sizes = [self.plan.slot_bytes] * self.plan.num_slots + list(self.plan.allocation_bytes)
        self.memory = [torch.full((size,), POISON, dtype=torch.uint8) for size in sizes]
        broadcast = group.broadcast if group is not None else None
        self.gatherer = Gatherer(self.plan, items, tensors, self.memory, broadcast)

    def rows(self) -> list[TensorRow]:
        """What this rank's worker reads, bucket after bucket."""
        rows = [*self.plan.rows, *self.plan.local_rows[self.me]]
        return sorted(rows, key=lambda row: row.bucket)

    def run(self, tensors: Sequence[Held]) -> dict[str, torch.Tensor]:
        got: dict[str, torch.Tensor] = {}
        rows = self.rows()
        for bucket in range(self.plan.num_buckets):
            self.gatherer.load(bucket, tensors)
            self.gatherer.gather(bucket)
            touched = set()
            for row in rows:
                if row.bucket != bucket:
                    continue
                assert row.name not in got, f"{row.name} comes twice"
                got[row.name] = read(self.memory[row.allocation], row).clone()
                touched.add(row.allocation)
            for allocation in touched:  # a slot is poisoned as soon as it was read
                self.memory[allocation].fill_(POISON)
        for memory in self.memory:
            assert not memory.requires_grad
            assert memory.grad_fn is None
        return got


def read(memory: torch.Tensor, row: TensorRow) -> torch.Tensor:
    dtype = getattr(torch, row.dtype)
    numel = torch.Size(row.shape).numel()
    assert row.offset % dtype.itemsize == 0, row
    assert row.offset + numel * dtype.itemsize <= memory.numel(), row
    return memory[row.offset : row.offset + numel * dtype.itemsize].view(dtype).view(row.shape)


def transfer(items: Sequence[StreamItem], tensors: Sequence[Held], **kwargs: Any) -> dict[str, torch.Tensor]:
    return Transfer(items, tensors, **kwargs).run(tensors)


def several_buckets(items: Sequence[StreamItem], at_least: int = 4, **limits: Any) -> PlanLimits:
    """Limits with the largest bucket size that still makes so many buckets."""
    total = sum(item.inputs[0].gathered_bytes for item in items)
    for divisor in range(at_least, 64):
        try:
            plan = build_plan(items, PlanLimits(bucket_bytes=max(total // divisor, 1), **limits))
        except ValueError:
            break
        if plan.num_buckets >= at_least:
            return PlanLimits(bucket_bytes=plan.slot_bytes, **limits)
    largest = build_plan(items, PlanLimits(packed=False)).allocation_bytes
    return PlanLimits(bucket_bytes=max(largest), **limits)
