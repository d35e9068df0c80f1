"""The snippets of docs/hooks.md, docs/torchtitan.md and docs/sources.md run, and what they push arrives."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ipc
import fsdp_ipc.callbacks
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.toy import build, full, shard

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


HOOKS, TITAN, SOURCES = blocks("hooks.md"), blocks("torchtitan.md"), blocks("sources.md")


def block(having: str) -> str:
    (found,) = [text for text in HOOKS if having in text]
    return found


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        train_step(model, optimizer)


def a_job(url: str) -> dict[str, Any]:
    """What the pages take for given."""
    model = shard(build(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "url": url, "train_step": train_step, "train": train}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    workers = [NativeWorker(index) for index in range(1 if "alone" in request.fixturenames else 2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        yield server
        assert server.violations == []


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_arrived(server: Any, wanted: dict[str, torch.Tensor]) -> None:
    for worker in server.workers:
        assert sorted(worker.weights) == sorted(wanted)
        assert [name for name in wanted if not torch.equal(worker.weights[name], wanted[name])] == []


def _sharded(rank: int, world: int, url: str) -> list[dict[str, torch.Tensor]]:
    job = a_job(url)
    exec(block("for step in range"), job)
    first = full(job["model"], torch.bfloat16)
    exec("".join(SOURCES), job)
    return [first, full(job["model"], torch.bfloat16)]


def test_by_hand_and_from_a_source_of_ones_own_on_two_ranks(server: Any) -> None:
    _, last = run_ranks(_sharded, 2, server.url)[0]
    assert server.published == ["1", "2", "3", "1"]
    tied = {"head.weight": last["embed.weight"], "bias_of_router": last["bias_of_router"].bfloat16()}
    assert_arrived(server, {**last, **tied})


def test_after_an_optimizer_step(server: Any, alone: None) -> None:
    job = a_job(server.url)
    source = fsdp_ipc.DTensorSource(job["model"], dtype=torch.bfloat16)
    with fsdp_ipc.WeightSender(source, fsdp_ipc.HTTPWeightSyncClient(server.url)) as sender:
        exec(block("with WeightSyncHook(optimizer, sender, every=2)"), {**job, "sender": sender})
    assert server.published == ["2", "4"]
    assert_arrived(server, full(job["model"], torch.bfloat16))


def test_transformers(server: Any, alone: None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, from the extra 'recipes'")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.inner(x)[:, 0] - labels).square().mean()}

    model, data = Model(), [{"x": torch.ones(2), "labels": torch.tensor(1.0)} for _ in range(8)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    exec(block("trainer_callback(lambda"), {"model": model, "args": args, "data": data, "url": server.url})
    assert server.published == ["2", "4"]
    assert_arrived(server, model.state_dict())


def test_accelerate(server: Any, alone: None) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate, from the extra 'recipes'")
    model = build()
    job = {**a_job(server.url), "model": model, "optimizer": torch.optim.SGD(model.parameters())}
    job |= {
        "accelerator": accelerate.Accelerator(cpu=True),
        "train": lambda model, optimizer: [train(model, optimizer)] * 3,
    }
    snippet = block("accelerator.prepare").replace("every=10", "every=2")
    exec(snippet, job)
    assert server.published == ["2", "4"]


def test_a_callback_of_ones_own_has_five_lines(
    server: Any, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(server.url)
    text = block("class Tell(SyncCallback)")
    exec(text, job)
    with job["sender"] as sender:
        stats = sender.send(3)
    assert capsys.readouterr().out.startswith(f"version 3: {stats.bytes:,} bytes in 0.")
    assert len(re.findall(r"(?m)^class Tell.*\n(?: +.*\n)+", text)[0].splitlines()) <= 5


def test_the_callbacks_around_a_sync(
    server: Any, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(block("around = "), a_job(server.url))
    assert [r for r in server.routes if r in ("/pause", "/reset_prefix_cache", "/resume", "/finish_weight_update")] == [
        "/pause", "/finish_weight_update", "/reset_prefix_cache", "/resume",
    ]  # fmt: skip
    assert (tmp_path / "syncs.jsonl").is_file()


def test_every_snippet_of_the_pages_is_run_and_every_callback_named() -> None:
    assert (len(HOOKS), len(TITAN), len(SOURCES)) == (6, 1, 2)
    page = (DOCS / "hooks.md").read_text()
    ready = set(re.findall(r"(?m)^\| `(\w+)\(", page))
    assert ready == set(fsdp_ipc.callbacks.__all__) - {"SyncCallback", "CallbackError", "Sync"}
    methods = {name for name in vars(fsdp_ipc.SyncCallback) if name.startswith("on_") or name == "close"}
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", page)) >= methods
    readme = (DOCS.parent / "README.md").read_text()
    for name in ("hooks", "torchtitan", "sources"):
        assert f"docs/{name}.md" in readme + page.replace("(torchtitan.md)", "docs/torchtitan.md")
    for anchor in re.findall(r"\(#([\w-]+)\)", page):
        assert f"## {anchor.replace('-', ' ')}" in page.lower()


def test_every_argument_of_the_sender_is_in_the_table_with_its_default() -> None:
    section = (DOCS / "hooks.md").read_text().partition("## The sender's arguments")[2].partition("\n## ")[0]
    rows = [re.split(r" ?\| ?", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    told = {row[0].strip("`"): row[2] for row in rows}
    wanted = dict(inspect.signature(fsdp_ipc.WeightSender).parameters)
    assert list(told) == list(wanted)
    for name, parameter in wanted.items():
        default = parameter.default
        shown = (
            "–"
            if default is parameter.empty
            else f'`"{default}"`'
            if isinstance(default, str)
            else f"`{default}`"
        )
        assert told[name].partition(":")[0] == shown, name
    waits = fsdp_ipc.Timeouts()
    assert told["timeouts"].endswith(f"{waits.request_s:g}, {waits.transfer_s:g} and {waits.control_s:g} s")


def test_torchtitan(server: Any, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torchtitan's model, adapter and optimizers; its trainer needs data loaders that are not installed here."""
    titan = pytest.importorskip("tests.test_torchtitan", reason="needs torchtitan")
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        pytest.skip("needs a torch that torchtitan can be imported with (2.13 is one)")
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig

    model, adapter = titan.llama3()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 0.01})
        for pattern, name in (("norm", "Adam"), (".*", "AdamW"))
    ]
    config = OptimizersContainer.Config(implementation="for-loop", param_groups=groups)
    optimizers = OptimizersContainer(config, model_parts=[model])
    assert len(optimizers.optimizers) == 2

    class Trainer:
        def __init__(self) -> None:
            spec = types.SimpleNamespace(state_dict_adapter=lambda config, assets: adapter)
            self.config = types.SimpleNamespace(model_spec=spec, hf_assets_path=None)
            self.model_config, self.model_parts, self.optimizers = None, [model], optimizers

        def train(self) -> None:
            for _ in range(10):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                self.optimizers.step()

    stand_in = types.ModuleType("torchtitan.trainer")
    stand_in.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", stand_in)
    made: dict[str, Any] = {"url": server.url}
    exec(TITAN[0], made)
    made["PushingTrainer"]().train()
    assert server.published == ["10"]
    wanted = adapter.to_hf({n: v.full_tensor() for n, v in model.state_dict().items()})
    assert_arrived(server, {name: tensor.bfloat16() for name, tensor in wanted.items()})
