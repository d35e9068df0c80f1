"""A real vLLM server with two data-parallel replicas on CPU, updated over HTTP by a trainer written by hand.

What counts is what a server serves that loaded the same weights from a checkpoint: every parameter's checksum, and
the log-probabilities of a prompt to the last bit. The checksums alone would prove little here: on CPU vLLM packs linear
weights away and checksums empty parameters.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_ipc import HTTPWeightSyncClient, WeightSender, WeightSyncError
from fsdp_ipc.digest_file import DigestFile
from fsdp_ipc.gather import Gatherer
from fsdp_ipc.handles import allocate
from fsdp_ipc.streamed_source import PairsSource
from fsdp_ipc.wire.native import TOKEN_ENV
from tests.hand_trainer import HandTrainer, packed_layout, unpacked_layout
from tests.runner import RankFailure, run_ranks
from tests.served import PROMPT, Served, served
from tests.tiny_models import qwen3_config, qwen3_weights, write_checkpoint
from tests.vllm_server import Server, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(900)]

TOKEN = "a token that both sides know"
CONFIG = qwen3_config(tied=True)


class HTTPRoutes:
    """The four routes; an answer other than 200 becomes an error with the server's text."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def init(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start(self) -> None:
        self._post("/start_weight_update")

    def update(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish(self, version: str | None) -> None:
        self._post("/finish_weight_update", {"weight_version": version})

    def _post(self, route: str, body: object | None = None) -> None:
        answer = self.server.post(route, body)
        if answer.status_code != requests.codes.ok:
            raise RuntimeError(f"{route} answered {answer.status_code}: {answer.text}")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Served]:
    """What a server serves that loaded the weights of a seed from a checkpoint."""
    folder = tmp_path_factory.mktemp("reference")
    checkpoint = write_checkpoint(folder / "model", CONFIG, qwen3_weights(CONFIG, seed=2))
    with vllm_server(checkpoint, log=folder / "server.log", load_format="auto") as server:
        return {2: served(server, 0)}


