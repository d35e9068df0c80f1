"""The plan by itself: pure functions on metadata, without ranks or tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_ipc.delivery import HeldExperts
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.experts import HALVES, unfuse
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.metadata import WHOLE, Layout, StreamItem, TensorSpec
from fsdp_ipc.pieces import SMALL_BYTES
from fsdp_ipc.plan import DEFAULT_BUCKET_BYTES, PlanLimits, TransferPlan, build_plan
from fsdp_ipc.recipe import Emit, ParamRecipe
from fsdp_ipc.rows import TensorRow, peer_bytes
from fsdp_ipc.source import DTensorSource
from tests import bench_plan
from tests.runner import run_ranks
from tests.sharded import Transfer, assert_same

MIB = 1 << 20


def flat(world: int) -> Layout:
    return Layout("shard", tuple(range(world)), (world,), ("S(0)",), axis=0)


def stream(*tensors: tuple[str, tuple[int, ...], torch.dtype], layout: Layout = WHOLE) -> list[StreamItem]:
    items = []
    for index, (name, shape, dtype) in enumerate(tensors):
        spec = TensorSpec(name, shape, dtype, dtype, layout)
        items.append(StreamItem((spec,), ParamRecipe((name,), (Emit(name, shape),)), index))
    return items


def sized(*sizes: int, dtype: torch.dtype = torch.uint8) -> list[StreamItem]:
    return stream(*((f"t{n}", (size // dtype.itemsize,), dtype) for n, size in enumerate(sizes)))


def check(items: Sequence[StreamItem], plan: TransferPlan, limits: PlanLimits) -> None:
    """What must hold for every plan."""
    names = [emit.name for item in items for emit in item.recipe.emits]
    rows = list(plan.rows)
    assert sorted(row.name for row in rows) == sorted(names)
    sizes = [plan.slot_bytes] * plan.num_slots + list(plan.allocation_bytes)
    used: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for row in rows:
        dtype = getattr(torch, row.dtype)
        nbytes = math.prod(row.shape) * dtype.itemsize
        assert row.offset % dtype.itemsize == 0
        assert row.offset + nbytes <= sizes[row.allocation], row
        if plan.packed:
            assert row.allocation == row.bucket % plan.num_slots
        used.setdefault((row.bucket, row.allocation), []).append((row.offset, row.offset + nbytes, row.name))
    for places in used.values():
        places.sort()
        for (_, end, name), (start, _, other) in pairwise(places):
            assert end <= start, (name, other)
            if limits.back_to_back and plan.packed:
                assert end == start, (name, other)
        if limits.back_to_back:
            assert places[0][0] == 0
    for bucket in plan.buckets:
        for segment in bucket.segments:
            assert segment.offset + segment.nbytes <= sizes[segment.allocation]
            if not limits.back_to_back:
                assert segment.offset % limits.alignment == 0
    if not limits.back_to_back and not any(s.rows for b in plan.buckets for s in b.segments):
        assert [row.name for row in rows] == names  # stream order
    assert [row.bucket for row in rows] == sorted(row.bucket for row in rows)


_SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
_LAYOUTS = st.sampled_from([WHOLE, flat(2), flat(4), flat(7)])


@given(
    drawn=st.lists(st.tuples(_SHAPES, _DTYPES, _LAYOUTS, st.booleans()), max_size=30),
    bucket_bytes=st.none() | st.integers(1, 20_000),
    num_slots=st.integers(1, 3),
    packed=st.booleans(),
    back_to_back=st.booleans(),
)
def test_every_plan_keeps_its_promises(
    drawn: list[Any], bucket_bytes: int | None, num_slots: int, packed: bool, back_to_back: bool
) -> None:
    items: list[StreamItem] = []
    for n, (shape, dtype, layout, fused) in enumerate(drawn):
        name = f"layers.{n}.experts.gate_up_proj"
        layout = layout if shape else WHOLE
        recipe = ParamRecipe((name,), (Emit(name, shape),))
        if fused and len(shape) == 3 and shape[1] % 2 == 0:
            recipe = unfuse(name, shape, HALVES)
        if recipe.emits:
            items.append(StreamItem((TensorSpec(name, shape, dtype, dtype, layout),), recipe, len(items)))
    limits = PlanLimits(
        bucket_bytes=bucket_bytes, num_slots=num_slots, packed=packed, back_to_back=back_to_back
    )
    try:
        plan = build_plan(items, limits)
    except ValueError as error:
        assert packed
        needed = re.search(r"Set bucket_bytes=(\d+) or more", str(error))
        assert needed is not None
        assert bucket_bytes is not None
        assert int(needed[1]) > bucket_bytes
        limits = PlanLimits(bucket_bytes=int(needed[1]), num_slots=num_slots, back_to_back=back_to_back)
        plan = build_plan(items, limits)
    check(items, plan, limits)
    assert build_plan(items, limits).digest == plan.digest
    if bucket_bytes is not None and packed and items:
        assert plan.slot_bytes == limits.bucket_bytes


def test_field_C6_no_bucket_overshoots() -> None:
    """https://github.com/vllm-project/vllm/pull/37476."""
    bucket = 1000
    items = sized(900, 900, 200)
    for back_to_back in (True, False):
        limits = PlanLimits(bucket_bytes=bucket, back_to_back=back_to_back)
        plan = build_plan(items, limits)
        check(items, plan, limits)
        assert [len(b.segments) for b in plan.buckets] == [1, 1, 1]
    fits = build_plan(sized(900, 100, 900), PlanLimits(bucket_bytes=bucket, back_to_back=True))
    assert [len(b.segments) for b in fits.buckets] == [2, 1]


