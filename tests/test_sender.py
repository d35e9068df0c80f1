"""The whole way of a weight over the native wire, with real processes, memory and HTTP, and workers that only read."""

from __future__ import annotations

import ast
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ipc
from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, Timeouts, WeightSender, WeightSyncError
from fsdp_ipc.handles import SharedBuffer
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.toy import build, expected, full, make_sender, shard, step

BUCKET = 800


def serve(num_workers: int = 2, **settings: Any) -> tuple[FakeServer, list[NativeWorker]]:
    workers = [NativeWorker(index, **settings) for index in range(num_workers)]
    return FakeServer(backend="fsdp_ipc", workers=workers), workers


def assert_holds(worker: NativeWorker, wanted: dict[str, torch.Tensor]) -> None:
    assert list(worker.weights) == list(wanted)
    for name, value in wanted.items():
        got = worker.weights[name]
        assert got.dtype == value.dtype, name
        assert torch.equal(got, value), name


def _push(
    rank: int, world: int, url: str, dtype: torch.dtype | None, packed: bool
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    stats = []
    with make_sender(
        model, url, dtype=dtype, packed=packed, bucket_bytes=BUCKET if packed else None
    ) as sender:
        stats.append(sender.send(1).to_json())
        step(model)
        with torch.no_grad():
            model(torch.arange(7))  # leaves the root unsharded, with values of before the next step
        step(model)
        stats.append(sender.send(2).to_json())
        stats.append(sender.send("three").to_json())
    return stats, full(model, dtype)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_worker_holds_the_trainers_weights(packed: bool, dtype: torch.dtype | None) -> None:
    server, workers = serve()
    with server:
        per_rank = run_ranks(_push, 2, server.url, dtype, packed)
        assert server.published == ["1", "2", "three"]
        assert server.violations == []
        one_sync = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        # Packed, nothing that a worker has to know changes from the second sync on.
        later = ["/start_weight_update", "/finish_weight_update"] if packed else one_sync
        assert [r for r in server.routes if r in one_sync] == one_sync + 2 * later
    wanted = per_rank[0][1]
    assert not torch.equal(wanted["norm.weight"].float(), torch.ones(13))
    for worker in workers:
        assert_holds(worker, wanted)
        assert worker.syncs == [1, 2, 3]
        # Packed: each slot is opened once for all syncs. Unpacked: each tensor once a sync.
        assert worker.num_opened == (2 if packed else 3 * len(worker.weights))
    for stats, _ in per_rank:
        assert stats[0]["num_buckets"] >= (4 if packed else 1)
        assert stats[0]["bytes"] == sum(t.nbytes for t in wanted.values())
        assert stats[2]["worker"]["sync"] == 3
    assert no_files()


def no_files() -> bool:
    return not list(Path("/dev/shm").glob(f"fsdp_ipc-{os.getpid()}-*"))


def _push_poisoning(rank: int, world: int, url: str, packed: bool) -> None:
    release = SharedBuffer.close

    def poison(self: SharedBuffer) -> None:
        if not self.closed:
            self.bytes.fill_(0xFF)
        release(self)

    SharedBuffer.close = poison  # type: ignore[method-assign]
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, packed=packed, bucket_bytes=BUCKET if packed else None) as sender:
        for version in (1, 2):
            sender.send(version)
            # The worker has reported: now the weights may be ruined.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(version))


@pytest.mark.parametrize("packed", [True, False])
def test_field_A1_references_outlive_a_slow_reader_on_every_rank(packed: bool) -> None:
    """https://github.com/THUDM/slime/issues/1348 : a released buffer is poisoned, the readers are late."""
    for slow in (0, 1):
        workers = [NativeWorker(i, delay_s=0.15 if i == slow else 0.0, late=True) for i in range(2)]
        with FakeServer(backend="fsdp_ipc", workers=workers) as server:
            held: list[dict[str, torch.Tensor]] = []
            for worker in workers:
                finish = worker.finish

                def keep(worker: NativeWorker = worker, finish: Any = finish, held: Any = held) -> None:
                    finish()
                    held.append(dict(worker.weights))

                worker.finish = keep  # type: ignore[method-assign]
            run_ranks(_push_poisoning, 2, server.url, packed)
        first = expected(build(), torch.bfloat16)
        for weights in held[:2]:
            assert all(torch.equal(weights[name], value) for name, value in first.items())
        for weights in held[2:]:
            assert all(bool((weights[n] == 1).all()) for n in first if n != "bias_of_router")


