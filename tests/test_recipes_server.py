"""The recipes as a person starts them: torchrun on two ranks, real servers, and what the job says that it has done."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.runner import run_ranks
from tests.torchrun import start_recipe, torchrun

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(600)]

pytest.importorskip("hydra", reason="needs Hydra: install the extra 'recipes'")
pytest.importorskip("transformers", reason="needs transformers: install the extra 'recipes'")


def _ranks() -> int:
    return torch.cuda.device_count() or 2


def _start(module: str, *settings: str) -> dict[str, Any]:
    return start_recipe(module, *settings, ranks=_ranks(), timeout_s=500)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_grpo_raises_the_reward_of_an_untrained_model(tmp_path: Path) -> None:
    launcher = [] if torch.cuda.is_available() else ["experiment=cpu_smoke"]
    line = _start("recipes.grpo", *launcher, "train.steps=20", f"hydra.run.dir={tmp_path}")
    rows = _metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert line["reward_first"] < 0.2 < line["reward_last"]
    assert line["reward_last"] > line["reward_first"] + 0.1
    # Every rollout was made with the weights of the step before, and the trainer agrees with its log-probabilities.
    assert line["max_staleness"] == 0
    assert [row["sync"]["version"] for row in rows] == [str(step) for step in range(1, 21)]
    assert all(row["divergence"] < 0.01 for row in rows)
    assert {"rollout", "train", "sync", "total"} <= rows[0]["time"].keys()
    assert line["slept"] == torch.cuda.is_available(), "a CPU server cannot sleep"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A checkpoint, and the URL of a server that has its configuration and random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.config import ModelConfig, ServerConfig
    from recipes.models import write_model_dir
    from recipes.serve import Server

    folder = tmp_path_factory.mktemp("served")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model_dir = write_model_dir(
        ModelConfig(**sizes, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024),
        folder / "model",
    )
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.bfloat16)
    model.save_pretrained(model_dir)
    with Server(
        model_dir,
        num_replicas=_ranks(),
        config=ServerConfig(start_timeout_s=400),
        log_path=folder / "server.log",
        on_gpu=torch.cuda.is_available(),
    ) as server:
        server.wait_healthy()
        yield model_dir, server.url


def test_field_F13_a_checkpoint_is_pushed_and_the_server_says_what_it_says(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    """https://github.com/huggingface/trl/pull/3670: FSDP2 parameters that were never synced, without an error."""
    model_dir, url = served
    settings = [f"model.path={model_dir}", f"inference.url={url}", "data.max_tokens=6"]
    line = _start("recipes.push", *settings, "prompts=[ab,zz]", f"hydra.run.dir={tmp_path}")
    assert line["said_before"] != line["said_after"]
    assert line.keys() == {
        "world_size", "parameters", "said_before", "said_after", "server_ready_s", "load_s", "report", "pushes",
    }  # fmt: skip
    report = (tmp_path / "report.html").read_text()
    assert "What the server said" in report
    assert report.count("<td>ab</td>") == report.count("<td>zz</td>") == 1
    assert "optim:" not in report
    assert [push["version"] for push in line["pushes"]] == ["1"]
    assert line["pushes"][0]["bytes"] == 2 * line["parameters"], "bf16, as the checkpoint is"
    # An untrained model's bytes may be no text, of which the two show different things.
    readable = [text.replace("\ufffd", "") for text in line["said_after"]]
    assert readable == [text.replace("\ufffd", "") for text in _greedy(model_dir, ["ab", "zz"], 6)]


