"""The hooks push once for each step that was taken, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import TransferStats
from fsdp_ipc.hooks import WeightSyncHook, trainer_callback
from tests.runner import run_ranks
from tests.test_sender import assert_holds, serve
from tests.toy import build, full, make_sender, shard


class Recorder:
    """A sender that only remembers."""

    def __init__(self) -> None:
        self.versions: list[Any] = []
        self.closed = False

    def send(self, version: int | str | None = None) -> TransferStats:
        self.versions.append(version)
        return TransferStats(
            version=str(version), sync=1, backend="fsdp_ipc", bytes=1, num_tensors=1, num_buckets=1,
            resident_bytes=0, seconds=1.0,
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
