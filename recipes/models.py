"""The demo's model: a causal language model from sizes or from a checkpoint, sharded with FSDP2.

Every rank builds the model on meta and gets only its own shard; the full weights exist on rank 0 alone, and
there only while they are handed out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recipes.config import ModelConfig

END_OF_TEXT = "<|endoftext|>"


def write_model_dir(config: ModelConfig, folder: Path) -> Path:
    """Make a directory that transformers and vLLM can both read: `config.json` and a tokenizer, no weights.

    Called on one rank.

    Args:
        config: Sizes of the model; must not name a checkpoint.
        folder: Where to write.

    Returns:
        The folder.
    """
    from transformers import Qwen3Config

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    qwen = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    qwen.save_pretrained(folder)
    # Sampling defaults of a server come from here; without the file vLLM would ask the hub.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n")
    return folder


def byte_tokenizer() -> Any:
    """Build a tokenizer of the 256 bytes and an end-of-text token, from nothing but its alphabet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*alphabet, END_OF_TEXT])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    model_dir: Path, mesh: DeviceMesh, *, has_weights: bool, seed: int, compute_dtype: torch.dtype
) -> nn.Module:
    """Build the model of `model_dir` with fp32 parameters, sharded over `mesh`. Collective over the mesh.

    1) (all ranks) build on meta, shard with `fully_shard`: one group a decoder layer, the rest in the root;
    2) (rank 0) read the checkpoint, or draw random weights, on the host;
    3) (all ranks) allocate the shards; rank 0 hands out the weights parameter by parameter.

    Args:
        model_dir: Directory with `config.json`, and with weights if `has_weights`.
        mesh: One-dimensional mesh to shard over; its first rank is rank 0.
        has_weights: Whether to read weights from the directory.
        seed: Seed of the random weights.
        compute_dtype: Dtype of forward and backward; the parameters stay fp32.

    Returns:
        The sharded model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shard(model, mesh, compute_dtype)
    model.to_empty(device=device)
    _retie(model)

    full: dict[str, Any] = {}
    buffers: dict[str, torch.Tensor] = {}
    is_first = mesh.get_local_rank() == 0
    if is_first:
        torch.manual_seed(seed)
        if has_weights:
            whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        else:
            whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        full = whole.state_dict()
        buffers = dict(whole.named_buffers())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    set_model_state_dict(model, full, options=options)
    # Non-persistent buffers (the rotary frequencies) are in no state dict.
    group = mesh.get_group()
    for name, buffer in model.named_buffers():
        if is_first:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, group=group, group_src=0)
    return model


def shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Apply `fully_shard` to each decoder layer and to the model itself, in place.

    Embedding, final norm and head stay together in the root group: they may be tied, and a tied parameter
    cannot lie in two groups.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if compute_dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _retie(model: nn.Module) -> None:
    # `to_empty` replaces the two names of a tied parameter by two parameters.
    if getattr(model.config, "tie_word_embeddings", False):
        model.get_submodule("lm_head").weight = model.get_submodule("model.embed_tokens").weight