@pytest.mark.parametrize("delta", range(-8, 9))
def test_field_D22_bucket_edge(delta: int) -> None:
    """https://github.com/verl-project/verl/pull/7318: aligned after the check that it fits, it overflowed."""
    limits = PlanLimits(bucket_bytes=4096 + delta)
    items = stream(("a", (3,), torch.bfloat16), ("b", (960,), torch.float32), ("c", (3,), torch.bool))
    plan = build_plan(items, limits)
    check(items, plan, limits)
    # a in [0, 6), b in [256, 4096), c from 4096 on: it only fits from three more bytes.
    assert plan.num_buckets == (1 if delta >= 3 else 2)
    tight = PlanLimits(bucket_bytes=3849 + delta, back_to_back=True)
    plan = build_plan(items, tight)
    check(items, plan, tight)
    assert plan.num_buckets == (1 if delta >= 0 else 2 if delta >= -6 else 3)  # b and c alone have 3843 bytes


@pytest.mark.vllm
def test_field_D22_round_trip_through_vllms_own_unpacking() -> None:
    """https://github.com/vllm-project/vllm/pull/57665, https://github.com/vllm-project/vllm/pull/40828."""
    packed_tensor = pytest.importorskip(
        "vllm.distributed.weight_transfer.packed_tensor", reason="an older vLLM"
    )
    torch.manual_seed(0)
    module = nn.Module()
    tensors = {
        "odd": torch.randn(3).to(torch.bfloat16),
        "square": torch.randn(64, 64),
        "big": torch.randn(300, 7).to(torch.bfloat16),
        "long": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "halves": torch.randn(3).to(torch.float16),
        "after": torch.randn(5),
        "small": torch.randn(5).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
    }
    module.anchor = nn.Parameter(torch.ones(1))
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    source = DTensorSource(module)
    wanted = {"anchor": module.anchor.detach(), **tensors}
    for bucket_bytes in (None, 16390, 16384):
        limits = PlanLimits(bucket_bytes=bucket_bytes, back_to_back=True)
        move = Transfer(source.items(), source.tensors(), limits=limits)
        got: dict[str, torch.Tensor] = {}
        for bucket in range(move.plan.num_buckets):
            move.gatherer.load(bucket, source.tensors())
            move.gatherer.gather(bucket)
            rows = [row for row in move.plan.rows if row.bucket == bucket]
            dtypes = [getattr(torch, row.dtype) for row in rows]
            sizes = [math.prod(r.shape) * d.itemsize for r, d in zip(rows, dtypes, strict=True)]
            memory = move.memory[rows[0].allocation][: sum(sizes)]
            shapes = [list(row.shape) for row in rows]
            unpacked = packed_tensor.unpack_tensor(memory, [r.name for r in rows], shapes, dtypes, sizes)
            got |= {name: tensor.clone() for name, tensor in unpacked}
        assert_same(got, wanted, order=False)