def _push_subgroup(rank: int, world: int, url: str) -> dict[str, Any] | None:
    mesh_ranks = [2, 3]
    group = dist.new_group(mesh_ranks)
    if rank not in mesh_ranks:
        return None
    assert isinstance(group, dist.ProcessGroup)
    from torch.distributed.device_mesh import DeviceMesh

    model = shard(build(), DeviceMesh.from_group(group, "cpu", mesh=mesh_ranks))
    with make_sender(model, url if rank == 2 else "http://127.0.0.1:9", group=group) as sender:
        assert sender.is_sender == (rank == 2)
        return sender.send(5).to_json()


def test_field_B8_trainer_is_a_subgroup_without_global_rank_0() -> None:
    """https://github.com/vllm-project/vllm/pull/48981 : global ranks 2 and 3 of 4, the sender is global rank 2."""
    server, workers = serve()
    with server:
        results = run_ranks(_push_subgroup, 4, server.url)
        assert server.routes.count("/start_weight_update") == 1
        assert server.routes.count("/finish_weight_update") == 1
    assert results[0] is None
    assert results[1] is None
    for worker in workers:
        assert_holds(worker, expected(build(), torch.bfloat16))
    devices = {worker._endpoint.device for worker in workers}
    assert len(devices) == 2


def _other_sender(rank: int, world: int, url: str) -> None:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    client = HTTPWeightSyncClient(url) if rank == 1 else None
    with WeightSender(DTensorSource(model), client, sender_rank=1) as sender:
        sender.send(1)


def test_any_rank_can_be_the_sender() -> None:
    server, workers = serve()
    with server:
        run_ranks(_other_sender, 2, server.url)
    for worker in workers:
        assert_holds(worker, expected(build(), None))


def _fewer_workers(rank: int, world: int, url: str, packed: bool) -> tuple[list[Any], float]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    begin = time.monotonic()
    with make_sender(model, url, packed=packed, bucket_bytes=BUCKET if packed else None) as sender:
        reports = [sender.send(version).worker for version in (1, 2)]
    return reports, time.monotonic() - begin


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_ranks_without_a_worker_neither_wait_nor_hinder(index: int, packed: bool) -> None:
    """One vLLM worker, two trainer ranks: the other rank only helps to gather."""
    worker = NativeWorker(index, delay_s=0.02)
    with FakeServer(backend="fsdp_ipc", workers=[worker]) as server:
        per_rank = run_ranks(_fewer_workers, 2, server.url, packed)
        assert server.published == ["1", "2"]
    assert_holds(worker, expected(build(), torch.bfloat16))
    assert [report["sync"] for report in per_rank[index][0]] == [1, 2]
    assert per_rank[1 - index][0] == [None, None]
    assert max(seconds for _, seconds in per_rank) < 20


class _Absent(NativeWorker):
    """Accepts everything, and never opens its control block."""

    def init(self, init_info: dict[str, Any]) -> None: ...


def _no_worker(rank: int, world: int, url: str) -> list[str]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url) as sender:
        return [_raises(lambda: sender.send(1)) for _ in range(2)]


def test_a_server_whose_workers_greet_no_rank_is_refused() -> None:
    with FakeServer(backend="fsdp_ipc", workers=[_Absent(0)]) as server:
        per_rank = run_ranks(_no_worker, 2, server.url)
        assert server.published == []
        assert "/start_weight_update" not in server.routes
    for said in per_rank:
        assert all("WeightSyncError" in text and "nobody would read the weights" in text for text in said)


PAIR = ("layers.0.weight", "layers.3.weight")


def _push_together(rank: int, world: int, url: str) -> str:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=1000, keep_together=[PAIR]) as sender:
        sender.send(1)
    with make_sender(
        model, url, bucket_bytes=BUCKET, keep_together=[("layers.0.weight", "layer.3.weight")]
    ) as sender:
        assert "'layer.3.weight' (did you mean 'layers.3.weight'?)" in _raises(lambda: sender.send(2))
    with make_sender(model, url, bucket_bytes=BUCKET, keep_together=[PAIR]) as sender:
        return _raises(lambda: sender.send(2))


