"""A torchrun job for `test_moe_server`: a Qwen3-MoE of transformers, its experts held in every way, pushed to one server.

    torchrun --nproc-per-node 2 -m tests.moe_job URL MODEL_DIR OUT_DIR

The server has one replica, so one worker, which reads rank 0's memory; rank 1 only helps to gather.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from fsdp_ipc.naming import naming_for
from tests.served import PROMPT, served

BUCKET_BYTES = 80_000
Held = Callable[[Any, DeviceMesh], dict[str, Any]]


def by_fsdp(model: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Experts as 3-D `Shard(0)` DTensors of FSDP2, like everything else."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {}


def by_expert_mesh(model: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Experts as DTensors on an expert-parallel axis of their own mesh."""
    own = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("ep",))
    _replace_experts(model, lambda tensor: distribute_tensor(tensor, own["ep"], [Shard(0)]))
    _shard_the_rest(model, mesh)
    return {}


def by_plain_shards(model: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Experts as plain tensors of which each rank has its own, declared to be shards."""
    _replace_experts(model, lambda tensor: tensor.chunk(mesh.size())[mesh.get_local_rank()].clone())
    _shard_the_rest(model, mesh)
    return {"plain_shards": {"*.experts.*": (mesh, [Shard(0)])}}


def by_modules(model: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """A module for each expert that this rank holds, and none for the others."""
    for layer in model.model.layers:
        fused = layer.mlp.experts
        layer.mlp.experts = nn.ModuleDict()
        number = fused.gate_up_proj.shape[0]
        share = number // mesh.size()
        for expert in range(mesh.get_local_rank() * share, (mesh.get_local_rank() + 1) * share):
            gate, up = fused.gate_up_proj[expert].detach().chunk(2)
            layer.mlp.experts[str(expert)] = nn.ModuleDict(
                {
                    "gate_proj": _linear(gate),
                    "up_proj": _linear(up),
                    "down_proj": _linear(fused.down_proj[expert].detach()),
                }
            )
    _shard_the_rest(model, mesh)
    return {}


VARIANTS: dict[str, tuple[Held, str]] = {
    "fsdp-fused": (by_fsdp, "fused"),
    "fsdp-each": (by_fsdp, "checkpoint"),
    "mesh-fused": (by_expert_mesh, "fused"),
    "mesh-each": (by_expert_mesh, "checkpoint"),
    "plain-fused": (by_plain_shards, "fused"),
    "plain-each": (by_plain_shards, "checkpoint"),
    "modules-each": (by_modules, "checkpoint"),
}


def main(url: str, model_dir: Path, out_dir: Path) -> None:
    """Every rank: train a step, save what torch gathers, then push it in every variant."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(11)
    plain = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(model_dir)).float()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    _train_and_gather(plain, mesh)
    if rank == 0:
        copy.deepcopy(plain).to(torch.bfloat16).save_pretrained(out_dir / "saved")
    found = {}
    for name, (hold, experts) in VARIANTS.items():
        model = copy.deepcopy(plain)
        found[name] = _push(model, hold(model, mesh), experts, url)
    if rank == 0:
        (out_dir / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _train_and_gather(plain: Any, mesh: DeviceMesh) -> None:
    """One step under FSDP2, so that what is pushed was trained; the result goes back into the unsharded model."""
    model = copy.deepcopy(plain)
    by_fsdp(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    tokens = torch.tensor([PROMPT])
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    plain.load_state_dict(full)


def _push(model: Any, source_args: dict[str, Any], experts: Any, url: str) -> dict[str, Any]:
    """Noise twice, by which the worker may learn where things go, then the weights."""
    source = DTensorSource(
        model, dtype=torch.bfloat16, naming=naming_for(model, experts=experts), **source_args
    )
    held_by_name = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in held_by_name}
    weights = {name: tensor.clone() for name, tensor in local.items()}
    found: dict[str, Any] = {}
    with WeightSender(source, HTTPWeightSyncClient(url), bucket_bytes=BUCKET_BYTES) as sender:
        for version in ("noise", "other noise", "weights"):
            for name, tensor in local.items():
                tensor.copy_(weights[name] if version == "weights" else torch.randn_like(tensor) * 0.3 + 0.2)
            stats = sender.send(version)
            found[version] = asdict(served(url, 0)) if dist.get_rank() == 0 else {}
            dist.barrier()
    # What this rank holds of the experts, so that the test sees that the variant is what its name says.
    held = [f"{name} {tuple(t.shape)}" for name, t in local.items() if "layers.0.mlp.experts" in name]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"held": held, "stats": stats.to_json()})
    return {"served": found, "ranks": everyone}


def _replace_experts(model: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for layer in model.model.layers:
        for key, parameter in list(layer.mlp.experts.named_parameters(recurse=False)):
            layer.mlp.experts.register_parameter(key, nn.Parameter(make(parameter.detach())))


def _shard_the_rest(model: Any, mesh: DeviceMesh) -> None:
    ignored = set()
    for layer in model.model.layers:
        ignored |= set(layer.mlp.experts.parameters())
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone())
    return linear


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
