"""Syncs for which nothing has changed: offered at the control blocks, loaded in start, and two requests in all."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, Timeouts, WeightSender, WeightSyncError
from fsdp_ipc.gather import Gatherer
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.toy import build, full, shard

BUCKET = 800
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


class OneAtATime:
    """A client with the four verbs and no more, of which one may be called at a time."""

    version = "0.32.0"

    def __init__(self, url: str) -> None:
        self._client = HTTPWeightSyncClient(url)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ):
            raise AttributeError(name)

        def call(*args: Any) -> None:
            assert self._lock.acquire(blocking=False), "two calls at the same time"
            try:
                getattr(self._client, name)(*args)
            finally:
                self._lock.release()

        return call


def _sender(rank: int, world: int, url: str, *, overlapping: bool = True, **settings: Any) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    client: Any = HTTPWeightSyncClient(url) if overlapping else OneAtATime(url)
    source = DTensorSource(model, dtype=torch.bfloat16)
    return model, WeightSender(source, client, **{"bucket_bytes": BUCKET, **settings})


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """Other weights than before, the same on any number of ranks."""
    for parameter in model.parameters():
        parameter.mul_(-0.75).add_(0.125)


def _requests(server: FakeServer) -> list[str]:
    return [route for route in server.routes if route in (START, UPDATE, FINISH)]


def _assert_hold(workers: list[NativeWorker], wanted: dict[str, torch.Tensor]) -> None:
    for worker in workers:
        assert worker.weights.keys() == wanted.keys()
        assert all(torch.equal(worker.weights[name], value) for name, value in wanted.items())


def _push(rank: int, world: int, url: str, overlapping: bool, settings: dict[str, Any]) -> Any:
    model, sender = _sender(rank, world, url, overlapping=overlapping, **settings)
    with sender:
        for version in range(3):
            change(model)
            stats = sender.send(version)
    return full(model, torch.bfloat16), stats.num_buckets, stats.stage_s


class Patient(NativeWorker):
    """Lets go of the last bucket of a sync that it has taken only when the finish is at the server."""

    server: FakeServer
    total = 1
    num_buckets = 0
    saw_finish = 0

    def after_bucket(self, memory: list[torch.Tensor]) -> None:
        self.num_buckets += 1
        if not self.taken or self.num_buckets % self.total:
            return
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.server.routes.count(FINISH) > len(self.syncs):
                self.saw_finish += 1
                return
            time.sleep(0.001)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [BUCKET, None], ids=["more buckets than slots", "one bucket"])
def test_finish_is_at_the_server_while_the_workers_load(world: int, bucket_bytes: int | None) -> None:
    workers = [Patient(index) for index in range(world)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        for worker in workers:
            worker.server, worker.total = server, 6 if bucket_bytes else 1
        results = run_ranks(_push, world, server.url, True, {"bucket_bytes": bucket_bytes})
        assert _requests(server) == [START, UPDATE, FINISH, START, FINISH, START, FINISH]
        assert server.published == ["0", "1", "2"]
        assert server.violations == []
    wanted, num_buckets, stage_s = results[0]
    assert num_buckets == workers[0].total
    _assert_hold(list(workers), wanted)
    for worker in workers:
        assert worker.taken == [2, 3]
        assert worker.saw_finish == 2
    assert {"prepare", "start", "request", "finish"} <= stage_s.keys()


@pytest.mark.parametrize("world", [1, 2])
def test_a_client_that_takes_one_call_at_a_time_gets_one_at_a_time(world: int) -> None:
    workers = [NativeWorker(index, delay_s=0.02) for index in range(world)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        wanted = run_ranks(_push, world, server.url, False, {"backend": "fsdp_ipc"})[0][0]
        assert _requests(server) == [START, UPDATE, FINISH, START, FINISH, START, FINISH]
        assert server.published == ["0", "1", "2"]
    _assert_hold(workers, wanted)
    assert [worker.taken for worker in workers] == [[2, 3]] * world


@pytest.mark.parametrize("bucket_bytes", [BUCKET, None], ids=["more buckets than slots", "one bucket"])
@pytest.mark.parametrize("takes", [(True, False), (False, True)])
def test_where_one_worker_takes_no_offer_none_loads_without_the_request(
    takes: tuple[bool, bool], bucket_bytes: int | None
) -> None:
    workers = [NativeWorker(index, offer_s=1.0 if take else None) for index, take in enumerate(takes)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        began = time.monotonic()
        settings = {"backend": "fsdp_ipc", "bucket_bytes": bucket_bytes}
        wanted = run_ranks(_push, 2, server.url, takes[0], settings)[0][0]
        assert time.monotonic() - began < 30
        assert _requests(server) == [START, UPDATE, FINISH] * 3
        assert server.published == ["0", "1", "2"]
        assert server.violations == []
    _assert_hold(workers, wanted)
    assert [worker.taken for worker in workers] == [[], []]
    assert [worker.syncs for worker in workers] == [[1, 2, 3]] * 2


def _push_late(rank: int, world: int, url: str) -> Any:
    model, sender = _sender(rank, world, url)
    refresh = sender._stage.refresh
    seconds = []

    def late(*args: Any, **settings: Any) -> bool:
        time.sleep(0.3)
        changed: bool = refresh(*args, **settings)
        return changed

    sender._stage.refresh = late
    with sender:
        for version in range(3):
            change(model)
            seconds.append(sender.send(version).stage_s["start"])
    return full(model, torch.bfloat16), seconds


def test_an_offer_that_comes_too_late_is_known_to_every_rank_at_once() -> None:
    workers = [NativeWorker(index, offer_s=0.01) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_late, 2, server.url)
        assert _requests(server) == [START, UPDATE, FINISH] * 3
    _assert_hold(workers, results[0][0])
    for _, seconds in results:
        assert max(seconds[1:]) < 0.5, "a rank has waited for a worker that had declined"


def _push_changing(rank: int, world: int, url: str, what: str) -> Any:
    model, sender = _sender(rank, world, url)
    with sender:
        for version in range(5):
            if version == 2:
                if what == "plan":
                    model.register_buffer("more", torch.arange(3.0))
                else:
                    assert sender._stage._slots is not None
                    sender._stage._slots.close()
                    sender._stage._slots, sender._stage._own_items = None, ()
            change(model)
            sender.send(version)
    return full(model, torch.bfloat16)


@pytest.mark.parametrize("what", ["plan", "memory"])
def test_what_changed_is_told_by_a_request_and_the_next_sync_needs_none(what: str) -> None:
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        wanted = run_ranks(_push_changing, 2, server.url, what)[0]
        told, repeated = [START, UPDATE, FINISH], [START, FINISH]
        assert _requests(server) == told + repeated + told + 2 * repeated
    if what == "plan":
        wanted["more"] = torch.arange(3.0)
    _assert_hold(workers, wanted)
    assert [worker.taken for worker in workers] == [[2, 4, 5]] * 2


def _push_again(rank: int, world: int, url: str, overlapping: bool) -> Any:
    model, sender = _sender(rank, world, url, overlapping=overlapping, backend="fsdp_ipc")
    with sender:
        sender.send("good")
        change(model)
        with pytest.raises(WeightSyncError) as caught:
            sender.send("bad")
        sender.send("better")
        change(model)
        sender.send("best")
    return str(caught.value), full(model, torch.bfloat16)


@pytest.mark.parametrize("bucket", [0, 5])
@pytest.mark.parametrize(("index", "overlapping"), [(0, True), (1, True), (1, False)])
def test_a_worker_that_fails_inside_of_start_is_heard_by_every_rank(
    index: int, overlapping: bool, bucket: int
) -> None:
    class Breaking(NativeWorker):
        broken = False

        def before_bucket(self, at: int) -> None:
            if self.index == index and self.taken == [2] and at == bucket and not self.broken:
                self.broken = True
                raise RuntimeError("no room on this worker")

    workers = [Breaking(0), Breaking(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_again, 2, server.url, overlapping)
        assert server.published == ["good", "better", "best"]
        assert server.violations == []
        assert not server.active
        requests = _requests(server)
        assert requests[-5:] == [START, UPDATE, FINISH, START, FINISH]
    assert len({error for error, _ in results}) == 1
    assert "no room on this worker" in results[0][0]
    _assert_hold(list(workers), results[0][1])


def _push_breaking(rank: int, world: int, url: str, broken: int, bucket: int) -> Any:
    model, sender = _sender(rank, world, url)
    load = Gatherer.load

    def fail(gatherer: Gatherer, at: int, tensors: Any) -> None:
        if rank == broken and at == bucket:
            raise OSError("lost a disk")
        load(gatherer, at, tensors)

    with sender:
        sender.send("good")
        change(model)
        Gatherer.load = fail  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            sender.send("bad")
        seconds = time.monotonic() - began
        Gatherer.load = load  # type: ignore[method-assign]
        sender.send("better")
    return str(caught.value), seconds, full(model, torch.bfloat16)


@pytest.mark.parametrize("bucket", [0, 3])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_trainer_rank_that_fails_after_its_offer_lets_the_workers_go(broken: int, bucket: int) -> None:
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_breaking, 2, server.url, broken, bucket)
        assert server.published == ["good", "better"]
        assert not server.active
    for error, seconds, _ in results:
        assert f"rank {broken}: OSError: lost a disk" in error
        assert seconds < 10
    _assert_hold(workers, results[0][2])


def test_a_start_that_the_server_refuses_after_the_offer_ends_all_ranks() -> None:
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        server.fail(START, "no update today", after=1)
        results = run_ranks(_push_again, 2, server.url, True)
        assert server.published == ["good", "better", "best"]
    assert all("no update today" in error for error, _ in results)
    _assert_hold(workers, results[0][1])


def test_a_finish_that_fails_while_it_overlaps_is_closed() -> None:
    workers = [NativeWorker(0, delay_s=0.02), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        server.fail(FINISH, "no finish today", after=1)
        results = run_ranks(_push_again, 2, server.url, True)
        assert server.published == ["good", "better", "best"]
        assert not server.active
    assert all("no finish today" in error for error, _ in results)
    _assert_hold(workers, results[0][1])


class Behind(NativeWorker):
    """Finishes after its server has answered, as where that took an earlier call's answer for this one's; or breaks then."""

    closed_at = 0.0
    breaks = False

    def finish(self) -> None:
        def late() -> None:
            time.sleep(0.4)
            if self.breaks:
                assert self._control is not None
                self._control.fail(self.sync, "RuntimeError: no room to finish")
                return
            self.closed_at = time.monotonic()
            super(Behind, self).finish()

        threading.Thread(target=late).start()


def _push_once(rank: int, world: int, url: str) -> Any:
    model, sender = _sender(rank, world, url)
    with sender:
        try:
            sender.send("only")
            error = ""
        except WeightSyncError as caught:
            error = str(caught)
    return time.monotonic(), error, full(model, torch.bfloat16)


@pytest.mark.parametrize("late", [0, 1])
def test_an_answer_alone_is_not_taken_for_the_workers_own_word(late: int) -> None:
    """vLLM's multiprocess executor takes answers that a failed call left behind for those of the next call."""
    workers = [Behind(0) if late == 0 else NativeWorker(0), Behind(1) if late == 1 else NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_once, 2, server.url)
    behind = workers[late]
    assert isinstance(behind, Behind)
    assert behind.closed_at > 0
    for returned_at, error, wanted in results:
        assert not error
        assert returned_at > behind.closed_at
        _assert_hold(workers, wanted)


