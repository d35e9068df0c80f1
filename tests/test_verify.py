"""`verify=`: what the workers hold is what the trainer meant to send, or the version is not published and all hear why."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender, WeightSyncError
from fsdp_ipc.digest_file import DigestFile, Region
from fsdp_ipc.experts import HALVES
from fsdp_ipc.naming import naming_for
from fsdp_ipc.verify import SAMPLE_SHARES, SentVerifier
from fsdp_ipc.vllm_plugin.copy_layout import Layout
from fsdp_ipc.vllm_plugin.copy_memory import Piece
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow
from fsdp_ipc.vllm_plugin.verify import PART, LiveVerifier, VerificationError
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.plain_reload import Model
from tests.runner import run_ranks
from tests.test_copy_plan import (
    Sender,
    cast,
    columns,
    draw,
    experts,
    fused,
    norm,
    planned,
    qkv,
    transposed,
    vocab,
)
from tests.test_digest import by_definition
from tests.test_rank_local_experts import _sharded as sharded_experts
from tests.toy import build, make_sender, shard, step
from tests.verifying_worker import HoldingWorker, VerifyingWorker, toy_model

CPU = torch.device("cpu")


# The worker's half, on every way in which a plan puts tensors into parameters.

WHOLE = {
    "norm": norm,
    "qkv": qkv,
    "vocab": vocab,
    "transposed": transposed,
    "experts": experts,
    "fused": fused,
}


def _rows(weights: dict[str, torch.Tensor]) -> list[list[TensorRow]]:
    rows = [TensorRow(name, t.dtype, tuple(t.shape), 0, 0, 0) for name, t in weights.items()]
    return [rows[::2], rows[1::2]]


class Checked:
    """A model that was synced twice, and the digests that its trainer left."""

    def __init__(self, case: Callable[[], Any], dtype: torch.dtype = torch.float32) -> None:
        self.model, shapes = case()
        self.loader = planned(self.model)
        self.weights = draw(shapes, 2, dtype)
        sender = Sender(self.weights)
        sender.sync(self.loader, draw(shapes, 1, dtype))
        sender.sync(self.loader, self.weights)
        self.rows = _rows(self.weights)
        flat = [row for bucket in self.rows for row in bucket]
        digests = [
            by_definition(self.weights[r.name].contiguous().view(-1).view(torch.uint8).tolist()) for r in flat
        ]
        self.file = DigestFile.create(len(flat), rank=0)
        self.sent = torch.tensor([d - (1 << 64) if d >> 63 else d for d in digests])
        self.verifier = LiveVerifier(CPU)
        self.verifier.open(self.file.name, len(flat))

    def check(self, share: int = 0, num_shares: int = 1) -> Any:
        self.file.write(2, share, num_shares, self.sent)
        return self.verifier.check(2, self.rows, *self.loader.where(), "worker 0")

    def close(self) -> None:
        self.file.close()
        self.verifier.close()


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_every_byte_of_every_parameter_is_covered(case: Callable[[], Any], clean_shm: None) -> None:
    checked = Checked(case)
    counts = checked.check()
    assert (counts.verified, counts.unverified) == (len(checked.weights), {})
    # Every element of every live parameter, but for padding, is one of a sent tensor: none may change unseen.
    held = sum(tensor.numel() for tensor in checked.weights.values())
    noticed = 0
    for param in checked.model.parameters():
        flat = param.data.view(torch.uint8).view(-1) if param.is_contiguous() else None
        assert flat is not None
        for element in range(param.numel()):
            at = element * 4 + element % 4
            flat[at] ^= 16
            try:
                checked.check()
            except VerificationError:
                noticed += 1
            flat[at] ^= 16
    assert noticed == held
    checked.check()
    checked.close()


def test_a_mismatch_names_the_tensor_and_both_digests(clean_shm: None) -> None:
    checked = Checked(qkv)
    live = next(iter(checked.model.parameters())).data
    live[4:6, 0], live[6:8, 0] = live[6:8, 0].clone(), live[4:6, 0].clone()  # k and v
    with pytest.raises(VerificationError) as caught:
        checked.check()
    text = str(caught.value)
    for name in ("k.weight", "v.weight"):
        value = by_definition(checked.weights[name].view(-1).view(torch.uint8).tolist())
        assert f"{name!r} (sent {value:016x}, held " in text
    assert "'q.weight'" not in text
    assert "worker 0" in text
    assert "trainer rank 0" in text
    checked.close()


@pytest.mark.parametrize("case", [columns, cast])
def test_what_cannot_be_mapped_back_is_counted(case: Callable[[], Any], clean_shm: None) -> None:
    checked = Checked(case)
    counts = checked.check()
    assert counts.verified == 0
    (reason,) = counts.unverified
    assert "a part of it, which the trainer digests from the next sync on" in reason or case is cast
    assert "cast" in reason or case is columns
    checked.close()


def test_all_shares_together_cover_everything(clean_shm: None) -> None:
    checked = Checked(experts)
    verified = [checked.check(share, 3).verified for share in range(3)]
    assert sum(verified) == len(checked.weights)
    assert min(verified) > 0
    checked.close()


def test_many_short_runs_are_put_in_order_first(monkeypatch: pytest.MonkeyPatch, clean_shm: None) -> None:
    monkeypatch.setattr("fsdp_ipc.vllm_plugin.verify._MAX_RUNS", 2)
    for case in (transposed, experts, lambda: fused(transpose=True)):
        checked = Checked(case)
        assert checked.check().verified == len(checked.weights)
        param = next(iter(checked.model.parameters()))
        param.data.view(-1)[3] += 1
        with pytest.raises(VerificationError):
            checked.check()
        checked.close()


# The whole way: a sharded trainer, a server, workers that load.


def _workers(tamper: Callable[[Model], object] | None = None) -> list[VerifyingWorker]:
    return [VerifyingWorker(0, toy_model(), tamper=tamper), VerifyingWorker(1, toy_model())]


def _push(rank: int, world: int, url: str, settings: dict[str, Any]) -> Any:
    """Several sends of a changing model; what each gave on this rank."""
    model = shard(build(), init_device_mesh("cpu", (world,)))
    stats, errors = [], []
    with make_sender(model, url, **{"bucket_bytes": 800, **settings}) as sender:
        for version in range(1, 5):
            try:
                stats.append(sender.send(version).to_json())
            except WeightSyncError as error:
                errors.append((version, error.step, error.failures))
            step(model)
    return stats, errors


CANNOT = {"cast when loaded": 1, "computed, not copied": 2}


@pytest.mark.parametrize("packed", [True, False])
def test_full_compares_all_that_can_be(packed: bool, clean_shm: None) -> None:
    workers = _workers()
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        settings = {"verify": "full", "packed": packed, "bucket_bytes": 800 if packed else None}
        ranks = run_ranks(_push, 2, server.url, settings)
        assert server.published == ["1", "2", "3", "4"]
    for stats, errors in ranks:
        assert errors == []
        for one in stats:  # the first sync, too: its plan is there when the digests are compared
            report = one["worker"]
            assert report["unverified"] == CANNOT
            assert report["verified"] == one["num_tensors"] - 3


def test_sample_covers_all_in_turn() -> None:
    workers = _workers()
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = run_ranks(_push, 2, server.url, {"verify": "sample"})
    assert SAMPLE_SHARES == 8
    for stats, errors in ranks:
        assert errors == []
        looked = [s["worker"]["verified"] + sum(s["worker"]["unverified"].values()) for s in stats]
        assert min(looked) >= 1
        assert sum(looked) < stats[0]["num_tensors"]


def test_a_repeated_sync_is_verified_without_the_update_request() -> None:
    workers = [VerifyingWorker(index, toy_model()) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        run_ranks(_push, 2, server.url, {"verify": "full"})
        assert server.published == ["1", "2", "3", "4"]
        assert server.routes.count("/update_weights") == 1
    for worker in workers:
        assert worker.taken == [2, 3, 4]
        assert [report["sync"] for report in worker.reports] == [1, 2, 3, 4]
        assert all(report["verified"] for report in worker.reports)


def test_off_asks_the_workers_for_nothing() -> None:
    workers = _workers(tamper=_flip)
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = run_ranks(_push, 2, server.url, {})
        assert server.published == ["1", "2", "3", "4"]
        assert not [body for route, body in server.calls if "digests" in str(body)]
    assert all("verified" not in (s["worker"] or {}) for stats, _ in ranks for s in stats)


def test_a_worker_that_does_not_verify_is_told_apart() -> None:
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0), NativeWorker(1)]) as server:
        ranks = run_ranks(_push, 2, server.url, {"verify": "full"})
    for stats, _ in ranks:
        for one in stats:
            assert one["worker"]["unverified"] == {"the worker does not verify": one["num_tensors"]}


def _flip(model: Model) -> None:
    """One bit of the second tensor in the first merged layer."""
    model.first.weight.data.view(torch.int16)[20, 3] ^= 1


class Once:
    """Does it in one sync only."""

    def __init__(self, sync: int, act: Callable[[Model], None]) -> None:
        self.left, self.act = sync, act

    def __call__(self, model: Model) -> None:
        self.left -= 1
        if self.left == 0:
            self.act(model)


@pytest.mark.parametrize("sync", [1, 3])
def test_one_bit_in_one_worker_stops_the_version_on_all_ranks(sync: int, clean_shm: None) -> None:
    workers = _workers(tamper=Once(sync, _flip))
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = run_ranks(_push, 2, server.url, {"verify": "full"})
        assert server.published == [str(v) for v in range(1, 5) if v != sync]
    causes = {str(errors) for _, errors in ranks}
    assert len(causes) == 1
    ((version, step_name, failures),) = ranks[1][1]
    assert (version, step_name) == (sync, "finish")
    (text,) = failures.values()
    assert "'layers.2.weight' (sent " in text
    assert "worker 0 (cpu:" in text
    assert "trainer rank 0" in text
    assert "1 of 10 digests differ" in text


def _push_with_a_rank_that_gathers_wrong(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=800, verify="full") as sender:
        sender.send(1)
        gatherer = sender._stage.gatherer
        good = gatherer.gather

        def wrong(bucket: int) -> None:
            good(bucket)
            if rank == 1 and bucket == 1:
                sender._stage.memory[1][5] ^= 1

        gatherer.gather = wrong  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError) as caught:
            sender.send(2)
        gatherer.gather = good  # type: ignore[method-assign]
        sender.send(3)
        return str(caught.value)


def test_a_rank_that_gathered_other_bytes_than_the_rest_is_found() -> None:
    with FakeServer(backend="fsdp_ipc", workers=_workers()) as server:
        first, second = run_ranks(_push_with_a_rank_that_gathers_wrong, 2, server.url)
        assert server.published == ["1", "3"]
    assert first == second
    assert "of the tensors of bucket 1 (" in first
    assert "all ranks must agree" in first


def _push_with_stale_digests(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    texts = []
    with make_sender(model, url, bucket_bytes=800, verify="full") as sender:
        sender.send(1)
        write = DigestFile.write
        for forget in ("the number", "the digests"):

            def stale(
                self: Any,
                sync: int,
                share: int,
                num: int,
                digests: torch.Tensor,
                *,
                how: str = forget,
                **parts: Any,
            ) -> None:
                if how == "the number":
                    return
                write(self, sync, share, num, digests + 1, **parts)

            DigestFile.write = stale  # type: ignore[method-assign]
            with pytest.raises(WeightSyncError) as caught:
                sender.send(2)
            texts.append(str(caught.value))
        DigestFile.write = write  # type: ignore[method-assign]
        sender.send(3)
    return texts


def test_digests_of_another_sync_never_pass() -> None:
    with FakeServer(backend="fsdp_ipc", workers=_workers()) as server:
        (missing, others), _ = run_ranks(_push_with_stale_digests, 2, server.url)
        assert server.published == ["1", "3"]
    assert "digests of sync 1 where those of sync 2 were expected" in missing
    assert "10 of 10 digests differ" in others


def test_a_digest_that_fails_on_one_rank_is_everybodys_error() -> None:
    with FakeServer(backend="fsdp_ipc", workers=_workers()) as server:
        first, second = run_ranks(_push_with_a_digest_that_fails, 2, server.url)
        assert server.published == ["2"]
    assert first == second
    assert "rank 1" in first
    assert "no memory for digests" in first


def _push_with_a_digest_that_fails(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=800, verify="full") as sender:
        make = SentVerifier._digester

        def fail(self: SentVerifier, bucket: int) -> Any:
            if rank == 1 and bucket == 1:
                raise MemoryError("no memory for digests")
            return make(self, bucket)

        SentVerifier._digester = fail  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError) as caught:
            sender.send(1)
        SentVerifier._digester = make  # type: ignore[method-assign]
        sender.send(2)
        return str(caught.value)


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="verify='some': expected 'off', 'sample' or 'full'"):
        make_sender(nn.Linear(2, 2), "http://127.0.0.1:9", verify="some")


def _push_and_look_at_memory(rank: int, world: int, url: str) -> list[bool]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=800, verify="full") as sender:
        sender.send(1)
        slots = [weakref.ref(memory) for memory in sender._stage.memory]
        names = [handle.memory.file for handle in sender._stage.handles]  # type: ignore[union-attr]
        sender._stage.close()
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return [ref() is None for ref in slots] + [name not in maps for name in names]


def test_staging_memory_is_not_kept_alive() -> None:
    with FakeServer(backend="fsdp_ipc", workers=_workers()) as server:
        for gone in run_ranks(_push_and_look_at_memory, 2, server.url):
            assert gone == [True] * 4


def _push_experts(rank: int, world: int, url: str) -> Any:
    model = sharded_experts(rank, world, "linear")
    source = DTensorSource(model, dtype=torch.bfloat16, naming=naming_for(model, experts=HALVES))
    texts, reports = [], []
    with WeightSender(source, HTTPWeightSyncClient(url), bucket_bytes=1000, verify="full") as sender:
        reports.append(sender.send(0).worker)
        if rank == 1:
            # One expert that only this rank's worker reads.
            local = sender._stage.plan.local_rows[1][0]
            digest = SentVerifier.digest

            def flip_afterwards(self: SentVerifier, bucket: int) -> None:
                digest(self, bucket)
                if bucket == local.bucket:
                    sender._stage.memory[local.allocation][local.offset] ^= 1

            SentVerifier.digest = flip_afterwards  # type: ignore[method-assign]
            texts.append(local.name)
        with pytest.raises(WeightSyncError) as caught:
            sender.send(1)
        texts.append(str(caught.value))
    return reports, texts


def test_experts_that_one_worker_reads_are_compared_there() -> None:
    workers = [
        HoldingWorker(index, experts={f"layers.{n}.mlp.experts": list(own) for n in range(2)})
        for index, own in enumerate([range(4), range(4, 8)])
    ]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        (reports, (said,)), (_, (name, same)) = run_ranks(_push_experts, 2, server.url)
        assert server.published == ["0"]
    assert reports[0]["verified"] == reports[0]["num_tensors"]
    assert reports[0]["unverified"] == {}
    assert said == same
    assert "worker 1 (cpu:" in said
    assert f"1 of {reports[0]['num_tensors']} digests differ: {name!r} (sent" in said


# A worker that holds slices.


class Slicing(HoldingWorker):
    """Holds rows of some tensors and columns of others, as a tensor-parallel worker does."""

    def _load(self, info: Any) -> Any:
        if not hasattr(self, "held"):
            self.held: dict[str, torch.Tensor] = {}
        for name, tensor in self.weights.items():
            part = self._part(tensor)
            self.held.setdefault(name, torch.zeros_like(part, memory_format=torch.contiguous_format)).copy_(
                part
            )
        if self.tamper is not None:
            self.tamper(self.held)
        return self.held, self._landed

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and tensor.shape[0] > 1:
            return tensor.chunk(2, dim=tensor.shape[0] % 2)[self.index]
        return tensor

    def _landed(self, name: str) -> Any:
        source, held = Layout.of(self._part(self.weights[name])), self.held[name]
        source = Layout(source.offset - int(self.weights[name].storage_offset()), source.size, source.stride)
        return [(held, Piece(name=name, source=source, target=Layout.of(held), dtype=held.dtype))]


def _change_last(held: dict[str, torch.Tensor]) -> None:
    held["layers.3.weight"].view(torch.int16)[-1, -1] ^= 1


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_slices_are_compared_from_the_second_sync_on(verify: str, clean_shm: None) -> None:
    workers: list[Any] = [Slicing(index) for index in range(2)]
    if verify == "full":
        workers[1].tamper = Once(4, _change_last)
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = run_ranks(_push, 2, server.url, {"verify": verify})
        assert server.published == ["1", "2", "3"] + ["4"] * (verify == "sample")
    for stats, errors in ranks:
        first, second, third = (one["worker"] for one in stats[:3])
        assert first["verified_parts"] == 0
        assert second["unverified"] == third["unverified"] == {}
        if verify == "full":
            assert first["unverified"] == {PART: 5}
            assert second["verified_parts"] == third["verified_parts"] == 5
            assert second["verified"] == stats[1]["num_tensors"]
            ((version, _, failures),) = errors
            assert version == 4
            assert "worker 1 (cpu:" in str(failures)
            assert "1 of 13 digests differ: 'layers.3.weight' (sent " in next(iter(failures.values()))


def test_a_request_that_makes_no_sense_is_none() -> None:
    trainer = DigestFile.create(2, rank=0)
    worker = DigestFile.open(trainer.name, 2)
    good = [Region(1, 4, ((3, 8), (2, 1))), Region(0, 0, ((5, 1),))]
    number = worker.ask(good)
    assert trainer.asked(0) == (number, good)
    assert trainer.asked(number) is None
    assert worker.ask([Region(2, 0, ())]) != number
    assert trainer.asked(number) == (0, [])
    trainer._words[6] = 1 << 40 | 17
    assert trainer.asked(number) == (0, [])
    assert worker.ask([]) == 0
    assert trainer.asked(number) == (0, [])
    trainer.close()
    worker.close()
