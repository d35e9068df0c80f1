"""Real model sizes with random weights: modules that hold a family's parameters and have no forward.

A weight sync depends on names, shapes, dtypes and shards alone, so a benchmark needs no checkpoint. The modules are
built on meta, sharded with `fully_shard` as a trainer's would be, and filled shard by shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_ipc import naming_for
from fsdp_ipc.experts import HALVES
from fsdp_ipc.naming import Naming
from recipes.models import END_OF_TEXT, byte_tokenizer

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


def build(
    shape: Shape,
    mesh: DeviceMesh | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    experts: str = "each",
    tp_axis: str | None = None,
    seed: int = 0,
    scale: float = 0.02,
) -> nn.Module:
    """Build the module of a shape, sharded and filled with random weights. All ranks; no collective of its own.

    Args:
        shape: The sizes.
        mesh: Mesh of `fully_shard` (two axes: HSDP), None for a plain module.
        device: Where the shards live.
        dtype: Dtype of the parameters.
        experts: One of `EXPERT_STYLES`.
        tp_axis: Name of the mesh axis over which projections are sharded first, as tensor parallelism does; the rest
            of the mesh is FSDP's.
        seed: Of the random weights; equal shards get equal weights on every replica.
        scale: Standard deviation of the random weights.
    """
    model = nn.Module()
    for name, sizes in parameters_of(shape, experts):
        parent, _, key = name.rpartition(".")
        module = _submodule(model, parent)
        module.register_parameter(key, nn.Parameter(torch.empty(sizes, dtype=dtype, device="meta")))
    if shape.tied:
        model.get_submodule("lm_head").weight = model.get_submodule("model.embed_tokens").weight
    if mesh is not None:
        fsdp_mesh = mesh
        if tp_axis is not None:
            names = mesh.mesh_dim_names or ()
            fsdp_mesh = mesh[tuple(n for n in names if n != tp_axis)]
            _shard_projections(model, mesh[tp_axis])
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=fsdp_mesh)
        fully_shard(model, mesh=fsdp_mesh)
    model.to_empty(device=device)
    if shape.tied:
        # `to_empty` gives the two names of a tie a parameter each.
        model.get_submodule("lm_head").weight = model.get_submodule("model.embed_tokens").weight
    fill(model, seed, scale)
    return model


@torch.no_grad()
def fill(model: nn.Module, seed: int, scale: float = 0.02) -> None:
    """Draw new weights in place: norms around 1, all else small around 0."""
    for index, (name, param) in enumerate(model.named_parameters()):
        local = param.to_local() if isinstance(param, DTensor) else param
        generator = torch.Generator(local.device).manual_seed(
            (seed * 100003 + index) * 4099 + _shard_number(param)
        )
        local.normal_(0.0, scale, generator=generator)
        # The negative of 0 is a 0 of other bits, which a weight read back by arithmetic cannot show.
        local.masked_fill_(local == 0, scale)
        if name.endswith("norm.weight"):
            local.add_(1.0)


@torch.no_grad()
def negate(model: nn.Module) -> None:
    """Turn every weight into its negative: a cheap change of every byte that twice undoes itself."""
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        local.neg_()


def sent_naming(model: nn.Module, experts: str) -> Naming:
    """The naming under which a module of this file is sent.

    Args:
        model: From `build`.
        experts: The style that it was built with.
    """
    return naming_for(model, experts=HALVES if experts == "unfused" else "checkpoint")


def write_server_dir(shape: Shape, folder: Path, dtype: str = "bfloat16") -> Path:
    """Make a model directory without weights, for a server with `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape.hf_config(dtype), indent=1))
    end = byte_tokenizer().convert_tokens_to_ids(END_OF_TEXT)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n")
    return folder


def write_checkpoint(shape: Shape, folder: Path, *, seed: int, scale: float = 0.1) -> Path:
    """Make a checkpoint with seeded bfloat16 weights, experts one by one, that a server can load."""
    from safetensors.torch import save_file

    write_server_dir(shape, folder)
    model = build(shape, None, device=torch.device("cpu"), dtype=torch.bfloat16, seed=seed, scale=scale)
    tensors = {name: tensor.clone() for name, tensor in checkpoint_tensors(model, "each", torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """All ranks, no collective: fill a sharded module with the weights of a checkpoint of `write_checkpoint`."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for name, param in model.named_parameters():
        whole = tensors[name] if name in tensors else _fused(name, tensors)
        if isinstance(param, DTensor):
            local = param.to_local()
            whole = whole.to(local.device, param.dtype)
            shard = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            local.copy_(shard.to_local())
        else:
            param.copy_(whole)


def _fused(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    stem, _, kind = name.rpartition(".")
    parts = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
    experts: list[torch.Tensor] = []
    while f"{stem}.{len(experts)}.{parts[0]}.weight" in tensors:
        experts.append(torch.cat([tensors[f"{stem}.{len(experts)}.{part}.weight"] for part in parts]))
    return torch.stack(experts)


def checkpoint_tensors(
    model: nn.Module, experts: str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """All ranks, collective: checkpoint names and full tensors in `dtype`, by DTensor's own means and none of ours.

    The reference for what a server must hold, and what a hand-written trainer would send. Experts come one by one
    unless they are `fused`.
    """
    seen: set[int] = set()
    for name, param in model.named_parameters(remove_duplicate=True):
        if id(param) in seen:
            continue
        seen.add(id(param))
        full = (param.full_tensor() if isinstance(param, DTensor) else param).detach().to(dtype)
        if experts != "unfused" or ".mlp.experts." not in name:
            yield name, full
            continue
        prefix, _, kind = name.rpartition(".")
        for expert in range(full.shape[0]):
            if kind == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", full[expert]
            else:
                half = full.shape[1] // 2
                yield f"{prefix}.{expert}.gate_proj.weight", full[expert, :half]
                yield f"{prefix}.{expert}.up_proj.weight", full[expert, half:]


def _submodule(root: nn.Module, path: str) -> nn.Module:
    for part in path.split("."):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    return root


def _shard_projections(model: nn.Module, mesh: DeviceMesh) -> None:
    """Column- and row-wise sharding as a tensor-parallel plan would leave it, on meta."""
    for name, param in list(model.named_parameters()):
        placement: Shard | Replicate = Replicate()
        if name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
        ):
            placement = Shard(0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            placement = Shard(1)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            placement = Shard(0)
        parent, _, key = name.rpartition(".")
        whole = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
        model.get_submodule(parent).register_parameter(key, nn.Parameter(whole))


def _shard_number(param: torch.Tensor) -> int:
    """The same on all ranks that hold the same shard of this parameter."""
    if not isinstance(param, DTensor):
        return 0
    number = 0
    coordinate = tuple(param.device_mesh.get_coordinate() or ())
    for axis, placement in enumerate(param.placements):
        if not placement.is_replicate():
            number = number * param.device_mesh.size(axis) + coordinate[axis]
    return number
