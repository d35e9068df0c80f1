"""`verify=` on the stock wire: replicas are compared before the version is published, or it is refused at once."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import WeightSyncError
from tests.fake_server import FakeServer
from tests.runner import run_ranks
from tests.stock_on_cpu import read_export, stock_on_cpu, stock_uuids
from tests.toy import build, make_sender, shard

EQUAL = {"dp0:pp0:pcp0:tp0:a.weight": "11", "dp1:pp0:pcp0:tp0:a.weight": "11"}
OTHER = EQUAL | {"dp1:pp0:pcp0:tp0:a.weight": "22"}


def _push(rank: int, world: int, url: str | list[str], release: str) -> Any:
    stock_on_cpu(release)
    model = shard(build(), init_device_mesh("cpu", (world,)))
    try:
        with make_sender(model, url, backend="ipc", bucket_bytes=700, verify="full") as sender:
            return sender.send("v").backend
    except WeightSyncError as error:
        return str(error)


def _serve(release: str = "0.32.0", **settings: Any) -> FakeServer:
    return FakeServer(version=release, uuids=stock_uuids(2), read=read_export, **settings)


def test_equal_replicas_are_published() -> None:
    with _serve(data_parallel_size=2) as server:
        server.checksums = EQUAL
        assert run_ranks(_push, 2, server.url, "0.32.0") == ["ipc", "ipc"]
        assert server.published == ["v"]
        assert server.routes[-3:] == ["/finish_weight_update", "/weight_checker", "/update_weight_version"]


def test_replicas_that_differ_are_not() -> None:
    with _serve(data_parallel_size=2) as server:
        server.checksums = OTHER
        first, second = run_ranks(_push, 2, server.url, "0.32.0")
        assert first == second
        assert "(dp0) and" in first
        assert "differ in 'pp0:pcp0:tp0:a.weight' (11 and 22)" in first
        assert server.published == []


@pytest.mark.parametrize(
    ("release", "replicas", "text"),
    [("0.31.0", 2, "vLLM has from 0.32 on"), ("0.32.0", 1, "compares replicas, and this server has one")],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_sent(
    release: str, replicas: int, text: str
) -> None:
    with _serve(release, data_parallel_size=replicas) as server:
        first, second = run_ranks(_push, 2, server.url, release)
        assert first == second
        assert text in first
        assert "/init_weight_transfer_engine" not in server.routes
