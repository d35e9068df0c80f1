"""Tasks of `tests.gpu.trainer` that end a server: what the trainer is left with."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.trainer import FLAT_BYTES, Job, make_model, make_sender, refused


def server_killed(job: Job, task: dict[str, Any]) -> None:
    """The server is killed in the middle of a push: an error at once, and all memory comes back though nobody released it.

    `task["pids"]` are the server's processes, front end, engines and workers.
    """
    model = make_model(job, task)
    before = job.memory()
    sender = make_sender(model, task)
    sender.send()
    gatherer, last = sender._stage.gatherer, sender._stage.plan.num_buckets - 1
    slot_bytes = sender._stage.plan.slot_bytes
    load = gatherer.load

    def deadly(bucket: int, tensors: Any) -> None:
        if bucket == min(1, last) and dist.get_rank() == 0:
            for pid in task["pids"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        load(bucket, tensors)

    gatherer.load = deadly
    refused(job, f"{task['name']} refused", sender)
    refused(job, f"{task['name']} next push says why", sender)
    sender.close()
    gatherer.load = load
    del sender, gatherer
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    after = job.memory()
    files = [path.name for path in Path("/dev/shm").glob(f"fsdp_ipc-{os.getpid()}-*")]
    key = "allocated" if job.device.type == "cuda" else "resident"
    # Torch's own count of a buffer's readers never comes back from a reader that was killed, so the stock wire loses one.
    lost = slot_bytes if task["backend"] == "ipc" else 0
    good = not files and (job.device.type != "cuda" or after[key] <= before[key] + lost + FLAT_BYTES)
    text = f"{key} before {before[key]}, after {after[key]}; files left {files}"
    job.add(f"{task['name']} memory given back", good, text)


FAULT_TASKS: dict[str, Callable[[Job, dict[str, Any]], None]] = {"server_killed": server_killed}
