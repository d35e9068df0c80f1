"""The copy plan and the CPU repairs on vLLM's own models, in this process: A, B, A, each like a freshly loaded model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ipc.vllm_plugin.copy_plan import CopyPlanLoader
from fsdp_ipc.vllm_plugin.copy_proof import bits
from fsdp_ipc.vllm_plugin.cpu_reload import CpuReload
from fsdp_ipc.vllm_plugin.loader import LoadCounts
from tests.vllm_inprocess import InProcess, computed_weights, inprocess_vllm

pytestmark = pytest.mark.vllm

Weights = dict[str, torch.Tensor]
# vLLM makes the process groups for experts only if the first model of a process has some.
KINDS = ["qwen3_moe", "deepseek_v2", "qwen3", "qwen3_tied"]


@pytest.fixture(scope="module")
def vllm() -> Iterator[InProcess]:
    with inprocess_vllm() as environment:
        yield environment


def hf_model(kind: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": kind.endswith("tied"),
    }  # fmt: skip
    experts = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, **experts, num_experts=4)
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "deepseek_v2":
        del common["head_dim"]
        common["num_key_value_heads"] = 4
        config = transformers.DeepseekV2Config(
            **common, **experts, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
            topk_group=1, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16,
            v_head_dim=32, topk_method="greedy",
        )  # fmt: skip
        return transformers.DeepseekV2ForCausalLM(config)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))


def write(kind: str, folder: Path, seed: int) -> tuple[Path, Weights]:
    """A checkpoint of random weights, none of them constant, and the same by name."""
    from safetensors.torch import load_file

    torch.manual_seed(seed)
    model = hf_model(kind).to(torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape) * 0.2 + (1.0 if param.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors")


def fused(weights: Weights) -> Weights:
    """Experts as 3-D tensors, gate and up one after the other."""
    result = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    prefixes = sorted({name.partition(".experts.")[0] for name in weights if ".experts." in name})
    for prefix in prefixes:
        ids = range(
            len([n for n in weights if n.startswith(f"{prefix}.experts.") and n.endswith("up_proj.weight")])
        )

        def stack(proj: str, prefix: str = prefix, ids: range = ids) -> torch.Tensor:
            return torch.stack([weights[f"{prefix}.experts.{e}.{proj}_proj.weight"] for e in ids])

        result[f"{prefix}.experts.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
        result[f"{prefix}.experts.down_proj"] = stack("down")
    return result


@dataclass
class Case:
    """A served model and what it must come to."""

    model: nn.Module
    config: Any
    weights: list[Weights]
    expected: list[Weights]


def plain_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights in their parameters, as on a GPU: vLLM's CPU backend packs them into closures."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None)
    monkeypatch.setattr(
        utils,
        "cpu_unquantized_gemm",
        lambda layer, x, weight, bias=None: nn.functional.linear(x, weight, bias),
    )
    monkeypatch.setattr(CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None)


@pytest.fixture(scope="module", params=KINDS)
def packed(request: pytest.FixtureRequest, vllm: InProcess, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """As vLLM serves on CPU."""
    return build(request.param, vllm, tmp_path_factory)


@pytest.fixture(scope="module", params=KINDS)
def plain(
    request: pytest.FixtureRequest, vllm: InProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """With weights left in their parameters, as on a GPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain_linear(monkeypatch)
        yield build(request.param, vllm, tmp_path_factory)


