"""A trainer that was killed in the middle of an update leaves the server's session open; the next one goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks


def _push(rank: int, world_size: int, url: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    mesh = init_device_mesh("cpu", (world_size,))
    client = HTTPWeightSyncClient(url) if rank == 0 else None
    with WeightSender(DTensorSource(model), client, group=mesh) as sender:
        sender.send(1)
        sender.send(2)
    return model.weight.detach()


def test_an_update_that_a_dead_trainer_left_open_is_closed() -> None:
    workers = [NativeWorker(0), NativeWorker(1)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        server.initialized = server.active = True
        weight = run_ranks(_push, 2, server.url)[0]
        assert server.published == ["1", "2"]
        assert server.routes.count("/start_weight_update") == 3
        assert not server.active
    for worker in workers:
        assert torch.equal(worker.weights["weight"], weight)
