"""Real model sizes with random weights: modules that hold a family's parameters and have no forward.

A weight sync depends on names, shapes, dtypes and shards alone, so a benchmark needs no checkpoint. The modules are
built on meta, sharded with `fully_shard` as a trainer's would be, and filled shard by shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_ipc import naming_for
from fsdp_ipc.experts import HALVES
from fsdp_ipc.naming import Naming
from recipes.models import END_OF_TEXT, byte_tokenizer
from recipes.sizes import Shape, parameters_of


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
