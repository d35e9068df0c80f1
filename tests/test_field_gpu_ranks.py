"""Field cases that need a GPU and no server."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ipc import DTensorSource, WeightSender, WeightSyncError
from fsdp_ipc.clients import HTTPWeightSyncClient
from tests.fake_server import FakeServer
from tests.runner import run_ranks

pytestmark = pytest.mark.gpu


def two_on_one_gpu(rank: int, world_size: int, url: str) -> str:
    del world_size
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to("cuda:0")
    client = HTTPWeightSyncClient(url) if rank == 0 else None
    with WeightSender(DTensorSource(model), client, group=dist.group.WORLD, backend="fsdp_ipc") as sender:
        try:
            sender.send()
        except WeightSyncError as error:
            return str(error)
    return "sent"


def test_field_B13_two_trainer_ranks_on_one_gpu_are_told_so_before_anything_is_sent() -> None:
    """https://github.com/OpenRLHF/OpenRLHF/issues/726: NCCL says "Duplicate GPU"; a gloo job would get further."""
    with FakeServer(backend="fsdp_ipc") as server:
        told = run_ranks(two_on_one_gpu, 2, server.url)
        assert server.routes.count("/init_weight_transfer_engine") == 0
    for text in told:
        assert "share GPU" in text
        assert "CUDA_VISIBLE_DEVICES" in text
