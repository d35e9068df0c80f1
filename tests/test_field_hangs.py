"""Field cases of kind B: what made others hang ends here on every rank, soon, with the cause.

Every case runs over real HTTP and shared memory; the time that it may take is asserted, so that a wait which ends only
with some far time-out fails.
"""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import HTTPWeightSyncClient, ParamMeta, Timeouts, WeightSender, WeightSyncError
from fsdp_ipc import stage as stage_module
from fsdp_ipc.handles import OpenedBuffer
from fsdp_ipc.ipc_handle import IpcHandle
from fsdp_ipc.streamed_source import IteratedSource
from tests import native_worker
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.stock_on_cpu import read_export, stock_on_cpu, stock_uuids
from tests.toy import build, expected, full, make_sender, shard

SOON_S = 15.0
BUCKET = 800
SHORT = Timeouts(request_s=20.0, transfer_s=25.0, control_s=30.0)


def _failed(sender: WeightSender, version: str) -> tuple[str, float]:
    """The error of a send, and the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        sender.send(version)
    return str(caught.value), time.monotonic() - began


def _same_and_soon(results: Sequence[tuple[str, float]]) -> str:
    texts = {text for text, _ in results}
    assert len(texts) == 1, texts
    assert max(seconds for _, seconds in results) < SOON_S
    return texts.pop()


# B1


def _push_in_step(rank: int, world: int, url: str) -> list[float]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    began = []
    with make_sender(model, url, bucket_bytes=BUCKET, num_slots=1) as sender:
        sender.send(1)
        gatherer = sender._stage.gatherer
        gather = gatherer.gather

        def timed(bucket: int) -> None:
            began.append(time.monotonic())
            gather(bucket)

        gatherer.gather = timed  # type: ignore[method-assign]
        sender.send(2)
    return began


class Acknowledging(NativeWorker):
    """Keeps the times at which it let go of each bucket."""

    def __init__(self, index: int, **settings: Any) -> None:
        super().__init__(index, **settings)
        self.times: list[float] = []

    def _receive(self, info: Any, control: Any) -> None:
        consume = control.consume

        def noted(sync: int, count: int) -> None:
            if sync == 2:
                self.times.append(time.monotonic())
            consume(sync, count)

        control.consume = noted
        try:
            super()._receive(info, control)
        finally:
            control.consume = consume


def test_field_B1_no_rank_gathers_ahead_of_the_slowest_worker() -> None:
    """https://github.com/huggingface/trl/issues/7103, https://github.com/huggingface/trl/pull/6798: ranks raced ahead.

    One slot: bucket k + 1 may begin on any rank only after every worker has let go of bucket k.
    """
    workers = [Acknowledging(0, delay_s=0.1), Acknowledging(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = run_ranks(_push_in_step, 2, server.url)
        assert server.published == ["1", "2"]
    slow = workers[0].times
    assert len(slow) >= 4
    for began in ranks:
        assert len(began) == len(slow)
        for bucket in range(1, len(slow)):
            assert began[bucket] > slow[bucket - 1]


# B2, B3, B4


def _push_stock(rank: int, world: int, url: str) -> tuple[str, float]:
    stock_on_cpu("0.32.0")
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, backend="ipc", bucket_bytes=BUCKET, timeouts=SHORT) as sender:
        return _failed(sender, "1")


def _push_native(rank: int, world: int, url: str) -> tuple[str, float]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=BUCKET, timeouts=SHORT) as sender:
        return _failed(sender, "1")


def test_field_B2_the_servers_refusal_of_the_second_chunk_ends_all_ranks_stock() -> None:
    """https://github.com/huggingface/trl/issues/6796: answers were thrown away, and the trainer waited for ever."""
    with FakeServer(uuids=stock_uuids(2), read=read_export) as server:
        server.fail("/update_weights", "boom", after=1)
        text = _same_and_soon(run_ranks(_push_stock, 2, server.url))
    assert "boom" in text
    assert "status 500" in text


def test_field_B2_the_servers_refusal_ends_all_ranks_native() -> None:
    """https://github.com/huggingface/trl/issues/6796 on the wire of our own, where one request carries all chunks."""
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        server.fail("/update_weights", "boom")
        text = _same_and_soon(run_ranks(_push_native, 2, server.url))
    assert "boom" in text


