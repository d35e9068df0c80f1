"""The dry run: which bytes of which parameter a name fills, over model classes whose loaders differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ipc.vllm_plugin.coverage import Recorder, Target, Write, byte_spans, exact, span_bytes
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow
from tests.tiny_models import write_checkpoint
from tests.vllm_inprocess import InProcess, inprocess_vllm


def test_spans_of_views() -> None:
    base = torch.empty(6, 4, 8, dtype=torch.float32, device="meta")
    assert byte_spans(base) == [(0, 6 * 4 * 8 * 4)]
    assert byte_spans(base[2:4]) == [(256, 512)]
    assert byte_spans(base[:, 1]) == [(32 * 4 * i + 32, 32 * 4 * i + 64) for i in range(6)]
    assert byte_spans(base.transpose(0, 2)) == [(0, 768)]
    assert byte_spans(base[3, 2, 5:]) == [((3 * 32 + 16 + 5) * 4, (3 * 32 + 24) * 4)]
    assert byte_spans(base[1:1]) == []
    assert byte_spans(base[0, 0, 0]) == [(0, 4)]
    assert byte_spans(base.view(torch.uint8)[5, 3, 31]) == [(767, 768)]
    assert byte_spans(torch.empty(1, device="meta").expand(5)) == [(0, 4)]
    assert byte_spans(torch.empty(400, 400, device="meta")[:, ::2]) is None


def test_spans_agree_with_the_elements_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        base = torch.arange(4 * 5 * 6).view(4, 5, 6)
        view = base.permute(*torch.randperm(3, generator=generator).tolist())
        for dim in range(3):
            low, high = sorted(torch.randint(0, view.shape[dim] + 1, (2,), generator=generator).tolist())
            view = view.narrow(dim, low, high - low)
        spans = byte_spans(view)
        assert spans is not None
        covered = {offset // 8 for start, end in spans for offset in range(start, end, 8)}
        assert covered == set(view.flatten().tolist())
        assert span_bytes(spans) == view.numel() * 8


def test_what_counts_as_exact() -> None:
    assert exact(torch.bfloat16, torch.bfloat16)
    assert exact(torch.bfloat16, torch.float32)
    assert not exact(torch.float32, torch.bfloat16)
    assert not exact(torch.float16, torch.bfloat16)
    assert not exact(torch.int32, torch.float32)


def test_overlaps_are_between_different_names() -> None:
    a, b = frozenset("a"), frozenset("b")
    target = Target("t", torch.empty(4, device="meta"))
    target.writes = [Write(0, 8, a), Write(8, 16, b), Write(0, 16, frozenset()), Write(0, 4, a)]
    assert target.overlaps() == set()
    target.writes.append(Write(7, 9, b))
    assert target.overlaps() == {"a", "b"}


def test_names_are_followed_through_views_and_computations() -> None:
    recorder = Recorder()
    param = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    q, k = (torch.empty(2, 6, dtype=torch.bfloat16, device="meta") for _ in range(2))
    recorder.add_target("p", param)
    recorder.add_source("q", q)
    recorder.add_source("k", k)
    with recorder:
        param.narrow(0, 0, 2).copy_(q.t().contiguous().t())
        joined = torch.cat([q, k])
        param[2:].copy_(joined[2:].float())
    (target,) = recorder.targets.values()
    assert target.covered_bytes() == param.nbytes
    assert target.names == {"q", "k"}
    assert recorder.sources["q"].read_bytes() == q.nbytes


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 192,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2: dict[str, Any] = {"n_embd": 128, "n_head": 4, "n_layer": 2, "vocab_size": 192, "n_positions": 512}
MAMBA: dict[str, Any] = {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 192}
BERT: dict[str, Any] = {**TINY, "hidden_size": 128}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # The first decides which groups vLLM makes, and only a model with experts makes those for experts.
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**TINY, **EXPERTS}),
    "GptOssForCausalLM": ("gpt_oss", {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT2LMHeadModel": ("gpt2", GPT2),  # transposed weights
    "MambaForCausalLM": ("mamba", MAMBA),  # computed weights
    "BertModel": ("bert", BERT),  # a pooler that vLLM leaves out
}


@pytest.fixture(scope="module")
def vllm() -> Iterator[InProcess]:
    with inprocess_vllm() as environment:
        yield environment


def _build(vllm: InProcess, architecture: str, folder: Path) -> tuple[Any, Any, list[TensorRow]]:
    """vLLM's model, and the rows of transformers' model of the same config."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers gives the names that checkpoints have"
    )
    model_type, overrides = ARCHITECTURES[architecture]
    config = transformers.AutoConfig.for_model(model_type, **overrides)
    with torch.device("meta"):
        sent = getattr(transformers, architecture)(config).to(torch.bfloat16)
    written = json.loads(config.to_json_string(use_diff=False))
    written |= {"architectures": [architecture], "torch_dtype": "bfloat16"}
    model, vllm_config = vllm.build(write_checkpoint(folder, written), load_format="dummy")
    tied = set(sent._tied_weights_keys or ()) if getattr(config, "tie_word_embeddings", False) else set()
    rows = [
        TensorRow(name, tensor.dtype, tuple(tensor.shape), 0, 0, 0)
        for name, tensor in sent.state_dict().items()
        if name not in tied
    ]
    return model, vllm_config, rows


