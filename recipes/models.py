"""The recipes' model: a causal language model from sizes or from a checkpoint, laid out over the ranks.

Every rank builds the model on meta and gets only its own shard. Of a checkpoint each rank reads its own shards out of the
files; random weights are drawn on rank 0, which hands them out.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recipes.config import ModelConfig
from recipes.mesh import Layout

END_OF_TEXT = "<|endoftext|>"


def write_model_dir(config: ModelConfig, folder: Path) -> Path:
    """Make a directory that transformers and vLLM can both read: `config.json` and a tokenizer, no weights.

    Called on one rank of each node.

    Args:
        config: Sizes of the model; must not name a checkpoint.
        folder: Where to write.

    Returns:
        The folder.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    tokenizer = byte_tokenizer(config.vocab_size)
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    sizes: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "tie_word_embeddings",
        )
    }
    kind, name = Qwen3Config, "Qwen3ForCausalLM"
    if config.num_experts:
        kind, name = Qwen3MoeConfig, "Qwen3MoeForCausalLM"
        sizes |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": True,
        }
    qwen = kind(
        vocab_size=config.vocab_size,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        architectures=[name],
        dtype="float32",
        **sizes,
    )
    qwen.save_pretrained(folder)
    # Sampling defaults of a server come from here; without the file vLLM would ask the hub.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n")
    return folder


def byte_tokenizer(vocab_size: int = 257) -> Any:
    """Build a tokenizer of the 256 bytes and an end-of-text token, from nothing but its alphabet.

    Args:
        vocab_size: Entries in all. Those beyond 257 are words that no text is encoded to, half of them in small letters
            and half in capitals: an untrained model of a real vocabulary says something that can be rewarded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*alphabet, END_OF_TEXT])}
    for index in range(len(vocab), vocab_size):
        word = _word(index // 2)
        vocab[word if index % 2 else word.upper()] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _word(number: int) -> str:
    """A word of four letters, another one for each number below 26 ** 4."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def build_model(
    model_dir: Path,
    layout: Layout,
    *,
    has_weights: bool,
    seed: int,
    compute_dtype: torch.dtype,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build the model of `model_dir`, laid out over the ranks. Collective over all of them.

    1) (all ranks) build on meta, cut over `tp`, shard with `fully_shard`; allocate the shards;
    2) (all ranks) read their shards of the checkpoint; or (rank 0) draws random weights on the host and hands them out,
       parameter by parameter.

    Args:
        model_dir: Directory with `config.json`, and with weights if `has_weights`.
        layout: The meshes.
        has_weights: Whether to read weights from the directory.
        seed: Seed of the random weights.
        compute_dtype: Dtype of forward and backward.
        dtype: Dtype of the parameters.

    Returns:
        The sharded model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    device = torch.device(layout.shard.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shard(model, layout, compute_dtype)
    model.to_empty(device=device)
    _retie(model)
    _restore_buffers(model, config)
    if has_weights:
        load_checkpoint(model, model_dir)
        return model
    full: dict[str, Any] = {}
    if torch.distributed.get_rank() == 0:
        torch.manual_seed(seed)
        full = AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict()
    _hand_out(model, full)
    return model


def load_checkpoint(model: nn.Module, model_dir: Path) -> None:
    """All ranks, collective: read the weights of a Hugging Face checkpoint into a sharded model.

    Each rank reads its own shards, so no rank ever holds the whole. Where the family's module names its weights otherwise
    than the checkpoint does (experts that are stacked in the module), rank 0 reads the whole through transformers and hands
    it out.
    """
    wanted = dict(model.named_parameters())
    stored = _stored_shapes(model_dir)
    if stored and all(stored.get(name) == tuple(tensor.shape) for name, tensor in wanted.items()):
        from torch.distributed.checkpoint import HuggingFaceStorageReader  # type: ignore[attr-defined]
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch's own storage classes
            state = {name: tensor.detach() for name, tensor in wanted.items()}
            load(state, storage_reader=HuggingFaceStorageReader(str(model_dir)))
        return
    full: dict[str, Any] = {}
    if torch.distributed.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        dtype = next(iter(wanted.values())).dtype
        full = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).state_dict()
    _hand_out(model, full)


def _stored_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor in the directory's safetensors files, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def _hand_out(model: nn.Module, full: dict[str, Any]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    set_model_state_dict(model, full, options=options)


def shard(model: nn.Module, layout: Layout, compute_dtype: torch.dtype) -> None:
    """Cut the layers over `tp`, then apply `fully_shard` to each decoder layer and to the model itself, in place.

    Embedding, final norm and head stay together in the root group: they may be tied, and a tied parameter cannot lie in
    two groups. Stacked experts are sharded over their first axis, so that each rank holds whole ones.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if compute_dtype in {p.dtype for p in model.parameters()}:  # nothing to cast
        policy = MixedPrecisionPolicy()
    for layer in model.get_submodule("model.layers").children():
        if layout.tp is not None:
            _cut(layer, layout)
        experts = getattr(getattr(layer, "mlp", None), "experts", None)
        if layout.experts is not None and isinstance(experts, nn.Module):
            fully_shard(experts, mesh=layout.experts, mp_policy=policy)
        fully_shard(layer, mesh=layout.shard, mp_policy=policy)
    fully_shard(model, mesh=layout.shard, mp_policy=policy)


def _cut(layer: nn.Module, layout: Layout) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    wide = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in wide}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for name in plan:
        if not isinstance(_find(layer, name), nn.Linear):
            raise ValueError(
                f"mesh.tp: {type(layer).__name__} has no linear {name!r}; take mesh=fsdp for this model"
            )
    # Their weights meet this rank's heads only, so their gradients must be summed over the axis.
    norms = [name for name in ("self_attn.q_norm", "self_attn.k_norm") if _find(layer, name) is not None]
    plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in norms}
    parallelize_module(layer, layout.tp, plan)


def _find(module: nn.Module, path: str) -> nn.Module | None:
    return dict(module.named_modules()).get(path)


def _restore_buffers(model: nn.Module, config: Any) -> None:
    """Compute what is in no state dict (rotary frequencies) anew: `to_empty` has left garbage in it."""
    persistent = model.state_dict().keys()
    for path, module in model.named_modules():
        names = [
            n for n, _ in module.named_buffers(recurse=False) if f"{path}.{n}".lstrip(".") not in persistent
        ]
        if not names:
            continue
        try:
            fresh = type(module)(config)
        except TypeError as error:
            raise ValueError(
                f"{path}: cannot compute the buffers {names} of a {type(module).__name__}"
            ) from error
        for name in names:
            getattr(module, name).copy_(getattr(fresh, name))


def _retie(model: nn.Module) -> None:
    # `to_empty` replaces the two names of a tied parameter by two parameters.
    if getattr(model.config, "tie_word_embeddings", False):
        model.get_submodule("lm_head").weight = model.get_submodule("model.embed_tokens").weight