def _greedy(model_dir: Path, prompts: list[str], num_tokens: int) -> list[str]:
    """What the checkpoint says, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    said = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            for _ in range(num_tokens):
                chosen = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, chosen], 1)
        said.append(tokenizer.decode(ids[0, -num_tokens:], skip_special_tokens=True))
    return said


def _readme_loop(rank: int, world_size: int, code: str, model_dir: str) -> int:
    """The README's GRPO loop on a rank, with what it calls "yours"; the samples that it took a step on last."""
    from recipes.config import MeshConfig
    from recipes.mesh import layout_of
    from recipes.models import build_model

    layout = layout_of(MeshConfig(), "cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(Path(model_dir), layout, has_weights=True, seed=0, compute_dtype=torch.float32)

    def token_logprobs(model: Any, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt_ids + token_ids])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
        return logits.log_softmax(-1)[range(len(token_ids)), token_ids]

    found: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "rank": rank,
        "my_prompts": lambda step, rank: [f"{step} {rank}"],
        "reward": lambda prompt, text: float(len(text)),
        "token_logprobs": token_logprobs,
    }
    exec(code, found)
    assert found["step"] == 2
    return len(found["batch"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the loop's helpers here are for a CPU")
def test_the_readmes_grpo_loop_runs_as_it_stands(served: tuple[Path, str]) -> None:
    model_dir, url = served
    text = (ROOT / "README.md").read_text().partition("## A GRPO loop")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 30
    for old, new in (
        ("http://127.0.0.1:8000", url),
        ("range(1, 501)", "range(1, 3)"),
        ("Qwen/Qwen3-0.6B", "policy"),
        ('"max_tokens": 64', '"max_tokens": 8'),
    ):
        assert old in code
        code = code.replace(old, new)
    assert run_ranks(_readme_loop, _ranks(), code, str(model_dir), timeout_s=120) == [8] * _ranks()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the README's section is for machines without a GPU")
def test_the_readmes_cpu_quick_start_runs_as_it_stands(served: tuple[Path, str], tmp_path: Path) -> None:
    """Its server and its file, with a small checkpoint and a free port; the server then says what the checkpoint says."""
    from recipes.serve import free_port, log_tail

    section = (ROOT / "README.md").read_text().partition("## Without a GPU")[2].partition("\n## ")[0]
    install, start = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert "[cpu,recipes]" in install
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    port = free_port()
    for old, new in (("Qwen/Qwen3-0.6B", str(served[0])), ("8000", str(port))):
        assert old in start
        assert old in code
        start, code = start.replace(old, new), code.replace(old, new)
    (tmp_path / "push.py").write_text(code)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", start], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 400
        while not _healthy(f"http://127.0.0.1:{port}"):
            assert server.poll() is None and time.monotonic() < deadline, log_tail(
                tmp_path / "server.log", 40
            )
            time.sleep(1)
        printed = torchrun(str(tmp_path / "push.py"), ranks=1)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    assert "TransferStats(version='1', sync=1" in printed
    said, expected = printed.partition("\n")[2], _greedy(served[0], ["The capital of France is"], 8)[0]
    # An untrained model's bytes may be no text, and a line's end is one to a pipe.
    assert re.sub(r"[\ufffd\r\n]", "", said) == re.sub(r"[\ufffd\r\n]", "", expected)


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def test_accelerate_with_a_hook_pushes_what_it_has_learned(served: tuple[Path, str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: install the extra 'recipes'")
    model_dir, url = served
    settings = [f"model.path={model_dir}", f"inference.url={url}", "data.max_tokens=24", "train.seq_len=128"]
    settings += ["train.steps=45", "hook.every=20", "optim.warmup_steps=5", "optim.lr=1e-2"]
    line = _start("recipes.sft", *settings, f"hydra.run.dir={tmp_path}")
    assert [push["version"] for push in line["pushes"]] == ["20", "40", "45"]
    assert ("FSDP2" if torch.cuda.is_available() else "DDP") in line["accelerate"]
    assert line["pushes"][-1]["loss"] < line["pushes"][0]["loss"]
    assert line["before"] != line["after"]
    rows = _metrics(tmp_path)
    assert [row["step"] for row in rows if row["sync"]] == [20, 40, 45]
    assert rows[-1]["loss"] < rows[0]["loss"]