def test_field_C1_the_error_names_the_setting_that_helps() -> None:
    """https://github.com/verl-project/verl/issues/5952."""
    items = stream(("embed", (4096,), torch.float32), ("norm", (8,), torch.float32))
    with pytest.raises(
        ValueError, match=r"tensor 'embed' needs 16384 bytes, which exceeds bucket_bytes=4096"
    ) as refused:
        build_plan(items, PlanLimits(bucket_bytes=4096))
    needed = re.search(r"Set bucket_bytes=(\d+) or more", str(refused.value))
    assert needed is not None
    limits = PlanLimits(bucket_bytes=int(needed[1]))
    check(items, build_plan(items, limits), limits)
    assert build_plan(items, PlanLimits()).slot_bytes >= 16384  # left out, it grows


def test_field_C2_the_default_bucket_holds_the_largest_tensor() -> None:
    """https://github.com/radixark/miles/pull/1313: Qwen3's embedding has 622,329,856 bytes in bf16, others more."""
    for rows, columns in ((151936, 2048), (151936, 4096), (262144, 5376)):
        items = stream(("embed", (rows, columns), torch.bfloat16), ("norm", (columns,), torch.bfloat16))
        plan = build_plan(items, PlanLimits())
        assert plan.slot_bytes >= rows * columns * 2
    many = sized(*[300 * MIB] * 8)
    assert build_plan(many, PlanLimits()).slot_bytes == DEFAULT_BUCKET_BYTES
    assert build_plan(sized(100, 300), PlanLimits()).slot_bytes == 768  # no more than everything needs


def test_fused_experts_are_cut_where_no_tensor_is_crossed() -> None:
    name, shape = "mlp.experts.gate_up_proj", (6, 8, 16)
    for world, layout in ((1, WHOLE), (2, flat(2)), (3, flat(3)), (4, flat(4))):
        spec = TensorSpec(name, shape, torch.float32, torch.float32, layout)
        items = [StreamItem((spec,), unfuse(name, shape, HALVES), 0)]
        expert = 8 * 16 * 4
        for experts in range(world, 7):
            for back_to_back in (False, True):
                limits = PlanLimits(bucket_bytes=experts * expert, back_to_back=back_to_back)
                if back_to_back and 6 % world:
                    continue
                plan = build_plan(items, limits)
                check(items, plan, limits)
                assert max(s.nbytes for b in plan.buckets for s in b.segments) <= experts * expert
    spec = TensorSpec(name, shape, torch.float32, torch.float32, flat(2))
    items = [StreamItem((spec,), unfuse(name, shape, HALVES), 0)]
    with pytest.raises(ValueError, match=f"needs {2 * expert} bytes"):
        build_plan(items, PlanLimits(bucket_bytes=expert))


