"""The trainer's side of the GPU tests: runs the tasks of a JSON file on every rank, against servers that are up.

    torchrun --nproc-per-node N -m tests.gpu.trainer TASKS.json

Every task is one JSON object: `kind` names a function of this file, the rest are its settings. Rank 0 appends one JSON
line for each outcome to the file that TASKS.json names.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, Timeouts, WeightSender, WeightSyncError
from fsdp_ipc.control import ControlBlock
from recipes.probe import WorkerProbe
from recipes.ranks import joined, on_rank0, own_device
from recipes.shapes import build, checkpoint_tensors, fill, load_checkpoint, negate, sent_naming
from recipes.sizes import shape_of
from recipes.weight_digest import expected_digests
from recipes.worker_extension import memory_figures
from tests.gpu.fleet import Clock, Results
from tests.gpu.generate import Said, Speaker

FLAT_BYTES = 2 << 20
"""Growth over many pushes that still counts as flat: an allocator may round."""


@dataclass
class Job:
    """What every task is given: this rank's device, the results, and the settings shared by all tasks."""

    device: torch.device
    results: Results | None
    replicas: int

    def add(self, name: str, good: bool, text: str = "", **more: Any) -> None:
        """Record an outcome; rank 0's counts."""
        if self.results is not None:
            self.results.add(name, good, text, **more)

    def mesh(self, sizes: list[int] | None = None, names: list[str] | None = None) -> DeviceMesh:
        """The mesh of a task: all ranks, or sizes by name."""
        sizes = sizes or [dist.get_world_size()]
        return init_device_mesh(self.device.type, tuple(sizes), mesh_dim_names=tuple(names or ["dp_shard"]))

    def memory(self) -> dict[str, Any]:
        """This rank's own memory."""
        gc.collect()
        return memory_figures(self.device)


def make_model(job: Job, task: dict[str, Any], mesh: DeviceMesh | None = None) -> nn.Module:
    """The task's model, sharded over the task's mesh."""
    return build(
        shape_of(task["shape"], task.get("num_layers")),
        mesh if mesh is not None else job.mesh(task.get("mesh"), task.get("axes")),
        device=job.device,
        dtype=getattr(torch, task.get("dtype", "bfloat16")),
        experts=task.get("experts", "each"),
        tp_axis="tp" if "tp" in task.get("axes", []) else None,
        scale=0.1,
    )


def make_sender(model: nn.Module, task: dict[str, Any], client: Any = None, **more: Any) -> WeightSender:
    """The task's sender."""
    source = DTensorSource(
        model, dtype=torch.bfloat16, keep=(), naming=sent_naming(model, task.get("experts", "each"))
    )
    return WeightSender(
        source,
        client if client is not None else HTTPWeightSyncClient(task["url"], request_timeout_s=60),
        backend=task.get("backend", "fsdp_ipc"),
        packed=task.get("packed", True),
        bucket_bytes=task.get("bucket_bytes"),
        timeouts=Timeouts(request_s=60, transfer_s=70, control_s=80),
        **more,
    )


def expectation(model: nn.Module, task: dict[str, Any], device: torch.device) -> dict[str, tuple[str, ...]]:
    """All ranks, collective: what the workers must hold."""
    return expected_digests(checkpoint_tensors(model, task.get("experts", "each"), torch.bfloat16), device)


def push_equals_load(job: Job, task: dict[str, Any]) -> None:
    """A, B, A: weights bit for bit, and the words of a server that was started from the checkpoint.

    On every replica; the server's parameters are scrambled before the first push.
    """
    model = make_model(job, task)
    probe, speaker = WorkerProbe(task["url"], job.replicas), Speaker(task["url"], job.replicas)
    sharded = bool(task.get("expert_parallel"))
    with make_sender(model, task) as sender:
        said: list[Said] = []
        on_rank0(probe.scramble)
        for number, letter in enumerate("aba"):
            load_checkpoint(model, Path(task[f"checkpoint_{letter}"]))
            expected = expectation(model, task, job.device)
            sender.send()
            verdict = on_rank0(lambda e=expected: probe.verify(e, sharded_experts=sharded))  # type: ignore[misc]
            job.add(f"{task['name']} push {number + 1} ({letter.upper()})", verdict.good, verdict.text())
            said.append(on_rank0(speaker.say))
        if task.get("reference"):
            loaded = on_rank0(Speaker(task["reference"], task.get("reference_replicas", job.replicas)).say)
            difference = said[0].difference(loaded)
            text = difference or "greedy tokens and log-probabilities equal a fresh load's"
            job.add(f"{task['name']} speaks as loaded", not difference, text)
        job.add(f"{task['name']} A and B speak differently", said[0] != said[1], "")
        difference = said[0].difference(said[2])
        job.add(f"{task['name']} A again speaks as A", not difference, difference or "to the last bit")
        if task.get("pushes"):
            flat(job, task, sender, model, task["pushes"])


