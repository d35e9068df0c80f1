"""Tiny models of many families, built by their own classes with random weights, for tests of names and bytes.

Sizes differ from each other on purpose, so that a swapped or transposed dim shows.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 46,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, attention_bias=True))


def llama_tied() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=46, n_embd=16, n_layer=2, n_head=2, n_positions=64, n_inner=20)
    )


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=True))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**TEXT, moe_intermediate_size=6, num_experts=5, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2))


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
    config = DeepseekV3Config(
        **text,
        num_key_value_heads=4,
        moe_intermediate_size=6,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # made with zeros
            buffer.copy_(torch.linspace(6.817, 7.063, buffer.numel()))
    return model


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **TEXT,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return GptOssForCausalLM(config)


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**TEXT))


def gemma3_vl() -> nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 12,
        "intermediate_size": 14,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    config = Gemma3Config(text_config=dict(TEXT), vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def qwen2_5_vl() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    text["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 0]}
    vision = {
        "depth": 1,
        "hidden_size": 12,
        "intermediate_size": 14,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "fullatt_block_indexes": [0],
        "window_size": 16,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def qwen3_vl_moe() -> nn.Module:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {**TEXT, "moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [1, 1, 1]}
    vision = {
        "depth": 1,
        "hidden_size": 12,
        "intermediate_size": 14,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    factory.__name__: factory
    for factory in (
        llama,
        llama_tied,
        gpt2,
        qwen3,
        qwen3_moe,
        mixtral,
        deepseek_v3,
        gpt_oss,
        gemma3,
        gemma3_vl,
        qwen2_5_vl,
        qwen3_vl_moe,
    )
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A model of `FACTORIES`; the same on every rank for the same seed, no tensor constant (biases, norms)."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about configurations this small
        model = FACTORIES[name]()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors in the files that `save_pretrained` writes."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder)  # type: ignore[operator]
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors.update(load_file(file))
    return tensors
