"""A torchrun job for `test_minilm`: a pretrained encoder, sharded with FSDP2 and pushed once.

torchrun --nproc-per-node 2 -m tests.minilm_job URL MODEL_DIR
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender


def main(url: str, model_dir: str) -> None:
    """Every rank: load, shard, push."""
    from transformers import AutoModel

    dist.init_process_group("gloo")
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with WeightSender(DTensorSource(model), HTTPWeightSyncClient(url)) as sender:
        stats = sender.send("pretrained")
    if dist.get_rank() == 0:
        print(stats.num_tensors, stats.bytes, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
