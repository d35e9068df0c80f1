"""Ranks that hold different modules: per-expert modules of which each rank has some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_ipc import WeightSyncError, full, gather, stage
from fsdp_ipc.delivery import HeldExperts
from fsdp_ipc.experts import HALVES
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.naming import naming_for
from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.replicas import check_replicas
from fsdp_ipc.source import DTensorSource
from fsdp_ipc.union import place_tensors, unite
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.sharded import Transfer, assert_same, change
from tests.test_expert_parallel import EXPERTS, experts_of, moe, unfused
from tests.toy import make_sender

WIDTH = 8


class Sparse(nn.Module):
    """Layers whose experts are modules; only those of `own` exist."""

    def __init__(self, own: Sequence[int], num_experts: int = 8, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            layer = nn.Module()
            layer.mlp = nn.Module()
            layer.mlp.gate = nn.Linear(WIDTH, num_experts, bias=False)
            made = {str(e): nn.Linear(WIDTH, WIDTH, bias=e == 2) for e in range(num_experts)}
            layer.mlp.experts = nn.ModuleDict({key: made[key] for key in made if int(key) in own})
            layer.norm = nn.LayerNorm(WIDTH)
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def sparse(own: Sequence[int], **kwargs: Any) -> Sparse:
    torch.manual_seed(9)
    return Sparse(own, **kwargs)


def _shard_dense(model: Sparse, world: int) -> None:
    ignored = {p for layer in model.layers for p in layer.mlp.experts.parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=ignored)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that collectives of the gather bring to this rank, by kind."""
    seen = {"all_gather": 0, "broadcast": 0, "calls": 0}
    plain_gather, plain_broadcast = gather.all_gather, TrainerGroup.broadcast

    def all_gather(out: torch.Tensor, piece: torch.Tensor, group: Any) -> None:
        seen["all_gather"] += out.nbytes - piece.nbytes
        seen["calls"] += 1
        plain_gather(out, piece, group)

    def broadcast(self: TrainerGroup, tensor: torch.Tensor, src: int) -> None:
        seen["broadcast"] += tensor.nbytes
        seen["calls"] += 1
        plain_broadcast(self, tensor, src)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "all_gather", all_gather)
        patch.setattr(full, "all_gather", all_gather)
        patch.setattr(TrainerGroup, "broadcast", broadcast)
        yield seen


def _spread(rank: int, world: int, owned: list[list[int]]) -> None:
    group = TrainerGroup(dist.group.WORLD)
    reference, model = sparse(range(8)), sparse(owned[rank])
    _shard_dense(model, world)
    source = DTensorSource(model)
    own = source.items()
    items, tensors = unite(own, source.tensors(), group)
    check_replicas(items, tensors, group)
    names = [emit.name for item in items for emit in item.recipe.emits]
    assert sorted(names) == sorted(reference.state_dict())
    # In layer order, so that a worker never has more than one layer open.
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    assert layers == sorted(layers)
    for limits in (PlanLimits(bucket_bytes=1024), PlanLimits(), PlanLimits(packed=False)):
        move = Transfer(items, tensors, limits=limits, group=group)
        group.vote("plan", same=[move.plan.digest])
        for _ in range(2):
            got = move.run(place_tensors(items, own, source.tensors()))
            assert_same(got, {name: reference.state_dict()[name] for name in names}, order=True)
            change(model)
            change(reference)
    back_to_back = Transfer(items, tensors, limits=PlanLimits(back_to_back=True), group=group)
    got = back_to_back.run(place_tensors(items, own, source.tensors()))
    assert_same(got, dict(reference.state_dict()), order=False)

    # Neighbours with the same owner travel together: one broadcast an owner and layer here.
    move = Transfer(items, tensors, group=group)
    with counted() as seen:
        move.run(place_tensors(items, own, source.tensors()))
    firsts = [next(r for r in range(world) if e in owned[r]) for e in range(8)]
    assert seen["calls"] <= 1 + 3 * (2 * len(set(firsts)) + 1)
    # And each expert that its worker already has beside it does not travel at all.
    held = HeldExperts([{f"layers.{n}.mlp.experts": owned[r] for n in range(3)} for r in range(world)])
    local = Transfer(items, tensors, group=group, wanted=held)
    with counted() as seen:
        got = local.run(place_tensors(items, own, source.tensors()))
    assert seen["broadcast"] == 0
    mine = {
        n: t
        for n, t in reference.state_dict().items()
        if "experts" not in n or int(n.split(".")[4]) in owned[rank]
    }
    assert_same(got, mine, order=False)


