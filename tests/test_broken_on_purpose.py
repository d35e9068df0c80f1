"""Broken on purpose: each of these sends would deliver wrong bytes without an error, were it not for a check.

The breaking is done behind the sender's back, on one rank, between two good sends; workers load into a model as vLLM's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import WeightSyncError, gather
from fsdp_ipc.control import ControlBlock
from tests.fake_server import FakeServer
from tests.runner import run_ranks
from tests.toy import build, full, make_sender, shard, step
from tests.verifying_worker import VerifyingWorker, toy_model

VICTIM = "layers.2.weight"


class Saboteur:
    """Breaks the second of three sends on this rank.

    Args:
        rank: This rank.
        sender: The sender, which has sent once.
    """

    def __init__(self, rank: int, sender: Any) -> None:
        self.rank, self.sender = rank, sender
        self.active = False
        self.kept: dict[int, torch.Tensor] = {}

    def slot(self, bucket: int) -> torch.Tensor:
        """The memory of a bucket."""
        plan, stage = self.sender._stage.plan, self.sender._stage
        return stage.memory[bucket % plan.num_slots]

    def before_announcing(self, act: Callable[[int], None]) -> None:
        """Call `act(bucket)` when a bucket is exported, gathered and digested, before the worker hears of it."""
        produce = ControlBlock.produce

        def wrapped(block: ControlBlock, sync: int, count: int) -> None:
            act(count - 1)
            produce(block, sync, count)

        ControlBlock.produce = wrapped

    # The ways to break it.

    def flip_a_byte(self) -> None:
        """One bit of one byte in staging after it was exported."""
        (row,) = [row for row in self.sender._stage.plan.rows if row.name == VICTIM]

        def flip(bucket: int) -> None:
            if self.active and self.rank == 1 and bucket == row.bucket:
                self.slot(bucket)[row.offset + 37] ^= 16

        self.before_announcing(flip)

    def swap_two_handles(self) -> None:
        """The slots of one rank trade places in what the worker is told."""
        self._tamper(lambda handles: {**handles, sorted(handles)[1]: handles[sorted(handles)[1]][::-1]})

    def swap_two_ranks_handles(self) -> None:
        """Each worker is told of the other rank's memory."""
        self._tamper(lambda handles: dict(zip(handles, reversed(handles.values()), strict=True)))

    def _tamper(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        client = self.sender._delivery._client
        if self.rank != 0:
            return
        update = client.update_weights

        def tampered(info: dict[str, Any]) -> None:
            if self.active and "allocations" in info:
                handles = self.sender._delivery._handles
                info = {**info, "epoch": info["epoch"] + 1000, "allocations": change(dict(handles))}
            update(info)

        client.update_weights = tampered

    def send_old_bytes(self) -> None:
        """The bytes of version n with the digest of version n + 1."""

        def keep_or_restore(bucket: int) -> None:
            if self.active and self.rank == 1:
                self.slot(bucket).copy_(self.kept[bucket])
            elif not self.active:
                self.kept[bucket] = self.slot(bucket).clone()

        self.before_announcing(keep_or_restore)

    def reorder_two_ranks(self) -> None:
        """One rank takes the shards of the two for each other's."""
        all_gather = gather.all_gather

        def reordered(out: torch.Tensor, piece: torch.Tensor, group: Any) -> None:
            all_gather(out, piece, group)
            if self.active and self.rank == 1:
                out.copy_(torch.cat(out.view(-1).chunk(2)[::-1]).view(out.shape))

        gather.all_gather = reordered


def _push(rank: int, world: int, url: str, how: str, verify: str) -> Any:
    """Two good sends, a broken one, a good one: what the broken one raised and what the workers must hold after the last."""
    model = shard(build(), init_device_mesh("cpu", (world,)))
    with make_sender(model, url, bucket_bytes=800, verify=verify) as sender:
        sender.send(1)
        saboteur = Saboteur(rank, sender)
        getattr(saboteur, how)()
        step(model)
        sender.send(2)
        step(model)
        saboteur.active = True
        error: WeightSyncError | None = None
        try:
            sender.send(3)
        except WeightSyncError as caught:
            error = caught
        saboteur.active = False
        broken = full(model, torch.bfloat16)
        step(model)
        sender.send(4)
        return error, broken, full(model, torch.bfloat16)


WORDS = {
    "flip_a_byte": [f"'{VICTIM}' (sent ", "1 of 10 digests differ", "trainer rank 1"],
    "swap_two_handles": ["digests differ", "trainer rank 1"],
    "swap_two_ranks_handles": ["the handle is of device", "update_info.allocations"],
    "send_old_bytes": ["10 of 10 digests differ", "trainer rank 1"],
    "reorder_two_ranks": ["all ranks must agree", "of the tensors of bucket"],
}


@pytest.mark.parametrize("how", WORDS)
def test_what_is_broken_is_caught_and_never_published(how: str, clean_shm: None) -> None:
    # Handles are told in the update request, which a repeated sync has none of.
    offer_s = None if "handles" in how else 1.0
    workers = [VerifyingWorker(index, toy_model(), offer_s=offer_s) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = run_ranks(_push, 2, server.url, how, "full")
        assert server.published == ["1", "2", "4"]
    errors = {str(error) for error, _, _ in ranks}
    assert len(errors) == 1
    (error,) = errors
    for word in WORDS[how]:
        assert word in error
    wanted = ranks[0][2]
    for worker in workers:
        assert set(worker.weights) == set(wanted)
        assert all(torch.equal(worker.weights[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("how", ["flip_a_byte", "send_old_bytes"])
def test_without_verification_the_same_goes_unseen(how: str, clean_shm: None) -> None:
    """That the breaking does break something: with `verify="off"` the worker behind rank 1 holds wrong bytes."""
    held: list[dict[str, torch.Tensor]] = []

    class Keeping(VerifyingWorker):
        def finish(self) -> None:
            super().finish()
            if self.index == 1:
                held.append(dict(self.weights))

    workers = [Keeping(index, toy_model()) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        (error, broken, _), _ = run_ranks(_push, 2, server.url, how, "off")
        assert server.published == ["1", "2", "3", "4"]
    assert error is None
    assert any(not torch.equal(held[2][name], value) for name, value in broken.items())
