"""Layouts nobody thought of: hypothesis draws shapes, dtypes, meshes and placements; many tensors a start of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.source import DTensorSource
from tests.runner import run_ranks
from tests.sharded import Transfer, assert_same, change, expected, several_buckets

# No shrinking: each example starts ranks, and the failing tensor is named as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "uint8",
    "bool",
    "uint32",
)


@dataclass(frozen=True)
class Drawn:
    """A tensor and how it is held; `placements` has one entry a mesh axis: a dim, "r", or None for no DTensor at all."""

    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...]
    placements: tuple[int | str, ...] | None
    buffer: bool
    transposed: bool


def _tensors(world: int) -> st.SearchStrategy[list[Drawn]]:
    meshes = [(2,), (2, 1), (1, 2)] if world == 2 else [(4,), (2, 2), (4, 1), (1, 2, 2)]

    @st.composite
    def one(draw: st.DrawFn) -> Drawn:
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        mesh = draw(st.sampled_from(meshes))
        placements: tuple[int | str, ...] | None = None
        if draw(st.integers(0, 9)):
            axis = st.sampled_from(["r", *range(len(shape))])
            placements = tuple(draw(axis) for _ in mesh)
        return Drawn(
            shape,
            draw(st.sampled_from(DTYPES)),
            mesh,
            placements,
            draw(st.booleans()),
            draw(st.booleans()),
        )

    return st.lists(one(), min_size=1, max_size=16)


def _full(number: int, drawn: Drawn) -> torch.Tensor:
    torch.manual_seed(number)
    values = torch.randn(drawn.shape) * 50
    if drawn.transposed and len(drawn.shape) == 2:
        values = torch.randn(drawn.shape[::-1]).t()
    return values.to(getattr(torch, drawn.dtype))


def _held(drawn: Drawn, full: torch.Tensor, meshes: dict[tuple[int, ...], DeviceMesh]) -> torch.Tensor:
    if drawn.placements is None:
        return full
    mesh = meshes[drawn.mesh]
    placements = [Replicate() if p == "r" else Shard(int(p)) for p in drawn.placements]
    # What is sent over the wire here is bytes: not every backend knows every dtype.
    carrier = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}[full.element_size()]
    carried = distribute_tensor(full.contiguous().view(carrier), mesh, placements)
    return DTensor.from_local(
        carried.to_local().view(full.dtype),
        mesh,
        placements,
        run_check=False,
        shape=carried.shape,
        stride=carried.stride(),
    )


def _module(tensors: list[tuple[Drawn, torch.Tensor]]) -> nn.Module:
    module = nn.Module()
    module.anchor = nn.Parameter(torch.ones(2))
    for number, (drawn, tensor) in enumerate(tensors):
        if drawn.buffer:
            module.register_buffer(f"t{number}", tensor)
        else:
            module.register_parameter(f"t{number}", nn.Parameter(tensor, requires_grad=False))
    return module


def _move(rank: int, world: int, drawn: list[Drawn]) -> None:
    meshes = {shape: init_device_mesh("cpu", shape) for shape in sorted({d.mesh for d in drawn})}
    full = [(d, _full(n, d)) for n, d in enumerate(drawn)]
    reference = _module(full)
    model = _module([(d, _held(d, tensor, meshes)) for d, tensor in full])
    for dtype in (None, torch.bfloat16):
        source = DTensorSource(model, dtype=dtype)
        items = source.items()
        for limits in (
            several_buckets(items, 2),
            PlanLimits(bucket_bytes=1 << 14, back_to_back=True),
            PlanLimits(packed=False),
        ):
            move = Transfer(items, source.tensors(), limits=limits)
            assert_same(move.run(source.tensors()), expected(reference, dtype), order=not limits.back_to_back)
        assert_same(dict(source), expected(reference, dtype))


@settings(max_examples=6, derandomize=True, phases=PHASES)
@given(drawn=_tensors(2))
def test_drawn_layouts_on_two_ranks(drawn: list[Drawn]) -> None:
    run_ranks(_move, 2, drawn)


@settings(max_examples=6, derandomize=True, phases=PHASES)
@given(drawn=_tensors(4))
def test_drawn_layouts_on_four_ranks(drawn: list[Drawn]) -> None:
    run_ranks(_move, 4, drawn)


def _strided(rank: int, world: int, cases: list[tuple[tuple[int, ...], int]]) -> None:
    """FSDP over another sharding, which is what strided shards are: the outer axis cuts what the inner one left."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_coordinate() or [0, 0]
    module, reference = nn.Module(), nn.Module()
    for number, (shape, dim) in enumerate(cases):
        torch.manual_seed(number)
        full = torch.randn(shape)
        local = _chunk(_chunk(full, inner, dim), outer, dim)
        held = DTensor.from_local(
            local.clone(),
            mesh,
            [_StridedShard(dim, split_factor=2), Shard(dim)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        setattr(module, f"t{number}", nn.Parameter(held))
        setattr(reference, f"t{number}", nn.Parameter(full))
    for dtype in (None, torch.bfloat16):
        source = DTensorSource(module, dtype=dtype)
        for limits in (several_buckets(source.items(), 2), PlanLimits(packed=False)):
            move = Transfer(source.items(), source.tensors(), limits=limits)
            assert_same(move.run(source.tensors()), expected(reference, dtype))
    change(module)
    change(reference)
    assert_same(dict(DTensorSource(module)), expected(reference))


def _chunk(tensor: torch.Tensor, index: int, dim: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, 2, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


_SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
_CASES = _SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.integers(0, len(shape) - 1)))


@settings(max_examples=4, derandomize=True, phases=PHASES)
@given(cases=st.lists(_CASES, min_size=2, max_size=16))
def test_drawn_strided_shards(cases: list[tuple[Any, int]]) -> None:
    run_ranks(_strided, 4, cases)


def test_the_world_is_left_alone() -> None:
    assert not dist.is_initialized()
