"""The hooks push once for each step that was taken, and only then."""

from __future__ import annotations

import logging
import os
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import (
    DTensorSource,
    HTTPWeightSyncClient,
    Timeouts,
    TransferStats,
    WeightSyncError,
    WeightSyncHook,
    look_into,
    sender_for,
    trainer_callback,
)
from tests.runner import run_ranks
from tests.test_sender import assert_holds, serve
from tests.toy import build, expected, full, make_sender, shard


class Recorder:
    """A sender that only remembers."""

    def __init__(self) -> None:
        self.versions: list[Any] = []
        self.closed = False

    def send(self, version: int | str | None = None) -> TransferStats:
        self.versions.append(version)
        return TransferStats(
            version=str(version), sync=1, backend="fsdp_ipc", bytes=1, num_tensors=1, num_buckets=1,
            resident_bytes=0, peer_bytes=0, seconds=1.0,
        )  # fmt: skip

    def close(self) -> None:
        self.closed = True


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_every_second_step_and_none_after_remove() -> None:
    model, sender, stats = nn.Linear(2, 2), Recorder(), []
    optimizer = torch.optim.SGD(model.parameters())
    with WeightSyncHook(optimizer, sender, every=2, on_sync=stats.append) as hook:
        for _ in range(5):
            _step(model, optimizer)
        assert hook.steps == 5
    _step(model, optimizer)
    assert sender.versions == [2, 4]
    assert len(stats) == 2
    assert not sender.closed


def test_several_optimizers_push_once_all_have_stepped() -> None:
    one, two, sender = nn.Linear(2, 2), nn.Linear(2, 2), Recorder()
    first, second = torch.optim.SGD(one.parameters()), torch.optim.SGD(two.parameters())
    WeightSyncHook([first, second], sender)
    _step(one, first)
    assert sender.versions == []
    _step(two, second)
    _step(one, first)
    assert sender.versions == [1]
    _step(two, second)
    assert sender.versions == [1, 2]


def test_a_step_that_the_gradient_scaler_leaves_out_pushes_nothing() -> None:
    model, sender = nn.Linear(2, 2), Recorder()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    WeightSyncHook(optimizer, sender)
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2)).sum() * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert sender.versions == [1, 2]


def test_a_scaler_that_leaves_out_one_of_two_optimizers_pushes_in_the_middle_of_no_iteration() -> None:
    one, two, sender, order = nn.Linear(2, 2), nn.Linear(2, 2), Recorder(), []
    first, second = torch.optim.SGD(one.parameters()), torch.optim.SGD(two.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with WeightSyncHook([first, second], sender, on_sync=lambda stats: order.append(f"push {stats.version}")):
        for iteration, bad in enumerate(["", "first", "", "second", "", "both", ""]):
            first.zero_grad()
            second.zero_grad()
            loss_one = one(torch.ones(2)).sum() * (float("inf") if bad in ("first", "both") else 1.0)
            loss_two = two(torch.ones(2)).sum() * (float("inf") if bad in ("second", "both") else 1.0)
            scaler.scale(loss_one).backward()
            scaler.scale(loss_two).backward()
            scaler.step(first)
            order.append(f"{iteration} half")
            scaler.step(second)
            scaler.update()
    assert order == [
        "0 half", "push 1", "1 half", "push 2", "2 half", "push 3", "3 half", "4 half", "push 4", "5 half", "6 half", "push 5",
    ]  # fmt: skip


def test_accelerates_wrapper_is_looked_through_and_accumulation_respected() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate, from the extra 'recipes'")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    sender = Recorder()
    WeightSyncHook(optimizer, sender)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert sender.versions == [1, 2]


def test_bad_input() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="every=0"):
        WeightSyncHook(optimizer, Recorder(), every=0)
    with pytest.raises(ValueError, match="no optimizer"):
        WeightSyncHook([], Recorder())
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Linear"):
        WeightSyncHook(nn.Linear(2, 2), Recorder())  # type: ignore[arg-type]


def test_the_trainer_callback_in_a_real_trainer(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, from the extra 'recipes'")
    sender, seen = Recorder(), []

    def make(model: nn.Module) -> Recorder:
        seen.append(model)
        return sender

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.inner(x)[:, 0] - labels).square().mean()}

    data = [{"x": torch.ones(2), "labels": torch.tensor(1.0)} for _ in range(12)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = Model()
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=data, callbacks=[trainer_callback(make, every=2)]
    )
    trainer.train()
    assert seen == [model]
    assert sender.versions == [2, 4, 6]
    assert sender.closed


def test_the_trainer_callback_closes_the_sender_of_a_training_that_broke_off() -> None:
    pytest.importorskip("transformers", reason="needs transformers, from the extra 'recipes'")
    senders = [Recorder(), Recorder()]
    waiting = iter(senders)
    callback = trainer_callback(lambda model: next(waiting))
    callback.on_train_begin(None, None, None, model=None)
    callback.on_train_begin(None, None, None, model=None)
    assert [sender.closed for sender in senders] == [True, False]


# Ranks that do not do the same.

SHORT = Timeouts(request_s=0.5, transfer_s=0.8, control_s=1.2)


