"""Tiny checkpoints made by hand, for vLLM to serve: config, tokenizer and seeded weights, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 192


def qwen3_config(
    *, tied: bool = False, layers: int = 2, dtype: str = "bfloat16", **overrides: Any
) -> dict[str, Any]:
    """A Qwen3 of a few thousand parameters, with head sizes that vLLM's CPU attention knows."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **overrides,
    }


def qwen3_weights(config: dict[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors by name, in layer order. Large enough that another seed gives other logits."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.q_norm.weight": (head,),
            f"{prefix}.self_attn.k_norm.weight": (head,),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    return {
        name: (
            torch.randn(shape, generator=generator) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)
        ).to(dtype)
        for name, shape in shapes.items()
    }


def write_checkpoint(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """Write config and a word tokenizer, and the weights if there are any (without: `--load-format dummy`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<s>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, config["vocab_size"])}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": text,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for text, index in (("<s>", 0), ("</s>", 1))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "</s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "</s>",
                "model_max_length": 512,
            }
        )
    )
    if weights is not None:
        from safetensors.torch import save_file

        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
