"""Experts sharded over two trainer ranks, and a real CPU server that must serve what one serves that loaded the checkpoint.

CPU vLLM serves an MoE on one replica only, so there are fewer workers than ranks: the worker reads from rank 0.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.moe_job import VARIANTS
from tests.served import Served, served
from tests.tiny_models import qwen3_config, write_checkpoint
from tests.torchrun import torchrun
from tests.vllm_server import vllm_server

pytest.importorskip("transformers", reason="needs transformers: the model is its own Qwen3-MoE")
pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(900)]

CONFIG = qwen3_config(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Served]:
    """What the server under test served after each push, and what a server serves that loaded the saved weights."""
    folder = tmp_path_factory.mktemp("moe")
    model = write_checkpoint(folder / "model", CONFIG)
    with vllm_server(
        model, log=folder / "server.log", weight_transfer_config={"backend": "fsdp_ipc"}
    ) as server:
        torchrun("-m", "tests.moe_job", server.url, str(model), str(folder))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, folder / "saved" / file)
    with vllm_server(folder / "saved", log=folder / "saved.log", load_format="auto") as server:
        loaded = served(server, 0)
    found: dict[str, Any] = json.loads(Path(folder / "found.json").read_text())
    return found, loaded


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_pushed_serve_what_the_saved_checkpoint_serves(
    outcome: tuple[dict[str, Any], Served], variant: str
) -> None:
    found, loaded = outcome
    assert any("w13" in name for name in loaded.checksums)
    pushed = {version: Served(**values) for version, values in found[variant]["served"].items()}
    for noise in ("noise", "other noise"):
        assert pushed[noise].logprobs != loaded.logprobs
        assert pushed[noise].checksums != loaded.checksums
    assert pushed["noise"].logprobs != pushed["other noise"].logprobs
    assert pushed["weights"] == loaded


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_were_spread_over_both_ranks(outcome: tuple[dict[str, Any], Served], variant: str) -> None:
    first, second = outcome[0][variant]["ranks"]
    # The stream has 3-D names only if that was asked for: 2 layers of 8 experts with 3 matrices each, or of 2.
    number = 3 + 2 * 9 + (2 * 2 if variant.endswith("fused") else 2 * 8 * 3)
    assert [rank["stats"]["num_tensors"] for rank in (first, second)] == [number, number]
    assert first["stats"]["num_buckets"] >= 3  # more than there are slots
    # One worker, which reads from the first rank: the second neither waits for one nor hears of one.
    assert first["stats"]["worker"]["num_tensors"] == number
    assert second["stats"]["worker"] is None
    prefix = "model.layers.0.mlp.experts"
    if variant.startswith("modules"):
        assert [entry.split(".")[5] for entry in first["held"]] == [
            str(n) for n in range(4) for _ in range(3)
        ]
        assert [entry.split(".")[5] for entry in second["held"]] == [
            str(n) for n in range(4, 8) for _ in range(3)
        ]
    else:
        wanted = [f"{prefix}.gate_up_proj (4, 64, 64)", f"{prefix}.down_proj (4, 64, 32)"]
        assert sorted(first["held"]) == sorted(second["held"]) == sorted(wanted)