def test_a_worker_that_breaks_after_its_server_answered_fails_the_sync() -> None:
    workers = [NativeWorker(0), Behind(1)]
    workers[1].breaks = True  # type: ignore[attr-defined]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_once, 2, server.url)
    assert all("rank 1" in error and "no room to finish" in error for _, error, _ in results)


def _push_through_drops(rank: int, world: int, url: str) -> Any:
    model, sender = _sender(
        rank, world, url, timeouts=Timeouts(request_s=1.5, transfer_s=3, control_s=8), backend="fsdp_ipc"
    )
    sender.send("good")
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        sender.send("bad")
    seconds = time.monotonic() - began
    change(model)
    sender.send("better")
    sender.send("best")
    began = time.monotonic()
    sender.close()
    return str(caught.value), seconds, time.monotonic() - began, full(model, torch.bfloat16)


@pytest.mark.parametrize("route", [START, FINISH])
def test_an_answer_without_an_end_ends_one_sync_and_reaches_into_no_later_one(route: str) -> None:
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:

        def drip(handler: Any) -> bool:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                try:
                    handler.wfile.write(b" ")
                except OSError:
                    break
                time.sleep(0.1)
            return True

        server._add(route, drip, 1, 1)
        results = run_ranks(_push_through_drops, 2, server.url)
        assert server.published == ["good", "better", "best"]
        assert server.violations == []
    for error, seconds, closing, wanted in results:
        assert f"POST {route}" in error
        assert "timed out after 1.5 s" in error
        assert seconds < 8
        assert closing < 2
        _assert_hold(workers, wanted)


def _push_to_one_that_stays_away(rank: int, world: int, url: str) -> Any:
    _, sender = _sender(rank, world, url, timeouts=Timeouts(request_s=1, transfer_s=2, control_s=4))
    with sender:
        began = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            sender.send("bad")
        seconds = time.monotonic() - began
        sender.send("good")
    return str(caught.value), seconds


def test_a_worker_that_never_says_so_is_named_before_the_ranks_lose_each_other() -> None:
    class Silent(NativeWorker):
        def say_closed(self) -> None:
            if self.syncs != [1]:
                super().say_closed()

    workers = [NativeWorker(0), Silent(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_to_one_that_stays_away, 2, server.url)
    for error, seconds in results:
        assert (
            "rank 1: TimeoutError: the worker beside this rank did not close the update of sync 1 in time"
            in error
        )
        assert "transfer_s=2" in error
        assert seconds < 4