@pytest.mark.parametrize(
    "owned",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[0, 1, 2, 3, 4, 5, 6, 7], []],
        [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]],
    ],
    ids=["linear", "round-robin", "all on one", "replicated"],
)
def test_modules_of_experts_spread_over_the_ranks(owned: list[list[int]]) -> None:
    run_ranks(_spread, len(owned), owned)


def _equal(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD)
    model = sparse(range(8))
    _shard_dense(model, world)
    source = DTensorSource(model)
    tensors = source.tensors()
    items, same = unite(source.items(), tensors, group)
    assert items is source.items()
    assert same is tensors
    assert place_tensors(items, source.items(), tensors) is tensors


def test_equal_streams_are_left_as_they_are() -> None:
    run_ranks(_equal, 2)


def _contradictions(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (world,))

    def refused(model: nn.Module, match: str, **kwargs: Any) -> None:
        source = DTensorSource(model, **kwargs)

        def united() -> None:
            check_replicas(*unite(source.items(), source.tensors(), group), group)

        with pytest.raises(ValueError, match=match):
            united()

    # Owners that hold different values for one expert.
    model = sparse([0, 1] if rank < 3 else [2])
    if rank == 1:
        change(model.layers[0].mlp.experts["1"])
    refused(model, r"layers\.0\.mlp\.experts\.1\.weight .*rank(s 0, 2| 0) against rank")
    # One name, two shapes.
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 3 + rank % 2)})
    refused(model, r"the ranks disagree about b\.weight: .*b\.weight \[3, 3\].*b\.weight \[4, 3\]")
    # One name, two dtypes.
    model = nn.ModuleDict({"a": nn.Linear(3, 2)}).to(torch.bfloat16 if rank else torch.float32)
    refused(model, r"the ranks disagree about a\.weight")
    # One sharded tensor, sent in two dtypes.
    model = nn.ModuleDict({"a": nn.Linear(3, 4)})
    fully_shard(model["a"], mesh=mesh)
    wire = torch.float16 if rank == 2 else torch.bfloat16
    refused(
        model,
        r"the ranks disagree about a\.weight: ranks \[0, 1, 3\] hold a\.weight \[4, 3\] torch\.float32, sharded as .*, sent "
        r"as torch\.bfloat16; ranks \[2\] hold .* sent as torch\.float16\. Build",
        dtype=wire,
    )
    # The same modules, built in another order.
    keys = ["a", "b"] if rank == 0 else ["b", "a"]
    torch.manual_seed(0)
    made = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    refused(nn.ModuleDict({key: made[key] for key in keys}), r"hold the same tensors in different orders")
    # What only some ranks have, sharded among them.
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    model = nn.ModuleDict({"a": nn.Linear(3, 2)})
    if rank < 2:
        model["extra"] = nn.Linear(2, 2, bias=False)
        held = distribute_tensor(model["extra"].weight.detach(), pair, [Shard(0)])
        model["extra"].weight = nn.Parameter(held)
    refused(model, r"extra\.weight is only on ranks \[0, 1\] of 4: it is sharded there")
    # What only some ranks have and needs several tensors together.
    model = nn.ModuleDict({"a": nn.Linear(3, 2)})
    if rank < 2:
        model["experts"] = nn.ModuleDict({str(e): nn.Linear(2, 2, bias=False) for e in range(2)})

    def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = [state.pop(name) for name in sorted(state) if "experts" in name]
        return {**state, **({"stack": torch.stack(parts)} if parts else {})}

    refused(
        model,
        r"stack is only on ranks \[0, 1\] of 4: it is made of",
        naming=naming_for(model, adapter=stacked),
    )
    assert mesh.size() == world


def test_streams_that_contradict_each_other_are_refused_by_name() -> None:
    run_ranks(_contradictions, 4)


