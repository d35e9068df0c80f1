"""Sizes of real models, and the parameters that a model of such sizes has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

EXPERT_STYLES = ("each", "fused", "unfused")
"""Modules per expert; one 3-D tensor a layer, sent as it is; one 3-D tensor a layer, sent expert by expert."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3, or with `num_experts` of a Qwen3-MoE."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    num_experts: int = 0
    expert_size: int = 0
    experts_per_token: int = 0
    max_position_embeddings: int = 2048
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_moe(self) -> bool:
        """Whether the layers have experts."""
        return self.num_experts > 0

    def with_layers(self, num_layers: int | None) -> Shape:
        """The same shape with another number of layers."""
        return self if num_layers is None else replace(self, num_layers=num_layers)

    def hf_config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The `config.json` of a checkpoint of this shape."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.is_moe else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.is_moe else "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
            "bos_token_id": None,
            "eos_token_id": 256,
        }
        if self.is_moe:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_size,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            }
        return config | self.extra


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="toy",
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            vocab_size=257,
        ),
        Shape(
            name="toy_moe",
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            vocab_size=257,
            num_experts=8,
            expert_size=32,
            experts_per_token=2,
        ),
        Shape(
            name="small_moe",
            hidden_size=256,
            intermediate_size=512,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            vocab_size=257,
            num_experts=16,
            expert_size=128,
            experts_per_token=4,
        ),
        Shape(
            name="small",
            hidden_size=512,
            intermediate_size=1536,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            vocab_size=257,
        ),
        Shape(
            name="small_100m",
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=6,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=24576,
            tied=True,
        ),
        Shape(
            name="qwen3_0_6b",
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            tied=True,
            max_position_embeddings=40960,
        ),
        Shape(
            name="qwen3_8b",
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
        Shape(
            name="qwen3_30b_a3b",
            hidden_size=2048,
            intermediate_size=6144,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            vocab_size=151936,
            num_experts=128,
            expert_size=768,
            experts_per_token=8,
            max_position_embeddings=40960,
        ),
    )
}


def shape_of(name: str, num_layers: int | None = None) -> Shape:
    """Look a shape up.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in SHAPES:
        raise ValueError(f"shape {name!r}: expected one of {', '.join(SHAPES)}")
    return SHAPES[name].with_layers(num_layers)


def parameters_of(shape: Shape, experts: str = "each") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Training names and shapes in layer order, as transformers names them.

    Args:
        shape: The sizes.
        experts: One of `EXPERT_STYLES`.
    """
    hidden, head = shape.hidden_size, shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (shape.num_heads * head, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (shape.num_kv_heads * head, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (shape.num_kv_heads * head, hidden)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, shape.num_heads * head)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if not shape.is_moe:
            yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate_size, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate_size, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
            continue
        yield f"{prefix}.mlp.gate.weight", (shape.num_experts, hidden)
        if experts == "each":
            for expert in range(shape.num_experts):
                yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (shape.expert_size, hidden)
                yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (shape.expert_size, hidden)
                yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, shape.expert_size)
        else:
            yield f"{prefix}.mlp.experts.gate_up_proj", (shape.num_experts, 2 * shape.expert_size, hidden)
            yield f"{prefix}.mlp.experts.down_proj", (shape.num_experts, hidden, shape.expert_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)
