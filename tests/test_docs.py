"""The pages under docs/ say what is so: their snippets run, their commands and links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from recipes.config import CONF_DIR
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.toy import build, full, shard, step
from tests.vllm_wheels import root_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "migrating.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
OURS = [block for block in BLOCKS if "import vllm" not in block and "from vllm" not in block]
SENDING = [block for block in OURS if "WeightSender(" in block]


def _imports(block: str) -> list[tuple[str, str]]:
    tree = ast.parse(block)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in found for alias in node.names]


def _run(rank: int, world: int, url: str, block: str) -> dict[str, torch.Tensor]:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    step(model)
    exec(block, {"model": model, "url": url, "rank": rank})
    return full(model, torch.bfloat16 if "bfloat16" in block else None)


def test_the_page_has_both_sides_of_all_three() -> None:
    assert len(SENDING) == 3
    assert len(BLOCKS) - len(OURS) == 3
    assert PAGE.read_text().count("Before:") == 3


@pytest.mark.parametrize("block", SENDING, ids=range(len(SENDING)))
def test_what_replaces_the_old_code_sends_every_weight(block: str) -> None:
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        expected = run_ranks(_run, 2, server.url, block)[0]
        assert server.violations == []
    for worker in workers:
        assert worker.weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(worker.weights[name], expected[name])] == []


@pytest.mark.vllm
def test_vllms_factory_with_our_init_info_sends_every_weight() -> None:
    (block,) = [block for block in BLOCKS if "FSDPIPCTrainerInitInfo(" in block]
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        expected = run_ranks(_run, 2, server.url, block, timeout_s=200)[0]
        assert server.violations == []
    for worker in workers:
        assert worker.weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(worker.weights[name], expected[name])] == []


def test_the_naming_snippet_runs() -> None:
    (block,) = [block for block in OURS if "naming_for" in block]
    found: dict[str, Any] = {"model": torch.nn.ModuleDict({"backbone": build()})}
    exec(block, found)
    assert "model.layers.0.weight" in found["names"]
    assert not any(name.startswith("backbone") for name in found["names"])


def test_the_loop_over_full_tensors_is_a_real_one(tmp_path: Path) -> None:
    (block,) = [block for block in OURS if "torch.save" in block]
    exec(block, {"model": build(), "rank": 0, "path": tmp_path / "weights.pt"})
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["norm.weight"].dtype == torch.bfloat16


def test_the_static_bridge_takes_the_arguments_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_ipc import vllm_static

    sent: list[str] = []

    class Sender:
        def __init__(self, source: Any, client: Any, *, bucket_bytes: int, **settings: Any) -> None:
            assert bucket_bytes == 1 << 30
            sent.extend(meta.name for item in source.items() for meta in item.metas())

        def send(self, version: str | None) -> None:
            sent.append("sent")

        def close(self) -> None:
            sent.append("closed")

    monkeypatch.setattr(vllm_static, "WeightSender", Sender)
    monkeypatch.setattr(vllm_static, "_warned", True)
    (block,) = [block for block in OURS if "vllm_static" in block]
    exec(block, {"model": build(), "url": "http://127.0.0.1:9"})
    assert sent[-2:] == ["sent", "closed"]
    assert "embed.weight" in sent


@pytest.mark.parametrize("release", ["0.26.0", "0.28.0", "0.33.0"])
def test_vllms_names_exist_in_the_releases_that_the_page_speaks_of(release: str) -> None:
    root = root_of(release)
    if root is None:
        pytest.skip(f"vLLM {release} was not fetched: python -m tests.vllm_wheels")
    static = release == "0.26.0"
    wanted = {
        pair
        for block in BLOCKS
        for pair in _imports(block)
        if pair[0].startswith("vllm.") and ("IPCTrainerSendWeightsArgs" in block) == static
    }
    assert wanted
    for module, name in sorted(wanted):
        text = (root / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^class {name}\b", text, re.MULTILINE), f"{module} has no {name}"


def test_ours_are_imported_by_names_that_exist() -> None:
    import importlib

    for module, name in {pair for block in BLOCKS for pair in _imports(block)}:
        if module.startswith("fsdp_ipc") and module != "fsdp_ipc.vllm_trainer":
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    trainer = (ROOT / "fsdp_ipc" / "vllm_trainer.py").read_text()
    assert "class FSDPIPCTrainerInitInfo" in trainer


def test_its_commands_and_the_readmes_link_lead_somewhere() -> None:
    assert "(docs/migrating.md)" in (ROOT / "README.md").read_text()
    named = set(re.findall(r"-m (recipes\.\w+)", PAGE.read_text()))
    assert named == {f"recipes.{n}" for n in ("ray_one_gpu", "http_one_gpu", "http_remote_trainer", "moe_ep")}
    for name in (module.split(".")[1] for module in named):
        assert (ROOT / "recipes" / f"{name}.py").is_file()
        header = (CONF_DIR / f"{name}.yaml").read_text().partition("defaults:")[0]
        assert f"-m recipes.{name}" in header, "the configuration's header has the launch command"