def flat(job: Job, task: dict[str, Any], sender: WeightSender, model: nn.Module, count: int) -> None:
    """Many pushes: what trainer and workers hold at the end is what they held after a few."""
    probe = WorkerProbe(task["url"], job.replicas)
    early: list[Any] = []
    for number in range(count):
        negate(model)
        sender.send()
        if number == min(9, count // 3):
            early = [job.memory(), on_rank0(probe.memory)]
    late: list[Any] = [job.memory(), on_rank0(probe.memory)]
    keys = ("allocated", "reserved", "device_used") if job.device.type == "cuda" else ("resident",)
    limit = FLAT_BYTES if job.device.type == "cuda" else 64 << 20
    grown = {f"trainer {key}": late[0][key] - early[0][key] for key in keys}
    for index, (before, after) in enumerate(zip(early[1], late[1], strict=True)):
        grown |= {f"worker {index} {key}": after[key] - before[key] for key in keys}
    expected = expectation(model, task, job.device)
    verdict = on_rank0(lambda: probe.verify(expected, sharded_experts=bool(task.get("expert_parallel"))))
    good = verdict.good and all(value <= limit for value in grown.values())
    job.add(
        f"{task['name']} memory flat over {count} pushes",
        good,
        f"{verdict.text()}; growth {grown}",
        grown=grown,
    )


def push_exact(job: Job, task: dict[str, Any]) -> None:
    """Random weights over any mesh: bit-exact on every replica, twice with a change between; optionally many more."""
    model = make_model(job, task)
    probe = WorkerProbe(task["url"], job.replicas)
    sharded = bool(task.get("expert_parallel"))
    with make_sender(model, task) as sender:
        for number in range(3):
            fill(model, 17 + number, 0.05)
            on_rank0(probe.scramble)
            stats = sender.send()
            expected = expectation(model, task, job.device)
            verdict = on_rank0(lambda e=expected: probe.verify(e, sharded_experts=sharded))  # type: ignore[misc]
            text = f"{verdict.text()}, {stats.seconds * 1e3:.0f} ms, worker {stats.worker}"
            job.add(f"{task['name']} push {number + 1}", verdict.good, text)
        if task.get("pushes"):
            flat(job, task, sender, model, task["pushes"])


def quantised(job: Job, task: dict[str, Any]) -> None:
    """A server that quantises while it loads: after pushes every parameter is that of a fresh load, scales included."""
    model = make_model(job, task)
    load_checkpoint(model, Path(task["checkpoint_a"]))
    probe, loaded = WorkerProbe(task["url"], job.replicas), WorkerProbe(task["reference"], job.replicas)
    with make_sender(model, task) as sender:
        for number in range(4):
            if number != 2:  # the third push finds the second one's weights, the others scrambled ones
                on_rank0(probe.scramble)
            stats = sender.send()
            held, fresh = on_rank0(lambda: (probe.digests()[0], loaded.digests()[0]))
            wrong = sorted(name for name in fresh if held.get(name) != fresh[name])
            text = f"{len(fresh) - len(wrong)} of {len(fresh)} parameters as loaded {wrong[:6]}; worker {stats.worker}"
            job.add(f"{task['name']} push {number + 1}", not wrong and bool(fresh), text)
        difference = on_rank0(
            lambda: (
                Speaker(task["url"], job.replicas)
                .say()
                .difference(Speaker(task["reference"], job.replicas).say())
            )
        )
        job.add(f"{task['name']} speaks as loaded", not difference, difference or "to the last bit")


def freed(job: Job, task: dict[str, Any]) -> None:
    """After `close` the trainer holds what it held before there was a sender."""
    model = make_model(job, task)
    before = job.memory()
    sender = make_sender(model, task)
    sender.send()
    sender.send()
    during = job.memory()
    sender.close()
    del sender
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    after = job.memory()
    files = [path.name for path in Path("/dev/shm").glob(f"fsdp_ipc-{os.getpid()}-*")]
    key = "allocated" if job.device.type == "cuda" else "resident"
    good = not files and (job.device.type != "cuda" or after[key] <= before[key] + FLAT_BYTES)
    text = f"{key} before {before[key]}, in use {during[key]}, after close {after[key]}; files left {files}"
    job.add(f"{task['name']} staging freed after close", good, text)


class _Tampering:
    """Passes everything on, but spoils the handles of one update: the worker's import then fails."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.spoil = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_weights(self, update_info: Any) -> None:
        if self.spoil:
            self.spoil = False
            update_info = (
                json.loads(json.dumps(update_info)) if "session" in update_info else dict(update_info)
            )
            if update_info.get("allocations"):
                for handles in update_info["allocations"].values():
                    for handle in handles:
                        for key, value in handle.items():
                            if isinstance(value, str) and key not in ("kind", "device"):
                                handle[key] = value[::-1]
            else:
                handles = update_info["ipc_handles"]
                spoiled = [
                    {f"not-{uuid}": args for uuid, args in entry.items()}
                    for entry in ([handles] if isinstance(handles, dict) else handles)
                ]
                update_info["ipc_handles"] = spoiled[0] if isinstance(handles, dict) else spoiled
        self._client.update_weights(update_info)


def refused(job: Job, name: str, sender: WeightSender) -> None:
    """A push that must fail, and soon."""
    began = time.monotonic()
    try:
        sender.send()
        job.add(name, False, "the push went through")
    except WeightSyncError as error:
        seconds = time.monotonic() - began
        job.add(name, seconds < 30, f"after {seconds:.2f} s: {str(error)[:300]}")


def broken_consumer(job: Job, task: dict[str, Any]) -> None:
    """A worker that cannot import the memory: an error at once on every rank, nothing leaks, the next push works."""
    model = make_model(job, task)
    probe = WorkerProbe(task["url"], job.replicas)
    client = _Tampering(HTTPWeightSyncClient(task["url"], request_timeout_s=60))
    before = job.memory()
    with make_sender(model, task, client) as sender:
        client.spoil = True
        refused(job, f"{task['name']} refused", sender)
        on_rank0(probe.scramble)
        sender.send()
        expected = expectation(model, task, job.device)
        verdict = on_rank0(lambda: probe.verify(expected))
        job.add(f"{task['name']} next push", verdict.good, verdict.text())
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.ipc_collect()
        after = job.memory()
        grown = after["allocated"] - before["allocated"]
        job.add(f"{task['name']} memory given back", grown <= FLAT_BYTES, f"{grown} bytes more than before")


def asleep(job: Job, task: dict[str, Any]) -> None:
    """A push into a sleeping server is refused and leaves it alive; after waking the weights it works."""
    model = make_model(job, task)
    probe = WorkerProbe(task["url"], job.replicas)
    # Only the client that sends knows what it has woken: the server tells no more than that something sleeps.
    client = HTTPWeightSyncClient(task["url"], request_timeout_s=60)
    with make_sender(model, task, client) as sender:
        sender.send()
        on_rank0(client.sleep)
        try:
            sender.send()
            job.add(f"{task['name']} asleep refused", False, "a push into a sleeping server went through")
        except WeightSyncError as error:
            text = str(error)
            job.add(f"{task['name']} asleep refused", "wake" in text or "asleep" in text, text[:300])
        on_rank0(client.health)
        on_rank0(lambda: client.wake_up("weights"))
        fill(model, 5, 0.05)
        sender.send()
        expected = expectation(model, task, job.device)
        verdict = on_rank0(lambda: probe.verify(expected))
        job.add(f"{task['name']} push with the cache still asleep", verdict.good, verdict.text())
        on_rank0(lambda: client.wake_up("kv_cache"))
        on_rank0(Speaker(task["url"], job.replicas).say)
        job.add(f"{task['name']} speaks after waking", True)


def sleep_rounds(job: Job, task: dict[str, Any]) -> None:
    """The colocated loop: sleep, a real optimizer step, wake weights, push, wake the cache, generate; memory flat."""
    model = make_model(job, task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe, speaker = WorkerProbe(task["url"], job.replicas), Speaker(task["url"], job.replicas)
    client = HTTPWeightSyncClient(task["url"], request_timeout_s=120)
    figures: list[list[dict[str, Any]]] = []
    heard: list[Said] = []
    with make_sender(model, task, client) as sender:
        for number in range(task.get("rounds", 5)):
            on_rank0(lambda n=number: client.sleep(task.get("level", 1 + n % 2)))  # type: ignore[misc]
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            on_rank0(lambda: client.wake_up("weights"))
            sender.send()
            expected = expectation(model, task, job.device)
            verdict = on_rank0(lambda e=expected: probe.verify(e))  # type: ignore[misc]
            on_rank0(lambda: client.wake_up("kv_cache"))
            heard.append(on_rank0(speaker.say))
            figures.append([job.memory(), *on_rank0(probe.memory)])
            job.add(f"{task['name']} round {number + 1}", verdict.good, verdict.text())
    key = "device_used" if job.device.type == "cuda" else "resident"
    grown = [late[key] - early[key] for early, late in zip(figures[1], figures[-1], strict=True)]
    job.add(
        f"{task['name']} memory flat",
        all(g <= 32 << 20 for g in grown),
        f"growth of {key} since round 2: {grown}",
    )
    job.add(f"{task['name']} words change", len(set(heard)) == len(heard))


def subgroup(job: Job, task: dict[str, Any]) -> None:
    """Trainer ranks are some of the job's ranks; the last rank has no GPU, is no member, and is left alone."""
    members = dist.get_world_size() - 1
    if dist.get_rank() == members:
        # It takes part in no collective at all: it would hang the others if one of theirs included it.
        deadline = time.monotonic() + task.get("outsider_s", 60)
        while not Path(task["flag"]).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return
    group = dist.new_group(list(range(members)), use_local_synchronization=True)
    mesh = DeviceMesh.from_group(group, job.device.type, mesh_dim_names=("dp_shard",))
    model = make_model(job, task, mesh)
    probe = WorkerProbe(task["url"], job.replicas)

    def on_first(function: Callable[[], Any]) -> Any:
        box = [function() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0, group=control, device=torch.device("cpu"))
        return box[0]

    control = dist.new_group(list(range(members)), backend="gloo", use_local_synchronization=True)
    try:
        on_first(probe.scramble)
        with make_sender(model, task, group=mesh, sender_rank=members - 1) as sender:
            sender.send()
            stats = sender.send()
        expected = expectation(model, task, job.device)
        verdict = on_first(lambda: probe.verify(expected))
        job.add(
            f"{task['name']} of {members} ranks",
            verdict.good,
            f"{verdict.text()}, {stats.seconds * 1e3:.0f} ms",
        )
    finally:
        if dist.get_rank() == 0:
            Path(task["flag"]).touch()


def die_in_sync(job: Job, task: dict[str, Any]) -> None:
    """One rank is killed in the middle of a push; what the others see goes into a file each.

    `moment`: `"load"` is before its last bucket is complete, `"announced"` while workers read what all ranks have.
    """
    model = make_model(job, task)
    with make_sender(model, task) as sender:
        sender.send()
        stage = sender._stage
        last = min(2, stage.plan.num_buckets)
        load, produce = stage.gatherer.load, ControlBlock.produce
        dying = dist.get_rank() == task["victim"]
        calls = 0

        def dying_load(bucket: int, tensors: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == last and dying:
                os.kill(os.getpid(), signal.SIGKILL)
            load(bucket, tensors)

        def dying_produce(self: ControlBlock, sync: int, count: int) -> None:
            produce(self, sync, count)
            if dying:
                os.kill(os.getpid(), signal.SIGKILL)

        if task["moment"] == "load":
            stage.gatherer.load = dying_load  # type: ignore[method-assign]
        else:
            ControlBlock.produce = dying_produce  # type: ignore[method-assign]
        began = time.monotonic()
        try:
            sender.send()
            outcome = "returned as if nothing had happened"
        except WeightSyncError as error:
            outcome = f"WeightSyncError: {error}"
        seconds = time.monotonic() - began
    report = {"rank": dist.get_rank(), "seconds": seconds, "outcome": outcome[:600]}
    Path(f"{task['reports']}.{dist.get_rank()}").write_text(json.dumps(report))
    # The process group has lost a member: nothing can be torn down in order.
    sys.stdout.flush()
    os._exit(0)


TASKS: dict[str, Callable[[Job, dict[str, Any]], None]] = {
    function.__name__: function
    for function in (
        push_equals_load,
        push_exact,
        quantised,
        freed,
        broken_consumer,
        asleep,
        sleep_rounds,
        subgroup,
        die_in_sync,
    )
}


def main(argv: list[str]) -> int:
    """Run the tasks of the file that `argv` names."""
    from tests.gpu.faults import FAULT_TASKS  # which builds on this module

    tasks = TASKS | FAULT_TASKS
    spec = json.loads(Path(argv[0]).read_text())
    rank = int(os.environ.get("RANK", "0"))
    clock = Clock(spec.get("budget_s", 300))
    results = Results(Path(spec["results"]), clock) if rank == 0 else None
    outsider = spec.get("outsider", False) and rank == int(os.environ["WORLD_SIZE"]) - 1
    device = own_device("cpu" if outsider else spec["device"])
    backend = None
    if spec.get("outsider") and spec["device"] == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    with joined(device, spec.get("timeout_s", 120), backend):
        job = Job(device, results, spec["replicas"])
        for task in spec["tasks"]:
            try:
                tasks[task["kind"]](job, task)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:1500]
                if results is not None:
                    results.add(task["name"], False, text)
                else:
                    sys.stderr.write(f"rank {rank}: {task['name']}: {text}\n")
                if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
                    break
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results.exit_code() if results is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