def _alone(rank: int, world: int, url: str) -> dict[str, str]:
    """Rank 1 leaves out what rank 0 does, one way after another."""
    trainer_callback(lambda model: None)  # imports transformers, which takes its time
    model = shard(build(), init_device_mesh("cpu", (world,)))
    told = {}
    for way in ("send", "hook", "callback"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sender = make_sender(model, url, timeouts=SHORT)
        began = time.monotonic()
        try:
            if rank == 0 and way == "send":
                sender.send(1)
            elif rank == 0 and way == "hook":
                WeightSyncHook(optimizer, sender)
            elif way == "callback":
                callback = trainer_callback(lambda model, sender=sender: sender)
                callback.on_train_begin(None, None, None, model=model)
                if rank == 0:
                    callback.on_step_end(None, SimpleNamespace(global_step=1), None)
            if way == "hook":
                optimizer.step()
        except WeightSyncError as error:
            told[way] = str(error)
        assert time.monotonic() - began < 20
        # Rank 1 is still there, doing other things; then both go on.
        dist.barrier()
        sender.close()
    return told


def test_a_push_on_one_rank_only_is_an_error_that_names_the_others_and_no_hang() -> None:
    pytest.importorskip("transformers", reason="needs transformers, from the extra 'recipes'")
    server, _ = serve()
    with server:
        told, told_1 = run_ranks(_alone, 2, server.url)
        assert server.published == []
    assert told_1 == {}
    assert list(told) == ["send", "hook", "callback"]
    for text in told.values():
        assert "Every rank must call send() together" in text


def _apart(rank: int, world: int, url: str) -> str:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_sender(model, url) as sender:
        # The first step of rank 1 went by before its hook was there.
        hook = WeightSyncHook(optimizer, sender, every=2) if rank == 0 else None
        optimizer.step()
        hook = hook or WeightSyncHook(optimizer, sender, every=1)
        try:
            optimizer.step()
        except WeightSyncError as error:
            return str(error)
    return ""


def test_ranks_a_step_apart_are_told_so_at_once() -> None:
    server, _ = serve()
    with server:
        told = run_ranks(_apart, 2, server.url)
        assert server.published == []
    assert told[0] == told[1]
    assert "version '2'" in told[0]
    assert "version '1'" in told[0]


# What a trainer library has made of the model.


def _accelerated(rank: int, world: int, url: str) -> list[Any]:
    import accelerate

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("fsdp_ipc.prepared").addHandler(handler)
    plugin = accelerate.utils.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    raw = build()
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    given = look_into(model, accelerator), look_into(raw, accelerator), look_into(raw)
    client = HTTPWeightSyncClient(url)
    sender = sender_for(raw, client, accelerator=accelerator, dtype=torch.bfloat16)
    with sender, WeightSyncHook(optimizer, sender):
        accelerator.backward(model(torch.arange(7)).square().mean())
        optimizer.step()
    kinds = [found.kind for found in given]
    return [kinds, given[1].text, heard, expected(raw, torch.bfloat16)]


def test_field_F11_accelerate_falls_back_to_ddp_on_a_cpu_and_the_adapter_says_so() -> None:
    """accelerate: `Accelerator(cpu=True, fsdp_plugin=FSDP2)` is DDP, and names gain `module.`; no public report.

    See also https://github.com/modelscope/ms-swift/pull/9980.
    """
    pytest.importorskip("accelerate", reason="needs accelerate, from the extra 'recipes'")
    server, workers = serve()
    with server:
        (kinds, text, heard, wanted), (_, _, heard_1, _) = run_ranks(
            _accelerated, 2, server.url, timeout_s=120
        )
        assert server.published == ["1"]
    assert kinds == ["ddp", "plain", "plain"]
    assert text.startswith(
        "Toy is not wrapped: every rank holds all of it, and nothing is gathered. The accelerator runs as"
    )
    assert "MULTI_CPU, which does not shard: on a CPU accelerate falls back to DDP" in text
    assert heard == [f"WARNING weight sync: {text}"]
    assert heard_1 == []
    for worker in workers:
        assert_holds(worker, wanted)


def _looked(rank: int, world: int) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = torch.compile(shard(build(), init_device_mesh("cpu", (world,))))
    texts = [look_into(sharded).text]
    for use_orig_params in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat = FullyShardedDataParallel(
                build(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
            )
        for refuse, given in (
            (look_into, nn.Sequential(flat)),
            (DTensorSource, flat),
            (DTensorSource, flat.module),
        ):
            try:
                refuse(given)
            except ValueError as error:
                texts.append(str(error))
    return texts


def test_fsdp2_is_recognised_and_fsdp1_is_refused() -> None:
    found, *refused = run_ranks(_looked, 2)[0]
    assert found == "Toy is sharded with FSDP2: of 12 parameters 12 over a mesh of (2,)"
    assert len(refused) == 6
    for text in refused:
        assert "FSDP1" in text
        assert "fsdp_version=2" in text


def test_empty_parameters_of_zero3_and_what_is_no_module_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0
    with pytest.raises(ValueError, match="ZeRO-3"):
        look_into(model)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got int"):
        look_into(3)  # type: ignore[arg-type]
    assert look_into(build()).kind == "plain"


def _train(rank: int, world: int, url: str) -> dict[str, torch.Tensor]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_sender(model, url) as sender, WeightSyncHook(optimizer, sender, every=2):
        for _ in range(4):
            model(torch.arange(7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return full(model, torch.bfloat16)


def test_on_sharded_ranks_the_worker_holds_the_last_push() -> None:
    server, workers = serve()
    with server:
        wanted = run_ranks(_train, 2, server.url)[0]
        assert server.published == ["2", "4"]
    for worker in workers:
        assert_holds(worker, wanted)
