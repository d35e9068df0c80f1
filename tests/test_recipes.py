"""The demo's parts without a server: the model on several ranks, its tokenizer, its text and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: install the extra 'recipes'")
pytest.importorskip("rich", reason="needs rich: install the extra 'recipes'")

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_ipc import DTensorSource
from recipes.bench_config import ShapeConfig
from recipes.config import DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from recipes.mesh import layout_of
from recipes.models import build_model, byte_tokenizer, write_model_dir
from recipes.report import Push, Report, matching_prefix, printable
from recipes.train import Trainer, continuation, read_text
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks


def _sizes(*, tied: bool) -> ModelConfig:
    return ModelConfig(
        hidden_size=64,
        intermediate_size=99,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )


def _build(rank: int, world_size: int, folder: str, has_weights: bool) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    if rank > 0 or has_weights:  # field case C12: no rank may hold a whole checkpoint

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError(f"rank {rank} reads the whole checkpoint")

        AutoModelForCausalLM.from_pretrained = refuse
    layout = layout_of(MeshConfig(), "cpu")
    model = build_model(Path(folder), layout, has_weights=has_weights, seed=7, compute_dtype=torch.float32)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
    shards: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    full = {name: shard.full_tensor().detach().clone() for name, shard in shards.items()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    tokens = torch.arange(64) % 13
    trainer = Trainer(
        model, tokens, TrainConfig(steps=4, seq_len=32), OptimConfig(warmup_steps=0, lr=1e-2), rank
    )
    losses = [trainer.step() for _ in range(4)]
    assert losses[-1] < losses[0]
    return full | buffers


@pytest.mark.parametrize("tied", [False, True])
def test_field_C12_each_rank_reads_its_own_shards_of_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    """https://github.com/huggingface/transformers/pull/45649: every rank holds the full model at load."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_dir(_sizes(tied=tied), tmp_path)
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    expected = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    for got in run_ranks(_build, 2, str(tmp_path), True):
        assert set(got) == set(expected)
        assert [name for name in got if not torch.equal(got[name], expected[name])] == []


def _tied(rank: int, world_size: int, folder: str) -> None:
    layout = layout_of(MeshConfig(), "cpu")
    model: Any = build_model(Path(folder), layout, has_weights=False, seed=7, compute_dtype=torch.float32)
    trainer = Trainer(model, torch.arange(64) % 13, TrainConfig(steps=2, seq_len=32), OptimConfig(), rank)
    for _ in range(2):
        trainer.step()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    # One group: the root's has both, and no layer's has either.
    groups = {m: {id(p) for p in m.parameters()} for m in model.modules() if isinstance(m, FSDPModule)}
    assert [m for m, ids in groups.items() if id(model.lm_head.weight) in ids] == [model]
    names = [meta.name for meta in DTensorSource(model).metadata()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_field_D18_a_tied_parameter_lies_in_one_group(tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/pull/4171: torch 2.13 raises when it lies in two."""
    write_model_dir(_sizes(tied=True), tmp_path)
    run_ranks(_tied, 2, str(tmp_path))


def _sleeping_job(rank: int, world_size: int, url: str, folder: str) -> None:
    """`recipes.moe_ep` with a server that can sleep, which none on a CPU can."""
    from recipes import moe_ep

    class Server:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.url = url

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def wait_healthy(self, *args: Any) -> None: ...

    moe_ep.Server = Server
    moe_ep.write_server_dir = lambda shape, path: path
    moe_ep.WorkerProbe = lambda *args: None
    moe_ep.prove = lambda *args, **kwargs: "not proved"
    config = moe_ep.MoeConfig(shape=ShapeConfig(name="small_moe", num_layers=1), pushes=2)
    moe_ep.run(config, torch.device("cpu"), Path(folder))


def test_field_C5_only_weights_are_awake_while_they_are_pushed(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/15254: old weights, the cache and new weights at once did not fit."""
    workers = [NativeWorker(0)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        run_ranks(_sleeping_job, 1, server.url, str(tmp_path))
        steps = ("/sleep", "/wake_up", "/start_weight_update", "/finish_weight_update", "/reset_prefix_cache")
        seen = [route for route in server.routes if route in steps]
        assert seen == ["/sleep", "/wake_up", *steps[2:4], "/wake_up", "/reset_prefix_cache"] * 2
        assert server.violations == []
        assert server.published == ["1", "2"]


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    write_model_dir(_sizes(tied=False), tmp_path)
    (one,) = run_ranks(_build, 1, str(tmp_path), False)
    two, again = run_ranks(_build, 2, str(tmp_path), False)
    assert all(torch.equal(one[name], two[name]) and torch.equal(two[name], again[name]) for name in one)


@pytest.mark.parametrize("text", ["The Zen of Python\n\n  x", "naïve – ❤ \t", ""])
def test_the_byte_tokenizer_gives_every_text_back(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 257


def test_the_default_text_is_the_zen_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    text = read_text(DataConfig())
    assert text.startswith("The Zen of Python, by Tim Peters")
    assert capsys.readouterr().out == ""
    assert continuation(text, DataConfig().prompt).startswith("\n\nBeautiful is better than ugly.")
    assert continuation(text, "not in it") == ""


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some words")
    assert read_text(DataConfig(path=str(tmp_path / "text"))) == "some words"


def test_the_report_ends_in_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    push = Push(
        version="5",
        num_bytes=2_000_000,
        num_tensors=3,
        num_buckets=2,
        seconds=0.5,
        stage_s={"gather": 0.25},
        loss=1.5,
        text="\nBeautiful\x1b",
        recited=5,
    )
    with Report(steps=5, active=True, prompt="Zen", before="\ufffd", expected="\nBeautyful") as report:
        report.step(5, 1.5)
        report.pushed(push)
        report.finish({"world_size": 2})
    shown = capsys.readouterr()
    line = json.loads(shown.out.splitlines()[-1])
    assert line["world_size"] == 2
    assert line["after"] == "\nBeautiful\x1b"
    assert line["pushes"][0]["gb_per_s"] == 0.004
    assert line["pushes"][0]["stage_s"] == {"gather": 0.25}
    assert "\x1b" not in shown.err.replace("\x1b[", "")
    assert "Beautiful·" in shown.err


def test_a_report_of_another_rank_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(steps=5, active=False) as report:
        report.waiting(20.0, "some line")
        report.say("something")
        report.finish({})
    assert capsys.readouterr() == ("", "")


def test_matching_prefix() -> None:
    assert matching_prefix("abc", "abd") == 2
    assert matching_prefix("ab", "abd") == 2
    assert matching_prefix("", "abd") == 0
    assert printable("a\tb\nc") == "a·b\nc"