def test_field_B3_a_worker_that_breaks_half_way_ends_the_other_rank_too() -> None:
    """https://github.com/MoonshotAI/checkpoint-engine/issues/38: the parameter server stayed in its receive."""
    workers = [NativeWorker(0), NativeWorker(1, fail_at=2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        text = _same_and_soon(run_ranks(_push_native, 2, server.url))
        assert server.published == []
    assert "worker 1 breaks at bucket 2" in text


def _push_from_a_bad_source(rank: int, world: int, url: str) -> tuple[str, float]:
    metas = [ParamMeta(f"p{n}", torch.float32, (8, 8)) for n in range(5)]

    def pass_() -> Iterator[tuple[str, torch.Tensor]]:
        for n, meta in enumerate(metas):
            if n == 3 and rank == 1:
                raise ValueError(f"no value for {meta.name} on rank {rank}")
            yield meta.name, torch.full(meta.shape, float(n))

    source = IteratedSource(metas, pass_)
    client = HTTPWeightSyncClient(url)
    with WeightSender(
        source, client, group=dist.group.WORLD, bucket_bytes=256, num_slots=2, timeouts=SHORT
    ) as sender:
        return _failed(sender, "1")


def test_field_B4_a_source_that_raises_on_one_rank_ends_all() -> None:
    """https://github.com/sgl-project/sglang/pull/35093: the other ranks sat in a plain barrier for two hours."""
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        text = _same_and_soon(run_ranks(_push_from_a_bad_source, 2, server.url))
        assert server.published == []
    assert "rank 1: ValueError: no value for p3 on rank 1" in text
    assert "rank 0:" not in text


# B5


def _push_without_memory(rank: int, world: int, url: str) -> tuple[str, float]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    real = stage_module.StagingBuffer

    def no_room(**settings: Any) -> Any:
        if rank == 1:
            raise MemoryError("2 slots of 800 bytes do not fit")
        return real(**settings)

    stage_module.StagingBuffer = no_room  # type: ignore[assignment, misc]
    with make_sender(model, url, bucket_bytes=BUCKET, timeouts=SHORT) as sender:
        failed = _failed(sender, "1")
        stage_module.StagingBuffer = real  # type: ignore[misc]
        sender.send("2")
    return failed


def test_field_B5_one_rank_without_memory_ends_all_before_the_server_hears_of_it() -> None:
    """https://github.com/Tencent-Hunyuan/UniRL/pull/494: no agreement before the buffers were allocated."""
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        text = _same_and_soon(run_ranks(_push_without_memory, 2, server.url))
        assert server.published == ["2"]
        assert server.routes.count("/start_weight_update") == 1
    assert "rank 1: MemoryError: 2 slots of 800 bytes do not fit" in text
    for worker in workers:
        for name, value in expected(build(), torch.bfloat16).items():
            assert torch.equal(worker.weights[name], value)


@pytest.mark.parametrize(("request_s", "transfer_s", "control_s"), [(30, 20, 60), (30, 60, 50), (30, 30, 60)])
def test_field_B5_time_outs_that_hide_each_other_are_refused(
    request_s: float, transfer_s: float, control_s: float
) -> None:
    """https://github.com/Tencent-Hunyuan/UniRL/pull/494: the control time-out must exceed that of vLLM's update."""
    with pytest.raises(ValueError, match="time-outs must grow outwards"):
        Timeouts(request_s=request_s, transfer_s=transfer_s, control_s=control_s)


def _push_counting_full_tensors(rank: int, world: int, url: str) -> int:
    metas = [ParamMeta(f"p{n}", torch.float32, (16, 16)) for n in range(6)]
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def pass_() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for n, meta in enumerate(metas):
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = torch.full(meta.shape, float(n))
            alive.append(weakref.ref(tensor))
            yield meta.name, tensor
            del tensor

    client = HTTPWeightSyncClient(url)
    source = IteratedSource(metas, pass_)
    with WeightSender(source, client, group=dist.group.WORLD, bucket_bytes=2048) as sender:
        sender.send(1)
    return most


def test_field_B5_one_full_tensor_at_a_time() -> None:
    """https://github.com/Tencent-Hunyuan/UniRL/pull/494: the tensor before is dropped before the next is gathered."""
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        assert run_ranks(_push_counting_full_tensors, 2, server.url) == [0, 0]
    for worker in workers:
        assert [float(worker.weights[f"p{n}"][3, 3]) for n in range(6)] == [0, 1, 2, 3, 4, 5]


# B6


def _push_to_silence(rank: int, world: int, url: str, hold: float) -> tuple[str, float]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    limits = Timeouts(request_s=hold, transfer_s=hold + 1, control_s=hold + 8)
    began = time.monotonic()
    with (
        pytest.raises(WeightSyncError) as caught,
        make_sender(model, url, bucket_bytes=BUCKET, timeouts=limits) as sender,
    ):
        sender.send(1)
    return str(caught.value), time.monotonic() - began


def test_field_B6_a_port_that_accepts_and_never_answers() -> None:
    """https://github.com/verl-project/verl/pull/7366: no time-out on either end, and all ranks hung."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    held.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        text = _same_and_soon(run_ranks(_push_to_silence, 2, url, 1.5))
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for connection in held:
        connection.close()
    assert "timed out after 1.5 s" in text


def test_field_B6_an_update_that_is_never_answered() -> None:
    """https://github.com/Tencent-Hunyuan/UniRL/issues/337: as above, half-way through."""
    route = "/update_weights"
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        server.hang(route)
        text = _same_and_soon(run_ranks(_push_to_silence, 2, server.url, 3.0))
    assert "timed out after 3 s" in text
    assert route in text


# B18


def test_field_B18_a_worker_that_cannot_open_the_memory_ends_all_at_once(
    monkeypatch: pytest.MonkeyPatch, clean_shm: None
) -> None:
    """https://github.com/pytorch/pytorch/pull/193994: peers waited at the barrier for two minutes."""
    opened: list[OpenedBuffer] = []
    real = native_worker.open_handle

    def fail_on_the_second(handle: IpcHandle, device: torch.device) -> OpenedBuffer:
        if len(opened) == 1:
            opened.append(opened[0])
            raise RuntimeError("CUDA error: invalid resource handle")
        opened.append(real(handle, device))
        return opened[-1]

    monkeypatch.setattr(native_worker, "open_handle", fail_on_the_second)
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        results = run_ranks(_push_again, 2, server.url)
        assert server.published == ["2"]
    text = _same_and_soon([failed for failed, _ in results])
    assert "invalid resource handle" in text
    for worker in workers:
        for name, value in results[0][1].items():
            assert torch.equal(worker.weights[name], value)


def _push_again(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=BUCKET, timeouts=SHORT) as sender:
        failed = _failed(sender, "1")
        sender.send("2")
    return failed, full(model, torch.bfloat16)
