"""Field cases of groups and sessions: who takes part, who sends, and in which order a server is spoken to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import WeightSyncError
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.test_sender import assert_holds, serve
from tests.toy import build, expected, make_sender, shard


def _push_hsdp(rank: int, world: int, url: str) -> bool:
    model = shard(build(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    with make_sender(model, url) as sender:
        sender.send(1)
        return sender.is_sender


def test_field_B9_one_sender_a_server_on_a_mesh_of_two_axes() -> None:
    """https://github.com/vllm-project/vime/issues/56 : rank 0 of an axis is not unique; every GPU's memory counts."""
    server, workers = serve(4)
    with server:
        senders = run_ranks(_push_hsdp, 4, server.url)
        assert server.routes.count("/start_weight_update") == 1
        assert server.routes.count("/finish_weight_update") == 1
    assert senders == [True, False, False, False]
    assert len({worker._endpoint.device for worker in workers}) == 4
    for worker in workers:
        assert_holds(worker, expected(build(), torch.bfloat16))


def _push_gapped(rank: int, world: int, urls: dict[int, str]) -> str:
    groups = {members: dist.new_group(list(members)) for members in ((1,), (2, 3))}
    for members, group in groups.items():
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh=list(members))
            with make_sender(shard(build(rank == 1), mesh), urls[members[0]], group=group) as sender:
                return f"sent {sender.send(members[0]).version}"
    return "left alone"


def test_field_B10_engines_on_gapped_ranks_and_a_rank_without_one() -> None:
    """https://github.com/radixark/miles/pull/2871 : engines at ranks [1] and [2, 3]; rank 0 has none and is left alone."""
    one, alone = serve(1)
    two, pair = serve(2)
    with one, two:
        said = run_ranks(_push_gapped, 4, {1: one.url, 2: two.url})
        assert (one.published, two.published) == (["1"], ["2"])
    assert said == ["left alone", "sent 1", "sent 2", "sent 2"]
    assert_holds(alone[0], expected(build(True), torch.bfloat16))
    for worker in pair:
        assert_holds(worker, expected(build(False), torch.bfloat16))


def _control_backend(rank: int, world: int, url: str) -> str:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url) as sender:
        control: Any = sender.group._control
        return type(control).__name__


def test_field_B12_objects_and_barriers_use_a_group_of_the_cpu() -> None:
    """https://github.com/pytorch/pytorch/issues/75619 : on NCCL they would use the current device, cuda:0 everywhere."""
    server, _ = serve()
    with server:
        assert run_ranks(_control_backend, 2, server.url) == ["ProcessGroupGloo"] * 2


def _push_through_failures(rank: int, world: int, url: str) -> list[str]:
    said = []
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=800) as sender:
        for version in range(6):
            try:
                sender.send(version)
                said.append("ok")
            except WeightSyncError as error:
                said.append(error.step)
    return said


def test_field_E11_no_update_outside_of_start_and_finish() -> None:
    """https://github.com/NovaSky-AI/SkyRL/issues/1680 : a raw update of repacked weights corrupts them silently."""
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        server.fail("/start_weight_update", after=1)
        server.fail("/update_weights", after=1)
        server.fail("/finish_weight_update", after=2)
        per_rank = run_ranks(_push_through_failures, 2, server.url)
        updates = [r for r in server.routes if r.endswith(("start_weight_update", "update_weights"))]
        assert not [v for v in server.violations if "outside" in v], server.violations
        assert updates[0] == "/start_weight_update"
    assert per_rank[0] == per_rank[1]
    assert per_rank[0].count("ok") >= 3
    assert len(per_rank[0]) > per_rank[0].count("ok")
    for worker in workers:
        assert_holds(worker, expected(build(), torch.bfloat16))
