"""`on_failure`: after a failed sync the server goes on as it is, or stays paused until one has gone well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import HTTPWeightSyncClient, WeightSyncError
from fsdp_ipc.callbacks import PauseServer
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.toy import build, expected, make_sender, shard


def _fail(make: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        make()
    return caught.value


def _push(rank: int, world: int, url: str, policy: str, callbacks: bool) -> tuple[str, bool, bool]:
    """A good send, one that the second rank breaks, and a good one; what the server is told in between."""
    model = shard(build(), init_device_mesh("cpu", (world,)))
    client = HTTPWeightSyncClient(url)
    settings = {"callbacks": [PauseServer()] if callbacks else []}
    with make_sender(model, url, bucket_bytes=800, on_failure=policy, **settings) as sender:
        sender.send(1)
        load = sender._stage.gatherer.load

        def broken(bucket: int, tensors: Any) -> None:
            if rank == 1 and bucket == 1:
                raise OSError("the disk is on fire")
            load(bucket, tensors)

        sender._stage.gatherer.load = broken
        error = _fail(lambda: sender.send(2))
        sender.group.vote("look")
        paused = client.is_paused()
        sender.group.vote("seen")
        sender.send(3)
        sender.group.vote("look")
        return str(error), paused, client.is_paused()


@pytest.mark.parametrize("callbacks", [False, True])
@pytest.mark.parametrize("policy", ["raise", "pause"])
def test_the_server_stays_paused_until_a_send_goes_well(policy: str, callbacks: bool) -> None:
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        for said, paused, after in run_ranks(_push, 2, server.url, policy, callbacks):
            assert "rank 1: OSError: the disk is on fire" in said
            assert paused == (policy == "pause")
            assert ("the server stays paused" in said and "resume()" in said) == (policy == "pause")
            assert not after
        assert server.published == ["1", "3"]
        assert server.routes.count("/pause") == (3 if callbacks else policy == "pause")
    for worker in workers:
        wanted = expected(build(), torch.bfloat16)
        assert all(torch.equal(worker.weights[name], value) for name, value in wanted.items())


def _unable(rank: int, world: int, url: str) -> tuple[str, str, str]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, on_failure="pause") as sender:
        first = str(_fail(lambda: sender.send(1)))
        # The server resumes as badly as it pauses: all ranks hear of it, and the next send tries again.
        second = str(_fail(lambda: sender.send(2)))
        sender.send(3)
    wrong = str(_fail(lambda: make_sender(model, url, on_failure="retry")))
    return first, second, wrong


def test_a_server_that_cannot_pause_or_resume_is_told_of() -> None:
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        server.fail("/update_weights", "no update today")
        server.fail("/pause", "no pause today")
        server.fail("/resume", "no resume today")
        told = run_ranks(_unable, 2, server.url)
        assert server.published == ["1", "2", "3"][1:]
        assert not server.paused
    for first, second, wrong in told:
        assert "no update today" in first and "on_failure='pause'" in first
        assert "'resume'" in second and "no resume today" in second
        assert "expected 'raise' or 'pause'" in wrong
    assert "could NOT be paused" in told[0][0] and "no pause today" in told[0][0]


def _too_small(rank: int, world: int, url: str) -> tuple[str, bool, bool]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=8, on_failure="pause") as sender:
        error = _fail(lambda: sender.send(1))
        sender.group.vote("look")
        return str(error), error.server_paused, HTTPWeightSyncClient(url).is_paused()


def test_a_server_that_got_no_weights_is_left_alone() -> None:
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        for said, told, paused in run_ranks(_too_small, 2, server.url):
            assert "'plan'" in said and "bucket_bytes" in said and "on_failure" not in said
            assert not told and not paused


def _sender_dies(rank: int, world: int, url: str) -> tuple[str, bool]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    sender = make_sender(model, url, bucket_bytes=800, on_failure="pause")
    sender.send(1)
    if rank == 0:
        return "", False  # as if it had died: it never comes to the next send
    error = _fail(lambda: sender._policy.failed(known, 2) or _raise(known))
    return str(error), error.server_paused


known = WeightSyncError("gather", {0: "its process (pid 1) died. Restart the job"})


def _raise(error: WeightSyncError) -> None:
    raise error


def test_nobody_says_that_a_dead_rank_has_paused_the_server() -> None:
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        _, (said, paused) = run_ranks(_sender_dies, 2, server.url)
        assert not server.paused
    assert "rank 0, which talks to the server, did not say that it has paused it" in said
    assert not paused


class _Bare:
    """vLLM's four verbs and no more."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _bare(rank: int, world: int) -> str:
    from fsdp_ipc import DTensorSource, WeightSender

    model = shard(build(), init_device_mesh("cpu", (world,)))
    make = WeightSender
    return str(_fail(lambda: make(DTensorSource(model), _Bare() if rank == 0 else None, on_failure="pause")))


def test_a_client_that_cannot_pause_is_refused_at_once() -> None:
    for said in run_ranks(_bare, 2):
        assert "_Bare has no pause and no resume" in said
