"""Shards that workers read where they lie: right bytes on every worker, no gather, and a gather wherever that can't be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ipc import WeightSyncError
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.sharded import change, into_shared_memory
from tests.toy import build, full, make_sender, shard


def _serve(ranks: int, *, peers: bool = True, **settings: Any) -> tuple[FakeServer, list[NativeWorker]]:
    workers = [NativeWorker(index, peers=peers, **settings) for index in range(ranks)]
    return FakeServer(backend="fsdp_ipc", workers=workers), workers


def _push(
    rank: int, world: int, url: str, dtype: torch.dtype | None, held: torch.dtype, settings: dict[str, Any]
) -> Any:
    del rank
    model = shard(build().to(held), init_device_mesh("cpu", (world,)))
    buffers = into_shared_memory(model)
    stats, wanted = [], []
    with make_sender(model, url, dtype=dtype, **settings) as sender:
        for version in range(3):
            stats.append(sender.send(version).to_json())
            wanted.append(full(model, dtype))
            change(model)
        peer_bytes = sender._stage.peer_bytes
        buckets = [len(bucket.segments) for bucket in sender._stage.plan.buckets]
    assert buffers
    return stats, wanted, peer_bytes, buckets


def _assert_holds(worker: NativeWorker, wanted: dict[str, torch.Tensor]) -> None:
    assert set(worker.weights) == set(wanted)
    for name, value in wanted.items():
        assert worker.weights[name].dtype == value.dtype, name
        assert torch.equal(worker.weights[name], value), name


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["float32", "bfloat16", "masters"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_worker_holds_the_weights_without_a_gather(
    ranks: int, dtype: torch.dtype | None, held: torch.dtype
) -> None:
    server, workers = _serve(ranks)
    with server:
        seen = run_ranks(_push, ranks, server.url, dtype, held, {})
        assert server.violations == []
    for rank, (stats, wanted, peer_bytes, buckets) in enumerate(seen):
        _assert_holds(workers[rank], wanted[-1])
        assert 0 < peer_bytes < stats[-1]["bytes"]
        assert stats[-1]["bytes"] == sum(t.nbytes for t in wanted[-1].values())
        if held == (dtype or held):
            # One tensor has a single row, which the other ranks hold nothing of, and a buffer lies in memory of its own.
            assert sum(buckets) == 2
            staged = wanted[-1]["one.weight"].nbytes + wanted[-1]["bias_of_router"].nbytes
            assert stats[-1]["resident_bytes"] == stats[-1]["bytes"] - staged
        else:
            assert sum(buckets) == len(wanted[-1])
            assert stats[-1]["resident_bytes"] == 0


def _stage_shards(rank: int, world: int, url: str, packed: bool) -> Any:
    del rank
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(
        model, url, dtype=torch.bfloat16, packed=packed, bucket_bytes=500 if packed else None
    ) as sender:
        for _ in range(3):
            stats = sender.send()
            wanted = full(model, torch.bfloat16)
            change(model)
        collectives = (
            [sender._stage.gatherer.is_local(k) for k in range(stats.num_buckets)] if packed else [True]
        )
    return stats.to_json(), wanted, collectives


@pytest.mark.parametrize("slow", [None, 0, 1])
@pytest.mark.parametrize("packed", [True, False])
def test_shards_that_cannot_be_exported_are_put_into_slots_that_all_workers_read(
    packed: bool, slow: int | None
) -> None:
    """A slot is filled again only when the slowest of all workers has read it, from every rank."""
    workers = [NativeWorker(i, peers=True, delay_s=0.05 if i == slow else 0.0) for i in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        seen = run_ranks(_stage_shards, 2, server.url, packed)
    for rank, (stats, wanted, collectives) in enumerate(seen):
        _assert_holds(workers[rank], wanted)
        assert all(collectives)
        assert stats["num_buckets"] >= (4 if packed else 1)
        assert stats["peer_bytes"] > 0 and stats["resident_bytes"] == 0


@pytest.mark.parametrize("why", ["workers", "setting", "verify"])
def test_where_shards_cannot_be_read_they_are_gathered(why: str) -> None:
    settings: dict[str, Any] = {"setting": {"peer_reads": False}, "verify": {"verify": "full"}}.get(why, {})
    server, workers = _serve(2, peers=why != "workers")
    with server:
        seen = run_ranks(_push, 2, server.url, None, torch.float32, settings)
    for rank, (_, wanted, peer_bytes, buckets) in enumerate(seen):
        _assert_holds(workers[rank], wanted[-1])
        assert peer_bytes == 0
        assert sum(buckets) == len(wanted[-1])


def test_one_worker_that_cannot_read_makes_all_ranks_gather() -> None:
    workers = [NativeWorker(index, peers=index == 0) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        seen = run_ranks(_push, 2, server.url, None, torch.float32, {})
    for rank, (_, wanted, peer_bytes, _) in enumerate(seen):
        _assert_holds(workers[rank], wanted[-1])
        assert peer_bytes == 0


class Slow(NativeWorker):
    """Reads late, so that a rank which went on too early would be seen."""

    def before_bucket(self, bucket: int) -> None:
        del bucket
        self.delay_s = 0.2 if self.index == 1 else 0.0


def test_no_rank_changes_its_shard_while_another_ranks_worker_still_reads_it() -> None:
    workers = [Slow(index, peers=True) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        seen = run_ranks(_push, 2, server.url, None, torch.float32, {})
    for rank, (_, wanted, peer_bytes, _) in enumerate(seen):
        assert peer_bytes
        _assert_holds(workers[rank], wanted[-1])


def _move(rank: int, world: int, url: str) -> Any:
    """The shard of one rank moves, first within shared memory, then out of it."""
    model = shard(build(), init_device_mesh("cpu", (world,)))
    buffers = into_shared_memory(model)
    seen = []
    weight: Any = model.layers[1].weight
    with make_sender(model, url, dtype=None) as sender:
        for how in ("", "within", "", "out", ""):
            if rank == 1 and how == "within":
                buffers += into_shared_memory(model.layers[1])
            if rank == 1 and how == "out":
                weight._local_tensor = weight._local_tensor.clone()
            change(model)
            sender.send()
            seen.append((sender._stage.epoch, sender._stage.resident_bytes))
        return seen, full(model, None)


def test_a_shard_that_moved_is_found_again_or_put_into_a_slot() -> None:
    server, workers = _serve(2)
    with server:
        ranks = run_ranks(_move, 2, server.url)
    for rank, (seen, wanted) in enumerate(ranks):
        epochs, resident = zip(*seen, strict=True)
        assert epochs == (1, 2, 2, 3, 3)
        assert resident[0] == resident[2] > resident[3] == resident[4] > 0
        _assert_holds(workers[rank], wanted)


def _fail(rank: int, world: int, url: str) -> str:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    buffers = into_shared_memory(model)
    with make_sender(model, url, dtype=None) as sender:
        with pytest.raises(WeightSyncError) as caught:
            sender.send()
        change(model)
        stats = sender.send()
    assert buffers and stats.resident_bytes
    return str(caught.value)


class FailsOnce(NativeWorker):
    """Breaks in its first sync."""

    def before_bucket(self, bucket: int) -> None:
        if not self.syncs and self.index == 1 and not getattr(self, "failed", False):
            self.failed = True
            raise RuntimeError("NVLink is down")
        super().before_bucket(bucket)


def test_a_worker_that_fails_to_read_is_heard_by_all_and_the_next_send_works() -> None:
    workers = [FailsOnce(index, peers=True) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        told = run_ranks(_fail, 2, server.url)
    assert all("NVLink is down" in text for text in told)
    assert torch.equal(workers[0].weights["norm.weight"], workers[1].weights["norm.weight"])


class Hybrid(nn.Module):
    """Two layers for a mesh of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)


