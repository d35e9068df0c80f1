"""Field cases of kind A that are about who may still be reading: late consumers, deferred loaders, handles that change."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc.control import ControlBlock
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.stock_on_cpu import read_export, stock_on_cpu, stock_uuids
from tests.test_copy_plan import Sender, assert_same, draw, experts, planned, qkv, reference
from tests.toy import build, full, make_sender, shard, step

BUCKET = 800


# A6


def _push_native(rank: int, world: int, url: str, impatient: bool) -> Any:
    if impatient:
        # What the others did: go on as soon as one worker has acknowledged.
        wait = ControlBlock.wait_consumed
        ControlBlock.wait_consumed = (  # type: ignore[method-assign]
            lambda self, *args: wait(self, *args) if rank == 0 else None
        )
    model = shard(build(), init_device_mesh("cpu", (world,)))
    wanted = []
    with make_sender(model, url, bucket_bytes=BUCKET, num_slots=2) as sender:
        for version in (1, 2):
            sender.send(version)
            wanted.append(full(model, torch.bfloat16))
            step(model)
    return wanted


def _is(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("impatient", [False, True])
def test_field_A6_memory_is_kept_until_the_slowest_worker_has_read_it(impatient: bool) -> None:
    """https://github.com/modelscope/ms-swift/issues/10204: one rank acknowledged before the others had copied.

    With a sender that does what went wrong there, the bytes are wrong: this test can fail.
    """
    workers = [NativeWorker(0), NativeWorker(1, delay_s=0.05)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        wanted = run_ranks(_push_native, 2, server.url, impatient)[0]
    assert _is(workers[0].weights, wanted[1])
    assert _is(workers[1].weights, wanted[1]) == (not impatient)


def _push_stock(rank: int, world: int, urls: list[str]) -> Any:
    stock_on_cpu("0.32.0")
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, urls, backend="ipc", bucket_bytes=BUCKET, num_slots=2) as sender:
        sender.send(1)
        wanted = full(model, torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
    return wanted


def test_field_A6_a_server_for_each_replica_and_one_is_late() -> None:
    """https://github.com/modelscope/ms-swift/issues/10204 on the stock wire: a chunk is done when all servers say so."""

    def late(args: tuple[Any, ...]) -> torch.Tensor:
        time.sleep(0.05)
        return read_export(args)

    first, second = stock_uuids(2)
    with (
        FakeServer(uuids=[first], read=read_export) as quick,
        FakeServer(uuids=[second], read=late) as slow,
    ):
        wanted = run_ranks(_push_stock, 2, [quick.url, slow.url])[0]
        for server in (quick, slow):
            assert server.violations == []
            (worker,) = server.workers
            got = {name: value.reshape(wanted[name].shape) for name, value in worker.history[-1].items()}
            assert _is(got, wanted)


# A7


@pytest.mark.parametrize("case", [qkv, experts])
@pytest.mark.parametrize("kept", [False, True])
def test_field_A7_a_loader_that_defers_never_sees_the_reused_buffer(case: Any, kept: bool) -> None:
    """https://github.com/NVIDIA-NeMo/RL/pull/3545, https://github.com/verl-project/verl/pull/7195: it held views into it.

    The loader here takes a layer's tensors only when all have come; the trainer poisons a buffer once it was read. Told
    that the memory stays valid, which is wrong here, it loads poison: this test can fail.
    """
    model, shapes = case()
    loader = planned(model)
    if kept:
        load = loader.load

        def told_wrong(bucket: int, tensors: Any, *, keep_alive: bool) -> None:
            del keep_alive
            load(bucket, tensors, keep_alive=True)

        loader.load = told_wrong  # type: ignore[method-assign]
        loader._reload = _without_lesson(loader)
    weights = draw(shapes, 5)
    Sender(weights, num_buckets=2, packed=True).sync(loader, weights)
    if kept:
        with pytest.raises(AssertionError):
            assert_same(model, reference(lambda: case()[0], weights))
    else:
        assert_same(model, reference(lambda: case()[0], weights))


def _without_lesson(loader: Any) -> Any:
    """A watched sync hands out copies whatever it is told; this one does not."""
    make = loader._reload

    def build_inner(part: Any, seen: Any) -> Any:
        inner = make(part, None)
        load = inner.load
        inner.load = lambda bucket, tensors, *, keep_alive: load(bucket, tensors, keep_alive=True)
        del seen
        return inner

    return build_inner


def _push_unpacked(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, packed=False) as sender:
        sender.send(1)
        return full(model, torch.bfloat16)


def test_field_A7_unpacked_tensors_may_be_read_until_finish() -> None:
    """https://github.com/verl-project/verl/pull/7987: vLLM keeps unpacked tensors by reference until their layer is whole."""
    workers = [NativeWorker(0, late=True, delay_s=0.2), NativeWorker(1, late=True)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        wanted = run_ranks(_push_unpacked, 2, server.url)[0]
    for worker in workers:
        assert _is(worker.weights, wanted)


# A11


def _push_many(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=BUCKET, num_slots=2) as sender:
        for version in range(6):
            sender.send(version)
            step(model)
        return sender._stage.plan.num_buckets


def test_field_A11_as_many_handles_as_slots_whatever_the_number_of_syncs() -> None:
    """https://github.com/pytorch/pytorch/issues/198305, https://github.com/pytorch/pytorch/pull/186218: each costs the reader.

    A reader reserves address space for every handle that it has not seen, and two handles of one segment may differ.
    """
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        num_buckets = run_ranks(_push_many, 2, server.url)[0]
        updates = [body["update_info"] for route, body in server.calls if route == "/update_weights"]
    assert num_buckets > 3
    assert len(updates) == 1  # the other syncs were like the first
    sent = [
        str(handle) for u in updates for handles in (u["allocations"] or {}).values() for handle in handles
    ]
    assert len(sent) == len(set(sent)) == 2 * 2
    assert [worker.num_opened for worker in workers] == [2, 2]
