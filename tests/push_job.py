"""A torchrun job for `test_job`: train a little Qwen3 with FSDP2, push, and note what both replicas then serve.

torchrun --nproc-per-node 2 -m tests.push_job URL MODEL_DIR OUT_DIR
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from tests.served import PROMPT, served

BUCKET_BYTES = 40_000


def main(url: str, model_dir: Path, out_dir: Path) -> None:
    """Every rank: packed push, a training step, packed push, the old weights unpacked; rank 0 writes the findings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found: dict[str, Any] = {}
    first = {name: value.full_tensor() for name, value in _sharded(model).items()}
    _save(model_dir, out_dir / "first", first)
    with WeightSender(
        DTensorSource(model, dtype=torch.bfloat16), HTTPWeightSyncClient(url), bucket_bytes=BUCKET_BYTES
    ) as sender:
        found["first"] = _push(sender, "first", url)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        tokens = torch.tensor([PROMPT])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["trained"] = _push(sender, "trained", url)
    trained = {name: value.full_tensor() for name, value in _sharded(model).items()}
    _save(model_dir, out_dir / "trained", trained)
    with torch.no_grad():
        for name, value in _sharded(model).items():
            before = DTensor.from_local(
                first[name], mesh, [torch.distributed.tensor.Replicate()], run_check=False
            )
            value.copy_(before.redistribute(placements=value.placements))
    with WeightSender(
        DTensorSource(model, dtype=torch.bfloat16), HTTPWeightSyncClient(url), packed=False
    ) as sender:
        found["unpacked"] = _push(sender, "unpacked", url)
    if rank == 0:
        uneven = [n for n, v in _sharded(model).items() if v.shape[0] % dist.get_world_size()]
        (out_dir / "found.json").write_text(json.dumps({"pushes": found, "uneven": uneven}))
    dist.barrier()
    dist.destroy_process_group()


def _sharded(model: torch.nn.Module) -> dict[str, DTensor]:
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    return state


def _push(sender: WeightSender, version: str, url: str) -> dict[str, Any]:
    stats = sender.send(version)
    replicas = [asdict(served(url, replica)) for replica in range(2)] if dist.get_rank() == 0 else []
    dist.barrier()
    return {"stats": stats.to_json(), "replicas": replicas}


def _save(model_dir: Path, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Rank 0: a checkpoint of plain full tensors in bf16, gathered by torch and written by safetensors alone."""
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        for file in model_dir.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = {n: v.to(torch.bfloat16).contiguous() for n, v in state.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