def _refused_by_sender(rank: int, world: int, url: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    good = {name: parameter.detach().clone() for name, parameter in model.state_dict().items()}
    with make_sender(model, url, group=mesh, dtype=None) as sender:

        def refused(match: str, ranks: set[int]) -> None:
            with pytest.raises(WeightSyncError, match=match) as caught:
                sender.send(1)
            assert caught.value.step == "plan"
            assert set(caught.value.failures) == ranks

        with torch.no_grad():
            model["b"].weight.add_(rank)
        refused(r"ranks 0, 1: ValueError: 1 tensors that every rank should hold alike differ", {0, 1})
        model["b"] = nn.Linear(3, 2 + rank)
        refused(r"ranks 0, 1: ValueError: the ranks disagree about b\.weight", {0, 1})
        model["b"] = nn.Linear(3, 2)
        model.load_state_dict(good)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:  # alone, between two exchanges, where the others wait for it
                patch.setattr(stage, "check_replicas", _broken)
            refused(r"rank 1: ZeroDivisionError", {1})
        sender.send(2)


def _broken(*args: Any) -> None:
    raise ZeroDivisionError("no")


def test_a_sender_refuses_on_all_ranks_before_the_server_hears_of_it() -> None:
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        run_ranks(_refused_by_sender, 2, server.url)
        assert server.published == ["2"]
        assert server.routes.count("/start_weight_update") == 1


def _rank_local(rank: int, world: int) -> None:
    """Fused experts sharded over `ep`: delivered where they are, if the worker beside them holds the same."""
    group = TrainerGroup(dist.group.WORLD)
    meshes: list[tuple[Any, Any]] = [(init_device_mesh("cpu", (world,)), [Shard(0)])]
    if world == 4:
        from torch.distributed.tensor import Replicate

        meshes.append((init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]))
    for mesh, placements in meshes:
        reference, model = moe(), moe()
        for experts, key in experts_of(model):
            setattr(
                experts,
                key,
                nn.Parameter(distribute_tensor(getattr(experts, key).detach(), mesh, placements)),
            )
        size = mesh.size(mesh.ndim - 1)
        per_rank = EXPERTS // size
        held = [list(range(r % size * per_rank, (r % size + 1) * per_rank)) for r in range(world)]
        for dtype in (None, torch.bfloat16):
            source = DTensorSource(model, dtype=dtype, naming=naming_for(model, experts=HALVES))
            wanted = unfused(reference, dtype)

            def local_names(
                ids: list[int], wanted: dict[str, torch.Tensor] = wanted
            ) -> dict[str, torch.Tensor]:
                return {n: t for n, t in wanted.items() if "experts" not in n or int(n.split(".")[4]) in ids}

            def run(
                ids: list[list[int]], limits: PlanLimits, source: DTensorSource = source
            ) -> tuple[Any, Any]:
                experts = HeldExperts([{f"layers.{n}.mlp.experts": i for n in range(2)} for i in ids])
                move = Transfer(source.items(), source.tensors(), limits=limits, group=group, wanted=experts)
                group.vote("plan", same=[move.plan.digest])
                with counted() as seen:
                    return move.run(source.tensors()), seen

            everywhere = sum(t.nbytes for n, t in wanted.items() if "experts" in n)
            for limits in (
                PlanLimits(),
                PlanLimits(
                    bucket_bytes=512 if size == 2 else 768
                ),  # of two, less than this rank's of a layer
                PlanLimits(packed=False),
                PlanLimits(back_to_back=True),
            ):
                got, seen = run(held, limits)
                assert seen["all_gather"] == seen["broadcast"] == seen["calls"] == 0, seen
                assert_same(got, local_names(held[rank]), order=False)
                # Another order of the experts on the workers, or one expert too many: everything to everybody.
                for other in ([*held[1:], held[0]], [sorted({*ids, 0}) for ids in held]):
                    got, seen = run(other, limits)
                    assert_same(got, wanted, order=False)
                    assert seen["all_gather"] == everywhere * (size - 1) // size
            # A worker that holds fewer than its rank does: exactly those come, on a wire with offsets.
            fewer = [ids if r else ids[1:] for r, ids in enumerate(held)]
            if world == 4 and size == 2:
                got, seen = run(fewer, PlanLimits())
                assert seen["calls"] == 0
                assert_same(got, local_names(fewer[rank]), order=False)


@pytest.mark.parametrize("world", [2, 4])
def test_experts_on_the_gpu_of_their_worker_never_travel(world: int) -> None:
    run_ranks(_rank_local, world)
