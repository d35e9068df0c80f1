"""Each worker gets its own experts only: those that it names itself, or over the stock wire those that its rank tells."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from fsdp_ipc.delivery import ExpertPlacement
from fsdp_ipc.experts import HALVES
from fsdp_ipc.handles import device_key
from fsdp_ipc.metadata import WHOLE, StreamItem, TensorSpec
from fsdp_ipc.naming import naming_for
from fsdp_ipc.recipe import Emit, ParamRecipe
from fsdp_ipc.wire.stock import bare_uuid
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.stock_on_cpu import read_export, stock_on_cpu
from tests.test_expert_parallel import EXPERTS, experts_of, moe, unfused

PARALLEL = {"enable_expert_parallel": True, "expert_placement_strategy": "linear", "enable_eplb": False}
LINEAR = [range(4), range(4, 8)]
IN_TURN = [range(0, 8, 2), range(1, 8, 2)]


def _items(numbers: dict[str, list[int]]) -> list[StreamItem]:
    names = [f"{prefix}.{n}.up_proj.weight" for prefix, found in numbers.items() for n in found]
    f32 = torch.float32
    return [
        StreamItem(
            (TensorSpec(name, (2,), f32, f32, WHOLE),), ParamRecipe((name,), (Emit(name, (2,)),)), index
        )
        for index, name in enumerate([*names, "norm.weight"])
    ]


def test_experts_of_a_worker_by_its_rank() -> None:
    """As vLLM documents its placements: neighbours, the first workers one more; or in turn."""
    items = _items({"a.experts": list(range(10)), "b.experts": [0, 1, 3]})

    def holders(strategy: Any, workers: int) -> list[tuple[int, ...]]:
        held = ExpertPlacement(strategy, workers).held(items)
        assert held.readers("b.experts.0.up_proj.weight") == ()  # number 2 is missing: to all
        assert held.readers("norm.weight") == ()
        return [held.readers(f"a.experts.{n}.down_proj.weight") for n in range(10)]

    assert holders("linear", 4) == [(w,) for w in (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)]
    assert holders("round_robin", 4) == [(w,) for w in (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)]
    assert holders("linear", 1) == [(0,)] * 10


@contextmanager
def _logged() -> Iterator[list[str]]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_ipc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield texts
    logger.removeHandler(handler)


def _sharded(rank: int, world: int, strategy: str) -> Any:
    """Experts where the placement puts them: as 3-D shards of neighbours, or as modules, in turn."""
    mesh = init_device_mesh("cpu", (world,))
    model = moe()
    if strategy == "linear":
        for experts, key in experts_of(model):
            held = distribute_tensor(getattr(experts, key).detach(), mesh, [Shard(0)])
            setattr(experts, key, nn.Parameter(held))
    else:
        full = {name: nn.Parameter(tensor) for name, tensor in unfused(model).items()}
        for number, layer in enumerate(model.layers):
            layer.mlp.experts = nn.ModuleDict()
            for expert in range(rank, EXPERTS, world):
                layer.mlp.experts[str(expert)] = nn.ModuleDict()
                for part in ("gate_proj", "up_proj", "down_proj"):
                    linear = nn.Linear(1, 1, bias=False)
                    linear.weight = full[f"layers.{number}.mlp.experts.{expert}.{part}.weight"]
                    layer.mlp.experts[str(expert)][part] = linear
    ignored = {p for layer in model.layers for p in layer.mlp.experts.parameters()}
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model


def _push(
    rank: int, world: int, url: str, release: str, packed: bool, strategy: str, placement: Any
) -> list[str]:
    stock_on_cpu(release)
    model = _sharded(rank, world, strategy)
    source = DTensorSource(model, dtype=torch.bfloat16, naming=naming_for(model, experts=HALVES))
    with (
        _logged() as texts,
        WeightSender(
            source,
            HTTPWeightSyncClient(url),
            backend="ipc",
            packed=packed,
            bucket_bytes=1000 if packed else None,
            expert_placement=placement,
        ) as sender,
    ):
        for number in range(2):
            sender.send(number)
    return texts


def _own(wanted: dict[str, torch.Tensor], held: Any, index: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in wanted.items()
        if held is None or "experts" not in name or int(name.split(".")[4]) in held[index]
    }


def _check(
    release: str, packed: bool, strategy: str, placement: str | None, parallel: dict[str, Any], held: Any
) -> list[str]:
    """Push, and see that each worker got the common weights and the experts of `held`, and no other ones."""
    uuids = [bare_uuid(device_key(torch.device("cpu"), rank)) for rank in range(2)]
    with FakeServer(version=release, uuids=uuids, read=read_export) as server:
        server.parallel_config = {**PARALLEL, **parallel}
        texts = run_ranks(_push, 2, server.url, release, packed, strategy, placement)[0]
        assert server.violations == []
        payloads = [body["update_info"] for route, body in server.calls if route == "/update_weights"]
    assert {isinstance(payload, list) for payload in payloads} == {held is not None}
    wanted = unfused(moe(), torch.bfloat16)
    for index, worker in enumerate(server.workers):
        own = _own(wanted, held, index)
        assert len(worker.history) == 2
        for got in worker.history:
            assert set(got) == set(own)
            for name, tensor in own.items():
                assert torch.equal(got[name], tensor), name
    return texts


@pytest.mark.parametrize("packed", [True, False])
def test_each_worker_gets_its_own_experts_only(packed: bool) -> None:
    texts = _check("0.29.0", packed, "linear", "linear", {}, LINEAR)
    assert any("its own experts only, by linear placement over 2 workers" in text for text in texts)


def test_experts_placed_in_turn() -> None:
    parallel = {"expert_placement_strategy": "round_robin"}
    _check("0.32.0", False, "round_robin", "round_robin", parallel, IN_TURN)
    # Packed chunks have no offsets, and whole experts of single owners can't lie in every rank's chunk alike.
    _check("0.32.0", True, "round_robin", "round_robin", parallel, None)


def test_layouts_that_do_not_agree_are_delivered_to_all() -> None:
    _check("0.32.0", True, "linear", "round_robin", {"expert_placement_strategy": "round_robin"}, None)


@pytest.mark.parametrize(
    ("release", "placement", "parallel", "says"),
    [
        ("0.32.0", None, {}, None),
        ("0.28.0", "linear", {}, "takes the same payload for all workers"),
        ("0.32.0", "linear", {"enable_eplb": True}, "EPLB"),
        ("0.32.0", "linear", {"eplb_config": {"num_redundant_experts": 2}}, "redundant experts"),
        ("0.32.0", "linear", {"enable_expert_parallel": False}, "without expert parallelism"),
        ("0.32.0", "linear", {"expert_placement_strategy": "round_robin"}, "places them by 'round_robin'"),
        ("0.32.0", "linear", {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (
            "0.32.0",
            "round_robin",
            {
                "expert_placement_strategy": "round_robin",
                "world_size": 1,
                "data_parallel_size": 2,
                "all2all_backend": "allgather_reducescatter",
            },
            "in line with the all2all backend 'allgather_reducescatter'",
        ),
        ("0.32.0", "linear", {"world_size": 3}, "3 workers and 2 trainer ranks"),
    ],
)
def test_in_doubt_every_worker_gets_everything(
    release: str, placement: str | None, parallel: dict[str, Any], says: str | None
) -> None:
    texts = _check(release, True, "linear", placement, parallel, None)
    warnings = [text for text in texts if "every worker gets all experts" in text]
    assert len(warnings) == (says is not None)
    assert all(str(says) in text for text in warnings)


def _push_native(rank: int, world: int, url: str, packed: bool, strategy: str) -> list[int]:
    model = _sharded(rank, world, strategy)
    source = DTensorSource(model, dtype=torch.bfloat16, naming=naming_for(model, experts=HALVES))
    with WeightSender(
        source, HTTPWeightSyncClient(url), packed=packed, bucket_bytes=1000 if packed else None
    ) as sender:
        return [sender.send(number).bytes for number in range(2)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("strategy", "told", "held"),
    [
        ("linear", LINEAR, LINEAR),
        ("round_robin", IN_TURN, IN_TURN),
        ("linear", IN_TURN, None),  # the trainer holds others: all to all
        ("linear", [range(4), None], None),  # experts that move about
        ("linear", [range(8), range(8)], None),
        ("linear", [range(3), range(4, 8)], None),  # one that nobody asks for must not vanish
        ("linear", [range(8)], None),  # a rank without a worker
    ],
)
def test_workers_name_their_experts_themselves(packed: bool, strategy: str, told: Any, held: Any) -> None:
    workers = [
        NativeWorker(
            index,
            experts=None if own is None else {f"layers.{n}.mlp.experts": list(own) for n in range(2)},
        )
        for index, own in enumerate(told)
    ]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        sent = run_ranks(_push_native, 2, server.url, packed, strategy)
        assert server.published == ["0", "1"]
    wanted = unfused(moe(), torch.bfloat16)
    for index, worker in enumerate(workers):
        assert worker.syncs == [1, 2]
        own = _own(wanted, held, index)
        assert set(worker.weights) == set(own)
        assert all(torch.equal(worker.weights[name], tensor) for name, tensor in own.items())
        assert sent[index] == [sum(tensor.nbytes for tensor in own.values())] * 2


def _typo(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"expert_placement='linaer': expected 'linear'"):
        WeightSender(DTensorSource(nn.Linear(2, 2)), None, expert_placement="linaer")  # type: ignore[arg-type]


def test_unknown_placement_is_refused() -> None:
    run_ranks(_typo, 1)