def _hybrid(rank: int, world: int, url: str) -> Any:
    del rank
    torch.manual_seed(3)
    model = Hybrid()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    buffers = into_shared_memory(model)
    with make_sender(model, url, dtype=None) as sender:
        sender.send()
        change(model)
        sender.send()
        wanted = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert buffers
        return wanted, sender._stage.peer_bytes, sender._stage.plan.holders


def test_replicas_of_a_shard_share_the_reading() -> None:
    server, workers = _serve(4)
    with server:
        ranks = run_ranks(_hybrid, 4, server.url)
    for rank, (wanted, peer_bytes, holders) in enumerate(ranks):
        _assert_holds(workers[rank], wanted)
        assert peer_bytes == sum(t.nbytes for t in wanted.values()) // 2
        assert holders == (((0, 1), (0, 1), (2, 3), (2, 3)),)


def _sub_meshes(rank: int, world: int, url: str) -> Any:
    """FSDP by hand in each replica: every rank knows its own mesh only."""
    del rank
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = shard(build(), mesh["shard"])
    with make_sender(model, url, dtype=None, group=mesh) as sender:
        for _ in range(2):
            sender.send()
            wanted = full(model, None)
            change(model)
        return wanted, sender._stage.peer_bytes


def test_shards_over_meshes_that_differ_by_rank_are_gathered() -> None:
    server, workers = _serve(4)
    with server:
        ranks = run_ranks(_sub_meshes, 4, server.url)
    for rank, (wanted, peer_bytes) in enumerate(ranks):
        _assert_holds(workers[rank], wanted)
        assert peer_bytes == 0