@pytest.mark.parametrize("how", ["gathered", "read from all ranks", "each its own"])
def test_an_empty_tensor_in_rows_that_nobody_sends_is_not_lost_by_cutting(how: str) -> None:
    name = "mlp.experts"
    starts = {f"{name}.{n}.w": 4 * row for n, row in enumerate((0, 2, 3, 5))}
    emits = [Emit(full, (1, 4), start) for full, start in starts.items()]
    emits[2:2] = [Emit(f"{name}.1.none", (0, 4), 4), Emit(f"{name}.2.none", (0, 4), 16)]
    spec = TensorSpec(name, (6, 4), torch.float32, torch.float32, flat(2))
    items = [StreamItem((spec,), ParamRecipe((name,), tuple(emits)), 0)]
    reads = None if how == "gathered" else [{0, 1}] * 2
    wanted = HeldExperts([{name: [0, 1]}, {name: [2, 3]}]) if how == "each its own" else None
    limits = PlanLimits(bucket_bytes=32 if how == "gathered" else 16, alignment=16)
    plan = build_plan(items, limits, group_ranks=[0, 1], reads=reads, wanted=wanted)
    assert plan.num_buckets == 2
    rows = [row for own in (plan.rows, *plan.local_rows) for row in own]
    assert sorted(row.name for row in rows) == sorted(emit.name for emit in emits)
    assert all(row.offset >= 0 for row in rows)
    if how == "each its own":
        assert [len(own) for own in plan.local_rows] == [3, 3]


