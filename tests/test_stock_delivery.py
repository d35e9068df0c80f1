"""The whole send over the stock wire on CPU ranks: strict fake workers map the ranks' staging files, late.

CUDA's export is replaced by the file behind the memory, so that a worker reads what lies there when it reads: a slot
that is written too early, or memory that is freed too early, shows as wrong bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import WeightSyncError
from fsdp_ipc.wire.stock import dialect_for
from tests.fake_server import FakeServer
from tests.runner import run_ranks
from tests.stock_on_cpu import Exports, read_export, stock_on_cpu, stock_uuids
from tests.toy import build, full, make_sender, shard, step


def _push(
    rank: int, world: int, url: str, release: str, packed: bool, num_slots: int
) -> list[dict[str, Any]]:
    stock_on_cpu(release)
    model = shard(build(), init_device_mesh("cpu", (world,)))
    wanted = []
    settings = {"packed": packed, "bucket_bytes": 700, "num_slots": num_slots}
    with make_sender(model, url, backend="ipc", **settings) as sender:
        for number in range(3):
            sender.send(number)
            wanted.append(full(model, torch.bfloat16))
            step(model)
    return wanted if rank == 0 else []


def _fail_once(rank: int, world: int, url: str, release: str, packed: bool) -> tuple[str, dict[str, Any]]:
    stock_on_cpu(release)
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, backend="ipc", packed=packed, bucket_bytes=700) as sender:
        with pytest.raises(WeightSyncError) as caught:
            sender.send("bad")
        step(model)
        sender.send("good")
        return str(caught.value), full(model, torch.bfloat16)


@pytest.fixture
def uuids() -> list[str]:
    return stock_uuids(2)


def _same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name].reshape(value.shape), value), name


@pytest.mark.parametrize(
    ("release", "packed", "num_slots"),
    [
        *((release, True, 2) for release in ("0.22.0", "0.26.0", "0.27.0", "0.28.0", "0.32.0")),
        *((release, True, 1) for release in ("0.26.0", "0.32.0")),
        *((release, False, 2) for release in ("0.26.0", "0.32.0")),
    ],
)
def test_every_release_gets_the_bytes_of_every_step_on_both_workers(
    uuids: list[str], release: str, packed: bool, num_slots: int
) -> None:
    with FakeServer(version=release, uuids=uuids, read=read_export) as server:
        server.delay("/update_weights", 0.02)
        server.delay("/finish_weight_update", 0.05)
        wanted = run_ranks(_push, 2, server.url, release, packed, num_slots)[0]
        assert server.violations == []
        assert server.published == (["0", "1", "2"] if dialect_for(release).weight_version else [])
        for worker in server.workers:
            assert len(worker.history) == 3
            for got, value in zip(worker.history, wanted, strict=True):
                _same(got, value)
        updates = server.routes.count("/update_weights")
        assert updates > 9 if packed else updates == 3


@pytest.mark.parametrize("release", ["0.22.0", "0.32.0"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_field_B11_a_failed_update_reaches_all_ranks_and_the_next_one_works(
    uuids: list[str], release: str, packed: bool, route: str
) -> None:
    """https://github.com/vllm-project/vllm/pull/39212: a failed update left the session active."""
    with FakeServer(version=release, uuids=uuids, read=read_export) as server:
        server.fail(route, "boom of the server", after=1 if packed and route == "/update_weights" else 0)
        results = run_ranks(_fail_once, 2, server.url, release, packed)
        assert all("boom of the server" in text for text, _ in results)
        assert results[0][0] == results[1][0]
        assert "start while an update is active" not in server.violations
        assert server.published == (["good"] if dialect_for(release).weight_version else [])
        for worker in server.workers:
            _same(worker.history[-1], results[0][1])


def _count_exports(rank: int, world: int, url: str) -> list[tuple[int, int]]:
    stock_on_cpu("0.26.0")
    model = shard(build(), init_device_mesh("cpu", (world,)))
    counts = []
    with make_sender(model, url, backend="ipc", bucket_bytes=700) as sender:
        for number in range(2):
            before = Exports.serial
            stats = sender.send(number)
            counts.append((Exports.serial - before, stats.num_buckets))
    return counts


def test_field_E14_one_handle_a_chunk_not_one_a_tensor(uuids: list[str]) -> None:
    """https://github.com/vllm-project/vime/issues/175 : a handle a tensor was 4.3 times slower."""
    with FakeServer(version="0.26.0", uuids=uuids, read=read_export) as server:
        for counts in run_ranks(_count_exports, 2, server.url):
            for handles, chunks in counts:
                assert handles == chunks
                assert 4 <= chunks < len(build().state_dict())