@pytest.mark.vllm
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_field_E12_each_model_class_is_filled_by_its_checkpoint_and_misses_each_name(
    vllm: InProcess, architecture: str, tmp_path: Path
) -> None:
    """https://github.com/vllm-project/vime/issues/5 : a name that is missing is said before any data moves."""
    from fsdp_ipc.vllm_plugin.completeness import examine

    model, vllm_config, rows = _build(vllm, architecture, tmp_path)
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    whole = examine(model, [rows], vllm_config=vllm_config)
    assert whole.error() is None
    assert all("pooler" in name for name in whole.skipped)
    # However the names are divided, the finding is the same.
    assert examine(model, [[row] for row in rows], vllm_config=vllm_config) == whole
    for row in rows:
        if row.name not in whole.skipped:
            rest = [other for other in rows if other is not row]
            assert examine(model, [rest], vllm_config=vllm_config).missing, row.name
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before


@pytest.mark.vllm
def test_routers_that_a_trainer_keeps_in_fp32_are_no_wrong_dtypes(vllm: InProcess, tmp_path: Path) -> None:
    """vLLM holds some routers in bf16, and rounds them as it does those of a checkpoint."""
    from fsdp_ipc.vllm_plugin.completeness import examine

    model, vllm_config, rows = _build(vllm, "Qwen3MoeForCausalLM", tmp_path)

    def as_fp32(name: str) -> str | None:
        changed = [replace(row, dtype=torch.float32) if row.name == name else row for row in rows]
        return examine(model, [changed], vllm_config=vllm_config).error()

    assert as_fp32("model.layers.0.mlp.gate.weight") is None
    assert "vLLM would round" in str(as_fp32("model.layers.0.mlp.experts.down_proj"))
    assert "vLLM would round" in str(as_fp32("model.norm.weight"))


@pytest.mark.vllm
def test_experts_may_come_fused_or_one_by_one_but_not_both(vllm: InProcess, tmp_path: Path) -> None:
    from fsdp_ipc.vllm_plugin.completeness import examine

    model, vllm_config, rows = _build(vllm, "Qwen3MoeForCausalLM", tmp_path)
    fused = [row for row in rows if row.name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(fused) == 4
    single = [
        TensorRow(f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight", torch.bfloat16, shape, 0, 0, 0)
        for layer in range(2)
        for expert in range(4)
        for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32)))
    ]
    others = [row for row in rows if row not in fused]
    assert examine(model, [others + single], vllm_config=vllm_config).error() is None
    lacking = examine(model, [others + single[:-1]], vllm_config=vllm_config)
    assert len(lacking.missing) == 1
    assert "model.layers.1.mlp.experts" in lacking.missing[0]
    both = examine(model, [rows + single], vllm_config=vllm_config)
    assert "sent more than once" in str(both.error())
    assert len(both.overlap) == 4