def test_an_uneven_large_tensor_has_room_for_the_tail_of_its_gather() -> None:
    rows = SMALL_BYTES // 4 + 1
    items = stream(("t", (rows,), torch.float32), ("u", (3,), torch.float32), layout=flat(4))
    plan = build_plan(items, PlanLimits())
    check(items, plan, PlanLimits())
    segments = plan.buckets[0].segments
    assert segments[0].nbytes == 4 * -(-rows // 4) * 4 > rows * 4
    assert segments[1].nbytes == 12  # a small one travels in a scratch and needs no tail
    tight = build_plan(items, PlanLimits(back_to_back=True))
    assert [row.offset for row in tight.rows] == [0, rows * 4]


def test_atomic_sets_stay_in_one_bucket() -> None:
    items = sized(600, 300, 600, 300, 100)
    plan = build_plan(items, PlanLimits(bucket_bytes=1100), atomic=[("t0", "t3"), ("t2",)])
    bucket = {row.name: row.bucket for row in plan.rows}
    assert bucket["t0"] == bucket["t3"] != bucket["t2"]
    assert len(bucket) == 5
    joined = build_plan(items, PlanLimits(bucket_bytes=1300), atomic=[("t1", "t3"), ("t3", "t4")])
    assert len({row.bucket for row in joined.rows if row.name in ("t1", "t3", "t4")}) == 1
    with pytest.raises(ValueError, match=r"\['t0', 't2'\], which must stay together, needs 1368 bytes"):
        build_plan(items, PlanLimits(bucket_bytes=1024), atomic=[("t0", "t2")])
    assert build_plan(items, PlanLimits(), atomic=[("t0", "t2")], resident=[0, 1]).resident == (1,)
    with pytest.raises(
        ValueError, match=r"keep_together names what is not sent: 'q', 't33' \(did you mean 't3'\?\)"
    ):
        build_plan(items, PlanLimits(), atomic=[("t0", "t1"), ("t33", "q")])
    name, shape = "mlp.experts.gate_up_proj", (4, 8, 16)
    spec = TensorSpec(name, shape, torch.float32, torch.float32, WHOLE)
    fused = [StreamItem((spec,), unfuse(name, shape, HALVES), 0)]
    pair = ("mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight")
    assert build_plan(fused, PlanLimits(bucket_bytes=512), atomic=[pair]).num_buckets == 4
    with pytest.raises(ValueError, match="needs 2048 bytes"):
        build_plan(fused, PlanLimits(bucket_bytes=512), atomic=[(pair[0], "mlp.experts.1.up_proj.weight")])


def test_exported_memory_of_another_dtype_is_named_with_offsets_in_its_own_elements() -> None:
    name, shape = "mlp.experts.gate_up_proj", (2, 8, 16)
    spec = TensorSpec(name, shape, torch.float32, torch.bfloat16, WHOLE)
    fused = [StreamItem((spec,), unfuse(name, shape, HALVES), 0)]
    staged, exported = build_plan(fused, PlanLimits()), build_plan(fused, PlanLimits(), resident=[0])
    assert {row.dtype for row in (*staged.rows, *exported.rows)} == {"bfloat16"}
    assert {row.held for row in staged.rows} == {""}
    assert {row.held for row in exported.rows} == {"float32"}
    assert [row.offset for row in exported.rows] == [2 * row.offset for row in staged.rows]
    memory = torch.arange(2 * 8 * 16, dtype=torch.float32).view(shape)
    for row in exported.rows:
        first = row.offset // 4
        found = memory.view(-1)[first : first + row.shape[0] * row.shape[1]].view(row.shape)
        expert, kind = int(row.name.split(".")[2]), row.name.split(".")[3]
        assert torch.equal(found, memory[expert, :4] if kind == "gate_proj" else memory[expert, 4:])


def test_the_digest_sees_every_difference() -> None:
    base = [("a", (4, 6), torch.float32), ("b", (4, 6), torch.float32)]
    variants = [
        (base, flat(2), PlanLimits()),
        (base[::-1], flat(2), PlanLimits()),
        ([base[0], ("c", (4, 6), torch.float32)], flat(2), PlanLimits()),
        ([base[0], ("b", (6, 4), torch.float32)], flat(2), PlanLimits()),
        ([base[0], ("b", (4, 6), torch.int32)], flat(2), PlanLimits()),
        (base, flat(4), PlanLimits()),
        (base, Layout("shard", (1, 0), (2,), ("S(0)",), axis=0), PlanLimits()),
        (base, flat(2), PlanLimits(bucket_bytes=1 << 20)),
        (base, flat(2), PlanLimits(packed=False)),
        (base, flat(2), PlanLimits(num_slots=3)),
    ]
    digests = [
        build_plan(stream(*tensors, layout=layout), limits).digest for tensors, layout, limits in variants
    ]
    both = stream(*base, layout=flat(2))
    readable = build_plan(both, PlanLimits(), group_ranks=[0, 1], resident=[0], reads=[{0, 1}, {0, 1}])
    digests.append(readable.digest)
    assert not build_plan(stream(*base, layout=flat(2)), PlanLimits(), resident=[0]).resident
    digests.append(build_plan(stream(*base, layout=flat(2)), PlanLimits(), group_ranks=[0, 1]).digest)
    assert len(set(digests)) == len(digests)
    assert build_plan(stream(*base, layout=flat(2)), PlanLimits()).digest == digests[0]


def test_shards_that_every_worker_can_read_are_not_gathered() -> None:
    items = stream(("even", (4, 6), torch.float32), ("uneven", (5, 6), torch.float32), layout=flat(2))
    items += [replace(i, index=2) for i in stream(("few", (1, 6), torch.float32), layout=flat(2))]
    near = [{0, 1}, {0, 1}]
    plan = build_plan(items, PlanLimits(), group_ranks=[0, 1], resident=[0, 1], reads=near)
    assert plan.resident == (0, 1)
    assert plan.holders == (((0, 1), (0, 1)),)
    rows = {row.name: row for row in plan.rows}
    assert (rows["even"].shards, rows["even"].chunk_bytes, rows["even"].allocation) == (0, 2 * 6 * 4, 1)
    assert (rows["uneven"].shards, rows["uneven"].chunk_bytes, rows["uneven"].allocation) == (0, 3 * 6 * 4, 2)
    assert (rows["few"].shards, rows["few"].chunk_bytes, rows["few"].allocation) == (0, 6 * 4, 0)
    sizes = [24, 96, 120]  # what has a slot comes first
    assert [peer_bytes(plan.rows, plan.holders, rank, sizes) for rank in (0, 1)] == [48 + 48, 24 + 48 + 72]
    for reads in ([{0}, {0, 1}], [{0, 1}, {1}], None):
        gathered = build_plan(items, PlanLimits(), group_ranks=[0, 1], resident=[0, 1], reads=reads)
        assert not gathered.resident and not gathered.holders
        assert {row.shards for row in gathered.rows} == {-1}


@pytest.mark.parametrize("bucket_bytes", [None, 700])
@pytest.mark.parametrize("packed", [True, False])
def test_every_tensor_in_chunks_is_the_one_that_is_meant(bucket_bytes: int | None, packed: bool) -> None:
    """Each rank's slots are filled as the gatherer does; rows and tables then give every tensor back."""
    world = 3
    names = ["a", "b.experts.gate_up_proj", "c", "d"]
    shapes: list[tuple[int, ...]] = [(7, 5), (6, 8, 4), (2,), (9, 4)]
    items = []
    for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        spec = TensorSpec(name, shape, torch.float32, torch.float32, flat(world))
        recipe = (
            unfuse(name, shape, HALVES) if len(shape) == 3 else ParamRecipe((name,), (Emit(name, shape),))
        )
        items.append(StreamItem((spec,), recipe, index))
    full = [torch.randn(shape) for shape in shapes]
    limits = PlanLimits(bucket_bytes=bucket_bytes if packed else None, packed=packed)
    everybody = [set(range(world))] * world
    plan = build_plan(items, limits, group_ranks=range(world), reads=everybody)
    assert plan.num_buckets > (1 if packed and bucket_bytes else 0)
    sizes = [plan.slot_bytes] * plan.num_slots + list(plan.allocation_bytes)
    found: dict[str, torch.Tensor] = {}
    memory = [[torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes] for _ in range(world)]
    for bucket in plan.buckets:
        for rank in range(world):
            for slot in memory[rank]:
                slot.fill_(0xFF)
            for s in bucket.segments:
                assert s.local and s.table == 0
                rows = -(-shapes[s.item][0] // world)
                own = full[s.item][rank * rows : (rank + 1) * rows]
                own = own if s.rows is None else own[s.rows[0] : s.rows[1]]
                raw_bytes = own.contiguous().view(-1).view(torch.uint8)
                memory[rank][s.allocation][s.offset : s.offset + raw_bytes.numel()] = raw_bytes
        for row in plan.rows:
            if row.bucket == bucket.index:
                nbytes = math.prod(row.shape) * 4
                pieces = []
                for chunk, holder in enumerate(plan.holders[row.shards][1]):
                    first = max(row.offset, chunk * row.chunk_bytes)
                    end = min(row.offset + nbytes, (chunk + 1) * row.chunk_bytes)
                    if first < end:
                        at = row.base + first - chunk * row.chunk_bytes
                        pieces.append(memory[holder][row.allocation][at : at + end - first])
                found[row.name] = torch.cat(pieces).view(torch.float32).view(row.shape)
    for item, tensor in zip(items, full, strict=True):
        for emit, wanted in zip(item.recipe.emits, item.recipe.apply([tensor]), strict=True):
            assert torch.equal(found[emit.name], wanted), emit.name


def test_of_several_replicas_a_worker_reads_its_own_or_one_that_it_can() -> None:
    hsdp = Layout("shard", (0, 1, 2, 3), (2, 2), ("R", "S(0)"), axis=1)
    items = stream(("a", (4, 6), torch.float32), layout=hsdp)
    ranks, everybody = range(4), [set(range(4))] * 4
    plan = build_plan(items, PlanLimits(), group_ranks=ranks, resident=[0], reads=everybody)
    assert plan.holders == (((0, 1), (0, 1), (2, 3), (2, 3)),)
    hosts = [{0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 3}]
    plan = build_plan(items, PlanLimits(), group_ranks=ranks, resident=[0], reads=hosts)
    assert plan.holders == (((0, 1), (0, 1), (0, 1), (0, 1)),)
    other = Layout("shard", (0, 1, 2, 3), (2, 2), ("S(0)", "R"), axis=0)
    items = stream(("a", (4, 6), torch.float32), layout=other)
    plan = build_plan(items, PlanLimits(), group_ranks=ranks, resident=[0], reads=everybody)
    assert plan.holders == (((0, 2), (1, 3), (0, 2), (1, 3)),)


def test_masters_in_float32_are_cast_into_a_slot_and_read_from_there() -> None:
    spec = TensorSpec("w", (8, 4), torch.float32, torch.bfloat16, flat(2))
    items = [StreamItem((spec,), ParamRecipe(("w",), (Emit("w", (8, 4)),)), 0)]
    plan = build_plan(items, PlanLimits(), group_ranks=[0, 1], resident=[0], reads=[{0, 1}, {0, 1}])
    assert not plan.resident
    assert plan.slot_bytes == 256  # 32 bytes of one chunk, as slots are aligned
    assert plan.rows == (TensorRow("w", "bfloat16", (8, 4), 0, 0, 0, "", 0, 32, 0),)


def test_own_experts_are_read_in_place_without_any_peer() -> None:
    name, shape = "layers.0.mlp.experts.gate_up_proj", (4, 8, 16)
    spec = TensorSpec(name, shape, torch.bfloat16, torch.bfloat16, flat(2))
    items = [StreamItem((spec,), unfuse(name, shape, HALVES), 0)]
    wanted = HeldExperts([{"layers.0.mlp.experts": [0, 1]}, {"layers.0.mlp.experts": [2, 3]}])
    plan = build_plan(items, PlanLimits(), group_ranks=[0, 1], resident=[0], wanted=wanted, reads=[{0}, {1}])
    assert plan.resident == (0,) and not plan.rows and not plan.holders
    full = torch.arange(4 * 8 * 16).view(shape).to(torch.bfloat16)
    for rank, rows in enumerate(plan.local_rows):
        assert len(rows) == 4
        own = full[2 * rank : 2 * rank + 2].contiguous().view(-1)
        for row in rows:
            expert, kind = int(row.name.split(".")[4]), row.name.split(".")[5]
            found = own[row.offset // 2 :][: 4 * 16].view(row.shape)
            assert torch.equal(found, full[expert, :4] if kind == "gate_proj" else full[expert, 4:])


def _other_order(rank: int, world: int) -> None:
    """Same shapes, another order: without the digest the two gathers would mix their tensors silently."""
    group = TrainerGroup(dist.group.WORLD)
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    items = stream(*((name, (4, 6), torch.float32) for name in names), layout=flat(world))
    plan = build_plan(items, PlanLimits(), group_ranks=group.ranks)
    with pytest.raises(WeightSyncError, match="all ranks must agree") as caught:
        group.vote("plan", same=[plan.digest])
    assert caught.value.step == "plan"
    assert 1 in caught.value.failures
    group.vote("plan", same=[build_plan(stream(("a", (4, 6), torch.float32)), PlanLimits()).digest])


def test_field_0d_ranks_that_iterate_in_different_orders_fail_together() -> None:
    run_ranks(_other_order, 2)


def test_a_671b_moe_on_1024_ranks_is_planned_in_seconds() -> None:
    makes = bench_plan.cases(1024)
    plans = {}
    for name, make in makes.items():
        plans[name], seconds = bench_plan.timed(make)
        assert seconds < 5, name
    assert bench_plan.peak_bytes(list(makes.values())[3]) < 1 << 30
    names = {len({row.name for row in plan.rows}) for plan in list(plans.values())[:3]}
    assert names == {45_395}
    local = list(plans.values())[3]
    assert len(local.local_rows[0]) == 58 * 3 * 256 // 64
    assert len(local.rows) == 45_395 - 58 * 3 * 256


def test_planning_is_linear_in_names() -> None:
    def cost(layers: int) -> float:
        makes = bench_plan.cases(64, layers).values()
        return sum(min(bench_plan.timed(make)[1] for _ in range(2)) for make in makes)

    small, large = cost(3 + 7), cost(3 + 28)
    assert large < 4 * small * 2.5  # four times the names, with room for noise
