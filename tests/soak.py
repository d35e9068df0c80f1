"""Thousands of small syncs of drawn sizes, with delays on both sides and poison in all memory that is not in use.

Poison makes a mistake in lifetime or order visible: each side overwrites with 0xFF what it has just let go of, so a worker
that read too late, or a trainer that wrote too early, shows as wrong bytes. Ranks and workers are processes of their own.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import requests
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from fsdp_ipc.control import ControlBlock
from fsdp_ipc.gather import Gatherer
from fsdp_ipc.handles import SharedBuffer
from tests.fake_server import FakeServer
from tests.fault_server import digests
from tests.native_worker import NativeWorker
from tests.runner import _context
from tests.sharded import into_shared_memory
from tests.toy import full

RANKS = 2
SYNCS_A_MODEL = 25
"""After so many syncs come other sizes, another sender, and another mode."""


class PoisoningWorker(NativeWorker):
    """Waits a drawn time before each bucket, and ruins the bucket's memory when it has told the trainer that it is done.

    Only until the trainer fills it again: a write from here that comes later than the trainer's own would be this test's fault,
    so the poison goes in before the trainer hears that the memory is free.
    """

    def __init__(self, index: int, seed: int) -> None:
        super().__init__(index, peers=True)
        self._random = random.Random(seed * 31 + index)

    def before_bucket(self, bucket: int) -> None:
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * 0.003)

    def after_bucket(self, memory: list[torch.Tensor]) -> None:
        for tensor in memory:
            tensor.fill_(0xFF)


class _SoakServer(FakeServer):
    def _do_held(self, query: Any, body: Any) -> Any:
        return {
            "workers": [combined(digests(worker.weights)) for worker in self.workers],
            "violations": self.violations,
            "figures": figures() if body.get("figures") else None,
        }


def combined(told: dict[str, str]) -> str:
    """One digest of all of them."""
    return hashlib.sha256(json.dumps(sorted(told.items())).encode()).hexdigest()


def figures() -> dict[str, int]:
    """What this process holds: resident bytes, descriptors, threads, files of its own in shared memory."""
    import os

    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/dev/shm").glob(f"fsdp_ipc-{os.getpid()}-*"))),
    }


def serve(pipe: Any, seed: int) -> None:
    """The server and its workers, until the pipe closes."""
    workers = [PoisoningWorker(index, seed) for index in range(RANKS)]
    with _SoakServer(backend="fsdp_ipc", workers=workers) as server:
        pipe.send(server.url)
        with contextlib.suppress(EOFError):
            pipe.recv()


class Server:
    """`serve` in a process of its own."""

    def __init__(self, seed: int) -> None:
        self._pipe, theirs = _context().Pipe()
        self._process = _context().Process(target=serve, args=(theirs, seed), daemon=True)
        self._process.start()
        theirs.close()
        self.url: str = self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)


def draw_model(drawn: random.Random) -> nn.Sequential:
    """A few layers of odd and even sizes, some smaller than the world, in two dtypes."""
    layers: list[nn.Module] = []
    for _ in range(drawn.randint(2, 6)):
        rows, columns = drawn.choice([1, 2, 3, 5, 8, 13, 21, 64]), drawn.choice([1, 3, 4, 7, 16, 33])
        layers.append(nn.Linear(columns, rows, bias=drawn.random() < 0.5))
    model = nn.Sequential(*layers)
    for index in range(drawn.randint(0, 2)):
        model.register_buffer(f"buffer{index}", torch.randn(drawn.randint(1, 9)))
    return model


@torch.no_grad()
def change(model: nn.Module, sync: int) -> None:
    """Other weights, the same on every rank."""
    for parameter in model.parameters():
        parameter.mul_(-0.9).add_(0.01 * (sync % 17))


def _announce_early(sender: Any) -> None:
    load = Gatherer.load

    def hasty(gatherer: Gatherer, bucket: int, tensors: Any) -> None:
        sender._delivery._control.produce(sender._sync, bucket + 1)
        time.sleep(0.4)
        load(gatherer, bucket, tensors)

    Gatherer.load = hasty


def expected(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """All ranks, collective: what the workers must hold; buffers keep their dtype."""
    cast = {name for name, _ in model.named_parameters()} if dtype is not None else set()
    return {name: value.to(dtype) if name in cast else value for name, value in full(model, None).items()}


def push(
    rank: int, world: int, url: str, seed: int, for_s: float, at_most: int, hasty: str = ""
) -> dict[str, Any]:
    """Sync after sync until time is up; what was wrong, and what this rank and the server held along the way.

    Args:
        rank: This rank.
        world: All ranks.
        url: The server.
        seed: Of all that is drawn.
        for_s: Seconds.
        at_most: Syncs.
        hasty: Rank 1 announces each bucket before it fills it, which must show, where it is "gathered" or "shared".
    """
    drawn = random.Random(seed)  # the same on all ranks
    own = random.Random(seed * 7 + rank)  # this rank's own delays
    mesh = init_device_mesh("cpu", (world,))
    client = HTTPWeightSyncClient(url)
    produce, close = ControlBlock.produce, SharedBuffer.close

    def late(block: ControlBlock, sync: int, count: int) -> None:
        if own.random() < 0.2:
            time.sleep(own.random() * 0.003)
        produce(block, sync, count)

    def poison(buffer: SharedBuffer) -> None:
        if not buffer.closed:
            buffer.bytes.fill_(0xFF)
        close(buffer)

    ControlBlock.produce, SharedBuffer.close = late, poison
    began, syncs, wrong, nbytes = time.monotonic(), 0, 0, 0
    told: list[dict[str, Any]] = []
    going = True
    while going:
        model = draw_model(drawn)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        packed = drawn.random() < 0.7
        settings: dict[str, Any] = {"packed": packed, "num_slots": drawn.choice([1, 2, 3])}
        if packed:
            largest = max(p.numel() for p in model.parameters()) * 4
            settings["bucket_bytes"] = max(256, largest + drawn.randint(0, 600))
        dtype = drawn.choice([None, torch.bfloat16])
        # Gathered, read by both workers from both ranks' slots, or read where the parameters lie.
        settings["peer_reads"] = drawn.random() < 0.6 if not hasty else hasty == "shared"
        held_by_others = into_shared_memory(model) if not hasty and drawn.random() < 0.5 else []
        with WeightSender(
            DTensorSource(model, dtype=dtype), client if rank == 0 else None, **settings
        ) as sender:
            if hasty and rank == 1:
                _announce_early(sender)
            for _ in range(SYNCS_A_MODEL):
                change(model, syncs)
                if own.random() < 0.2:
                    time.sleep(own.random() * 0.005)
                nbytes += sender.send(syncs).bytes
                syncs += 1
                wanted = combined(digests(expected(model, dtype)))
                if rank == 0:
                    held = requests.post(f"{url}/held", json={}, timeout=30).json()
                    wrong += sum(found != wanted for found in held["workers"])
                going = sender.group.broadcast_object(
                    time.monotonic() - began < for_s and syncs < at_most, "soak"
                )
                if not going:
                    break
        for buffer in held_by_others:
            buffer.close()
        del model, sender, held_by_others
        server = None
        if rank == 0:
            held = requests.post(f"{url}/held", json={"figures": True}, timeout=30).json()
            wrong, server = wrong + len(held["violations"]), held["figures"]
        told.append({"sync": syncs, "rank": figures(), "server": server})
    ControlBlock.produce, SharedBuffer.close = produce, close
    return {
        "syncs": syncs,
        "wrong": wrong,
        "bytes": nbytes,
        "seconds": time.monotonic() - began,
        "told": told,
        "end": figures(),
    }