def test_weights_that_must_stay_together_share_a_bucket_or_are_refused() -> None:
    server, workers = serve()
    with server:
        refusals = run_ranks(_push_together, 2, server.url)
        assert server.published == ["1"]
    for worker in workers:
        assert set(worker.weights) == set(expected(build(), torch.bfloat16))
        (plan,) = worker._plans.values()
        buckets = {row.name: row.bucket for row in plan.tensors}
        assert buckets[PAIR[0]] == buckets[PAIR[1]] != buckets["layers.1.weight"]
    for said in refusals:
        assert "WeightSyncError" in said and "which must stay together" in said and "bucket_bytes=800" in said


def test_field_C9_streams_are_made_once_for_a_sender() -> None:
    """https://github.com/vllm-project/vllm/issues/52950: new streams in each call stranded the allocator's cache."""
    made = []
    for path in sorted(Path(fsdp_ipc.__file__).parent.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [ast.unparse(call.func) for call in ast.walk(function) if isinstance(call, ast.Call)]
                made += [(path.name, function.name) for name in calls if name.endswith("cuda.Stream")]
    # The second is kept by `functools.cache`.
    assert {function for _, function in made} == {"__init__", "_side_stream"}
    assert {"native_buckets.py", "stock_delivery.py"} <= {file for file, _ in made}


# Bad input: a clear error, and nothing half-done.


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="no process group: start the trainer with torchrun"):
        WeightSender(DTensorSource(nn.Linear(2, 2)), HTTPWeightSyncClient("http://127.0.0.1:9"))


def test_module_without_parameters() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        DTensorSource(nn.ReLU())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"request_s": 30, "transfer_s": 20, "control_s": 60},
            "transfer_s=20 s is not more than request_s=30 s",
        ),
        (
            {"request_s": 30, "transfer_s": 40, "control_s": 40},
            "control_s=40 s is not more than transfer_s=40 s",
        ),
        ({"request_s": 400}, "Raise transfer_s above 400, or lower request_s"),
        ({"request_s": 0}, "request_s=0: expected seconds, more than 0"),
        ({"control_s": float("nan")}, "control_s=nan: expected seconds"),
        ({"control_s": float("inf")}, "control_s=inf: expected seconds"),
        ({"transfer_s": "330"}, "transfer_s='330': expected seconds"),
    ],
)
def test_time_outs_must_grow_outwards(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Timeouts(**settings)
    assert words in str(caught.value)


def _raises(make: Any) -> str:
    try:
        make()
    except (WeightSyncError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _bad(rank: int, world: int, urls: dict[str, str]) -> dict[str, str]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    said = {
        name: _raises(lambda url=url: make_sender(model, url)) for name, url in urls.items() if name != "good"
    }
    said["plain"] = _raises(lambda: WeightSender(DTensorSource(build()), HTTPWeightSyncClient(urls["good"])))
    said["stock on cpu"] = _raises(lambda: make_sender(model, urls["stock"]))
    small = make_sender(model, urls["good"], bucket_bytes=100)
    said["small"] = _raises(lambda: small.send(1))
    said["small again"] = _raises(lambda: small.send(2))
    small.close()
    sender = make_sender(model, urls["good"])
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(_raises(lambda: sender.send(1))))
    thread.start()
    time.sleep(0.15)
    said["twice"] = _raises(lambda: sender.send(2))
    thread.join()
    said["first"] = results[0]
    sender.close()
    said["closed"] = _raises(lambda: sender.send(3))
    return said


def test_bad_input_is_refused_with_the_cure() -> None:
    slow, workers = serve(delay_s=0.3)
    with (
        slow,
        FakeServer(backend=None) as bare,
        FakeServer(backend="ipc") as stock,
        FakeServer(backend="fsdp_ipc", dev_mode=False) as closed,
    ):
        urls = {
            "good": slow.url,
            "nobody": "http://127.0.0.1:9",
            "no backend": bare.url,
            "stock": stock.url,
            "no routes": closed.url,
        }
        per_rank = run_ranks(_bad, 2, urls)
        assert slow.published == ["1"]
    for said in per_rank:
        assert "WeightSyncError" in said["nobody"] and "http://127.0.0.1:9" in said["nobody"]
        assert "fsdp_ipc" in said["no backend"] and "--weight-transfer-config" in said["no backend"]
        assert "CUDA memory only" in said["stock on cpu"]
        assert "VLLM_SERVER_DEV_MODE=1" in said["no routes"]
        assert "pass group=" in said["plain"]
        assert "exceeds bucket_bytes=100" in said["small"] and "bucket_bytes=" in said["small"]
        assert "exceeds bucket_bytes=100" in said["small again"]
        assert "a send is running already" in said["twice"]
        assert said["first"] == "nothing was raised"
        assert "this sender is closed" in said["closed"]
    for worker in workers:
        assert_holds(worker, expected(build(), torch.bfloat16))


class _LaggingDevice:
    """Stands in for a CUDA stream and its events, on which a gather is finished only at the third look."""

    def __init__(self, *_: Any) -> None:
        self.looks = 0
        self.device = torch.device("cpu")

    def wait_stream(self, _: Any) -> None: ...

    def record(self, _: Any) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def synchronize(self) -> None:
        self.looks = 3


def _push_lagging(rank: int, world: int, url: str) -> list[int]:
    import contextlib

    from fsdp_ipc.control import ControlBlock
    from fsdp_ipc.wire import native_buckets

    model = shard(build(), init_device_mesh("cpu", (world,)))
    produced: list[int] = []
    produce = ControlBlock.produce

    def note(self: ControlBlock, sync: int, count: int) -> None:
        produced.append(count)
        produce(self, sync, count)

    ControlBlock.produce = note  # type: ignore[method-assign]
    native_buckets.on_stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.Event = _LaggingDevice  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda _=None: _LaggingDevice()  # type: ignore[assignment,return-value]
    with make_sender(model, url, bucket_bytes=BUCKET) as sender:
        sender._delivery._buckets._stream = _LaggingDevice()  # type: ignore[attr-defined]
        for version in range(3):
            sender.send(version)
    return produced


def test_a_bucket_is_announced_when_the_device_has_finished_it_and_not_before() -> None:
    """The host queues ahead on a CUDA device; here a stand-in for one, since the order is what counts."""
    server, workers = serve()
    with server:
        per_rank = run_ranks(_push_lagging, 2, server.url)
    for worker in workers:
        assert_holds(worker, expected(build(), torch.bfloat16))
    for produced in per_rank:
        buckets = len(produced) // 3
        assert buckets >= 4
        assert produced == [*range(1, buckets + 1)] * 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_a_dtype_that_would_lose_the_weights_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="expected a floating dtype of 16 bits or more"):
        DTensorSource(nn.Linear(2, 2), dtype=dtype)