@pytest.fixture(scope="module")
def server(loaded: dict[int, Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server under test, started with random weights. Waits for the other one to be gone: cores are few."""
    folder = tmp_path_factory.mktemp("server")
    with vllm_server(
        write_checkpoint(folder / "model", CONFIG),
        log=folder / "server.log",
        weight_transfer_config={"backend": "fsdp_ipc"},
        data_parallel_size=2,
        env={"FSDP_IPC_TOKEN": TOKEN},
    ) as server:
        yield server


@pytest.fixture
def trainer(server: Server) -> Iterator[HandTrainer]:
    with HandTrainer(HTTPRoutes(server), num_ranks=2, init_overrides={"token": TOKEN}) as trainer:
        yield trainer


def _named(seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(qwen3_weights(CONFIG, seed=seed).items())


def _assert_serves(server: Server, expected: Served) -> None:
    for replica in range(2):
        found = served(server, replica)
        assert found == expected


def _version(server: Server) -> str:
    return str(server.get("/weight_info").json()["weight_version"])


def test_both_replicas_serve_what_a_checkpoint_load_serves(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    assert served(server, 0).logprobs != loaded[2].logprobs
    hellos = trainer.connect()
    assert [hello and hello["worker_index"] for hello in hellos] == [0, 1]
    assert all(
        hello is not None and hello["kind"] == "hello" and hello["experts"] is None for hello in hellos
    )
    reports = trainer.send(packed_layout(_named(2), num_buckets=5), version="packed")
    assert [report and (report["kind"], report["sync"], report["num_tensors"]) for report in reports] == [
        ("sync", 1, len(_named(2)))
    ] * 2
    _assert_serves(server, loaded[2])
    assert _version(server) == "packed"
    # Other weights and back, so that the first result cannot stand in for the third.
    trainer.send(packed_layout(_named(3), num_buckets=5), version="other")
    assert served(server, 1).logprobs != loaded[2].logprobs
    trainer.send(packed_layout(_named(2), num_buckets=5), version="again")
    _assert_serves(server, loaded[2])
    trainer.send(unpacked_layout(_named(3)), version="unpacked 3")
    trainer.send(unpacked_layout(_named(2)), version="unpacked 2")
    _assert_serves(server, loaded[2])
    assert _version(server) == "unpacked 2"


def test_syncs_like_the_one_before_need_two_requests(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    """The replicas load inside of start; finish is at the server before start has ended, and is done after it."""
    trainer.connect()
    trainer.send(packed_layout(_named(3), num_buckets=5), version="told")
    for number, seed in enumerate((2, 3, 2)):
        reports = trainer.send(
            packed_layout(_named(seed), num_buckets=5),
            version=f"repeated {number}",
            offered=True,
            queue_finish=True,
        )
        assert [report and report["sync"] for report in reports] == [number + 2] * 2
        assert _version(server) == f"repeated {number}"
    _assert_serves(server, loaded[2])


def test_a_start_that_fails_publishes_nothing_though_finish_is_queued(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    trainer.connect()
    trainer.send(packed_layout(_named(3), num_buckets=2), version="good")
    said: list[str] = []

    def let_one_down(bucket: int) -> None:
        if bucket == 1:
            trainer.controls[1].fail(trainer.sync, "one replica is let down")
            with pytest.raises(RuntimeError) as caught:
                trainer.routes.finish("never")
            said.append(str(caught.value))

    with pytest.raises(RuntimeError, match="one replica is let down"):
        trainer.send(packed_layout(_named(2), num_buckets=2), before_bucket=let_one_down, offered=True)
    assert len(said) == 1
    assert "called without a matching start_weight_update" in said[0]
    assert _version(server) == "good"
    # Nothing is left open: one start failed, and after the other the finish that was queued was done.
    with pytest.raises(RuntimeError, match="must be called before"):
        trainer.routes.update({"session": trainer.session, "abort": "one replica was let down"})
    trainer.connect()
    trainer.send(packed_layout(_named(2), num_buckets=2), version="better")
    assert _version(server) == "better"
    _assert_serves(server, loaded[2])


NORM = "model.norm.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "unknown": (
        lambda n: [*n, ("model.nonsense", torch.zeros(3))],
        ["does not know", "does not know", "nonsense"],
    ),
    "missing": (
        lambda n: [(k, t) for k, t in n if k != K_PROJ],
        ["not get all", "layers.1.self_attn.qkv_proj"],
    ),
    "duplicate": (lambda n: [*n, n[4]], ["more than once", "layers.0.self_attn.v_proj"]),
    "shape": (lambda n: [(k, t[:-1] if k == NORM else t) for k, t in n], ["wrong shapes", NORM]),
    "dtype": (lambda n: [(k, t.float() if k == NORM else t) for k, t in n], ["round", NORM]),
}


def test_refusals_name_the_tensor_publish_nothing_and_leave_the_server_working(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    trainer.connect()
    trainer.send(packed_layout(_named(2), num_buckets=4), version="before")
    for bend, words in REFUSED.values():
        with pytest.raises(RuntimeError, match=r"/update_weights answered 500") as caught:
            trainer.send(packed_layout(bend(_named(3)), num_buckets=6), version="never")
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert _version(server) == "before"
        trainer.connect()
    _assert_serves(server, loaded[2])
    trainer.send(packed_layout(_named(2), num_buckets=4), version="after")
    _assert_serves(server, loaded[2])


def test_tokens_and_sessions_are_checked(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    trainer.connect()
    trainer.send(packed_layout(_named(2), num_buckets=4), version="token")
    with (
        HandTrainer(trainer.routes, num_ranks=2, init_overrides={"token": "guess"}) as stranger,
        pytest.raises(RuntimeError, match="FSDP_IPC_TOKEN"),
    ):
        stranger.connect()
    trainer.update_overrides = {"session": "f" * 32}
    with pytest.raises(RuntimeError, match="unknown session"):
        trainer.send(packed_layout(_named(3), num_buckets=4), version="never")
    assert _version(server) == "token"
    trainer.update_overrides = {}
    # A refused stranger did not cost the session.
    trainer.send(packed_layout(_named(2), num_buckets=4), version="mine")
    _assert_serves(server, loaded[2])


def test_a_trainer_that_fails_half_way_can_start_anew(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    def fail_at_three(bucket: int) -> None:
        if bucket == 3:
            raise OSError("lost a rank")

    trainer.connect()
    trainer.send(packed_layout(_named(3), num_buckets=6), version="whole")
    with pytest.raises(RuntimeError, match="lost a rank"):
        trainer.send(packed_layout(_named(2), num_buckets=6), version="never", before_bucket=fail_at_three)
    assert _version(server) == "whole"
    # The model is a mixture now, but whole: it answers, and the next full sync is exact.
    assert len(served(server, 0).logprobs) == len(PROMPT) - 1
    trainer.connect()
    trainer.send(packed_layout(_named(2), num_buckets=6), version="recovered")
    _assert_serves(server, loaded[2])
    assert _version(server) == "recovered"


def test_an_update_left_open_is_closed_by_an_abort(
    server: Server, trainer: HandTrainer, loaded: dict[int, Served]
) -> None:
    trainer.connect()
    trainer.send(packed_layout(_named(3), num_buckets=4), finish=False)
    with HandTrainer(trainer.routes, num_ranks=2, init_overrides={"token": TOKEN}) as successor:
        successor.connect()
        with pytest.raises(RuntimeError, match="already"):
            successor.send(packed_layout(_named(2), num_buckets=4))
        with pytest.raises(RuntimeError, match="aborted: the trainer before"):
            successor.routes.update(
                {"session": successor.session, "abort": "the trainer before left it open"}
            )
        successor.send(packed_layout(_named(2), num_buckets=4), version="successor")
        _assert_serves(server, loaded[2])


def _push_shards(rank: int, world: int, url: str) -> list[tuple[int, int]]:
    os.environ[TOKEN_ENV] = TOKEN
    mesh = init_device_mesh("cpu", (world,))
    buffers = []
    pairs: list[tuple[str, torch.Tensor]] = []
    for name, tensor in _named(3):
        held = distribute_tensor(tensor, mesh, [Shard(0)])
        buffers.append(allocate(held._local_tensor.nbytes, torch.device("cpu"), key="cpu:test:0"))
        shared = buffers[-1].bytes.view(tensor.dtype).view(held._local_tensor.shape)
        held._local_tensor = shared.copy_(held._local_tensor)
        pairs.append((name, held))
    seen = []
    with WeightSender(PairsSource(pairs), HTTPWeightSyncClient(url), group=dist.group.WORLD) as sender:
        for seed in (3, 2, 3, 2):
            for (_, held), (_, tensor) in zip(pairs, _named(seed), strict=True):
                held._local_tensor.copy_(distribute_tensor(tensor, mesh, [Shard(0)])._local_tensor)  # type: ignore[attr-defined]
            stats = sender.send(f"shards {seed}")
            seen.append((stats.peer_bytes, stats.resident_bytes))
    return seen


def test_shards_that_workers_read_where_they_lie(server: Server, loaded: dict[int, Served]) -> None:
    nbytes = sum(tensor.nbytes for _, tensor in _named(2))
    for seen in run_ranks(_push_shards, 2, server.url, timeout_s=240):
        assert seen == [(nbytes // 2, nbytes)] * 4
    assert _version(server) == "shards 2"
    _assert_serves(server, loaded[2])


def _push_verified(rank: int, world: int, url: str) -> tuple[list[dict[str, Any]], str]:
    os.environ[TOKEN_ENV] = TOKEN
    source = PairsSource(_named(2))
    client = HTTPWeightSyncClient(url)
    with WeightSender(source, client, group=dist.group.WORLD, bucket_bytes=40_000, verify="full") as sender:
        reports = [sender.send(version).worker or {} for version in ("verified 1", "verified 2")]
        write = DigestFile.write

        def wrong(
            self: DigestFile, sync: int, share: int, num: int, digests: torch.Tensor, **parts: Any
        ) -> None:
            write(self, sync, share, num, digests + (rank == 1), **parts)

        DigestFile.write = wrong  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError) as caught:
            sender.send("never")
        DigestFile.write = write  # type: ignore[method-assign]
        sender.send("verified 3")
    return reports, str(caught.value)


def test_digests_that_differ_keep_a_version_back(server: Server, loaded: dict[int, Served]) -> None:
    results = run_ranks(_push_verified, 2, server.url, timeout_s=240)
    for reports, error in results:
        for report in reports:
            # vLLM's CPU kernels keep all other weights outside the parameters.
            assert report["verified"] == 9
            assert report["verified"] + sum(report["unverified"].values()) == len(_named(2))
        assert "worker 1 (cpu:" in error
        assert "does not hold what trainer rank 1 sent" in error
        assert "9 of 9 digests differ" in error
        assert "'model.norm.weight' (sent " in error or "more" in error
    assert _version(server) == "verified 3"
    _assert_serves(server, loaded[2])


def _break_on_rank_1(sender: WeightSender, rank: int, how: Callable[[], None]) -> Callable[[], None]:
    """Let rank 1 do something in the middle of the next send; gives back what undoes it."""
    load = Gatherer.load

    def broken(gatherer: Gatherer, bucket: int, tensors: Any) -> None:
        if rank == 1 and bucket == 2:
            how()
        load(gatherer, bucket, tensors)

    Gatherer.load = broken  # type: ignore[method-assign]

    def undo() -> None:
        Gatherer.load = load  # type: ignore[method-assign]

    return undo


def _lose_a_disk() -> None:
    raise OSError("lost a disk")


def _push_and_pause(rank: int, world: int, url: str) -> tuple[str, bool, bool]:
    os.environ[TOKEN_ENV] = TOKEN
    client = HTTPWeightSyncClient(url)
    settings: dict[str, Any] = {"group": dist.group.WORLD, "bucket_bytes": 40_000, "on_failure": "pause"}
    with WeightSender(PairsSource(_named(2)), client, **settings) as sender:
        sender.send("whole")
        undo = _break_on_rank_1(sender, rank, _lose_a_disk)
        with pytest.raises(WeightSyncError) as caught:
            sender.send("never")
        undo()
        dist.barrier()
        paused = client.is_paused()
        dist.barrier()
        sender.send("resumed")
        dist.barrier()
        return str(caught.value), paused, client.is_paused()


def test_on_failure_pause_keeps_a_real_server_paused(server: Server, loaded: dict[int, Served]) -> None:
    for error, paused, after in run_ranks(_push_and_pause, 2, server.url, timeout_s=240):
        assert "rank 1: OSError: lost a disk" in error and "the server stays paused" in error
        assert (paused, after) == (True, False)
    assert _version(server) == "resumed"
    _assert_serves(server, loaded[2])


def _push_and_die(rank: int, world: int, url: str, folder: str) -> None:
    os.environ[TOKEN_ENV] = TOKEN
    client = HTTPWeightSyncClient(url)
    with WeightSender(PairsSource(_named(3)), client, group=dist.group.WORLD, bucket_bytes=40_000) as sender:
        sender.send("whole again")
        _break_on_rank_1(sender, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(WeightSyncError) as caught:
            sender.send("never")
        Path(folder, "said").write_text(str(caught.value))


def _push_well(rank: int, world: int, url: str) -> None:
    os.environ[TOKEN_ENV] = TOKEN
    client = HTTPWeightSyncClient(url)
    with WeightSender(PairsSource(_named(2)), client, group=dist.group.WORLD) as sender:
        sender.send("the next job")


def test_a_trainer_rank_killed_in_the_middle_leaves_a_server_that_the_next_job_can_use(
    server: Server, loaded: dict[int, Served], tmp_path: Path
) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_push_and_die, 2, server.url, str(tmp_path), timeout_s=240)
    assert set(caught.value.failures) == {1}, caught.value
    said = (tmp_path / "said").read_text()
    assert "rank 1: its process (pid " in said and "died. Restart the job" in said
    assert _version(server) == "whole again"
    run_ranks(_push_well, 2, server.url, timeout_s=240)
    assert _version(server) == "the next job"
    _assert_serves(server, loaded[2])