def build(kind: str, vllm: InProcess, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(kind)
    checkpoints = [write(kind, folder / str(seed), seed) for seed in range(2)]
    expected = [state(vllm.build(path)[0]) for path, _ in checkpoints]
    model, config = vllm.build(checkpoints[0][0])
    return Case(model, config, [weights for _, weights in checkpoints], expected)


def state(model: nn.Module) -> Weights:
    """All that the model computes with, experts' products and what attention made of its weights included."""
    seen = computed_weights(model)
    for name, module in model.named_modules():
        for own in ("W_UV", "W_UK_T"):
            if isinstance(getattr(module, own, None), torch.Tensor):
                seen[f"{name}.{own}"] = getattr(module, own).detach().clone()
    return seen


class Sync:
    """Syncs out of memory that is overwritten once loaded."""

    def __init__(self, case: Case, weights: Weights, num_buckets: int = 3) -> None:
        self.case = case
        self.loader = CopyPlanLoader(case.model, case.config.model_config)
        self.loader.examined = True
        names = list(weights)
        size = -(-len(names) // num_buckets)
        self.buckets = []
        for k in range(0, len(names), size):
            memory = torch.zeros(
                sum(weights[n].nbytes + 16 for n in names[k : k + size]) + 16, dtype=torch.uint8
            )
            bucket, at = [], 16
            for name in names[k : k + size]:
                like = weights[name]
                bucket.append((name, memory[at : at + like.nbytes].view(like.dtype).view(like.shape)))
                at += like.nbytes + 16
            self.buckets.append(bucket)

    def __call__(self, weights: Weights) -> LoadCounts:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.case.config):
            self.loader.start("names:1")
            for k, bucket in enumerate(self.buckets):
                for name, view in bucket:
                    view.copy_(weights[name])
                self.loader.load(k, bucket, keep_alive=False)
                for _, view in bucket:
                    view.fill_(7)
            return self.loader.finish()


def assert_like_fresh(case: Case, which: int) -> None:
    got, expected = state(case.model), case.expected[which]
    assert got.keys() == expected.keys()
    assert not [n for n in got if not torch.equal(bits(got[n]), bits(expected[n]))]


def test_on_cpu_every_sync_gives_what_a_fresh_load_gives(
    packed: Case, caplog: pytest.LogCaptureFixture
) -> None:
    sync = Sync(packed, packed.weights[0])
    for which in (1, 0, 1, 0):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            counts = sync(packed.weights[which])
        assert_like_fresh(packed, which)
        assert "Failed to load" not in caplog.text
    # Norms are plain; every other layer packs its weights somewhere.
    assert counts.replayed_params > 0
    assert counts.loader_params > 0


def test_fused_experts_on_cpu_give_what_a_fresh_load_gives(packed: Case) -> None:
    if not any(".experts." in name for name in packed.weights[0]):
        pytest.skip("a model without experts")
    if any("kv_b_proj" in name for name in packed.weights[0]):
        pytest.skip("vLLM's DeepSeek-V2 does not take fused experts")
    sync = Sync(packed, fused(packed.weights[0]))
    for which in (1, 0, 1):
        sync(fused(packed.weights[which]))
        assert_like_fresh(packed, which)


def test_weights_in_parameters_are_replayed(plain: Case, caplog: pytest.LogCaptureFixture) -> None:
    latent = any("kv_b_proj" in name for name in plain.weights[0])
    forms = [lambda w: w]
    if any(".experts." in name for name in plain.weights[0]) and not latent:
        forms.append(fused)
    for form in forms:
        sync = Sync(plain, form(plain.weights[0]))
        sync(form(plain.weights[1]))
        assert_like_fresh(plain, 1)
        for which in (0, 1, 0):
            for param in plain.model.parameters():
                param.data.fill_(7)
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                counts = sync(form(plain.weights[which]))
            assert_like_fresh(plain, which)
            assert not caplog.text
        if latent:
            assert counts.reasons.keys() == {"attention derives weights from it"}
            assert counts.replayed_params > counts.loader_params
        else:
            assert counts.loader_params == 0


def test_the_reload_alone_leaves_experts_and_tied_heads_stale_on_cpu(packed: Case) -> None:
    """What the repairs are for: vLLM 0.32's own reload, without them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    wrong = set()
    for which in (1, 0):
        with set_current_vllm_config(packed.config), torch.no_grad():
            initialize_layerwise_reload(packed.model)
            packed.model.load_weights(list(packed.weights[which].items()))
            finalize_layerwise_reload(packed.model, packed.config.model_config)
        got, expected = state(packed.model), packed.expected[which]
        wrong |= {name.rpartition(".")[2] for name in got if not torch.equal(got[name], expected[name])}
    weights = packed.weights[0]
    if any(".experts." in name for name in weights):
        assert {"w13_weight", "w2_weight"} <= wrong
    elif "lm_head.weight" not in weights:
        assert wrong == {"lm_head:computed"}
    else:
        assert not wrong


def test_quantised_experts_on_cpu_are_refused_by_name() -> None:
    class Fp8MoEMethod:
        moe_kernel = None

    model = nn.Module()
    model.add_module("experts", nn.Module())
    model.experts.w13_weight = nn.Parameter(torch.zeros(2), requires_grad=False)
    model.experts.quant_method = Fp8MoEMethod()
    with pytest.raises(ValueError, match=r"experts \(Fp8MoEMethod\)"):
        CpuReload(model)