def _push_old_servers(rank: int, world: int, urls: list[str]) -> str | None:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, urls, timeouts=Timeouts(request_s=20, transfer_s=30, control_s=40)) as sender:
        assert sender._delivery._client.request_timeout_s == 20  # type: ignore[attr-defined]
        return sender.send(7).version


def test_releases_that_publish_no_version_are_asked_for_none() -> None:
    """Two servers of vLLM 0.26 with our plugin; a client's own time-out is held to the sender's."""
    one = FakeServer(version="0.26.0", backend="fsdp_ipc", workers=[NativeWorker(0)])
    two = FakeServer(version="0.26.0", backend="fsdp_ipc", workers=[NativeWorker(1)])
    with one, two:
        assert run_ranks(_push_old_servers, 2, [one.url, two.url]) == ["7", "7"]
        assert one.violations == two.violations == []
    for server in (one, two):
        assert_holds(server.workers[0], expected(build(), torch.bfloat16))


def _interrupted(rank: int, world: int, url: str) -> str:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url) as sender:
        sender.send(1)
        gatherer = sender._stage.gatherer
        gather = gatherer.gather

        def interrupt(bucket: int) -> None:
            gatherer.gather = gather  # type: ignore[method-assign]
            raise KeyboardInterrupt

        gatherer.gather = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            sender.send(2)
        return str(sender.send(3).version)


def test_the_send_after_an_interrupt_works() -> None:
    server, workers = serve(1)
    with server:
        assert run_ranks(_interrupted, 1, server.url) == ["3"]
        assert server.published == ["1", "3"]
    assert_holds(workers[0], expected(build(), torch.bfloat16))
