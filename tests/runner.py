"""Run a function on several gloo ranks, each in its own process: the base of every multi-rank test.

The ranks fork from one server process that has torch loaded already, so two ranks start in about a second
and none of them inherits the test process's threads or CUDA state. The process group meets in a file.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 30.0
_GRACE_AFTER_FAILURE_S = 5.0
_PRELOAD = [
    "torch",
    "torch._dynamo",  # which `fully_shard` imports when it is first called: most of a second in every rank of every test
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
    "fsdp_ipc",
    "tests.runner",
    "tests.toy",
    "tests.native_worker",
]
_SHM_DIR = Path("/dev/shm")


class RankFailure(AssertionError):  # noqa: N818
    """At least one rank raised, died or hung; the message holds every rank's traceback.

    Attributes:
        failures: Traceback or description by rank; ranks that finished are absent.
    """

    def __init__(self, failures: dict[int, str], world_size: int) -> None:
        self.failures = failures
        parts = [f"{len(failures)} of {world_size} ranks failed"]
        parts += [f"----- rank {rank} -----\n{text.rstrip()}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join(parts))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank and return what each returned, in rank order.

    Every rank has an initialised default process group. No rank leaves before all have returned, so a
    quick rank cannot break a slow one's connections.

    Args:
        fn: A function at the top of an importable module (it travels by name).
        world_size: Number of ranks.
        *args: Further arguments; they and the results travel by plain pickle, tensors as copies.
        timeout_s: Seconds for the whole run; after that every hanging rank's stack goes into the failure.
        backend: Back end of the default group, for example `"cpu:gloo,cuda:nccl"`; with nccl each rank
            first takes the CUDA device of its own number.
        env: Variables set on every rank before torch is used, on top of the caller's own.

    Returns:
        The ranks' return values.

    Raises:
        RankFailure: A rank raised, died, hung, or left files of ours in `/dev/shm`.
    """
    context = _context()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        child_env = {**os.environ, **(env or {})}
        payload = pickle.dumps((fn, args))
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, payload, folder, backend, child_env, _filters(), theirs),
                name=f"rank{rank}",
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        try:
            _collect(processes, pipes, folder, timeout_s, results, failures)
        finally:
            for pipe in pipes:
                pipe.close()  # the ranks wait for this before they tear down
            # Whoever has returned may take its time to tear down; the others are not waited for.
            grace, soon = (time.monotonic() + seconds for seconds in (_GRACE_AFTER_FAILURE_S, 0.5))
            killed = {
                rank
                for rank, process in enumerate(processes)
                if not _stop(process, grace if rank in results else soon)
            }
        for rank, process in enumerate(processes):
            left = sorted(path.name for path in _SHM_DIR.glob(f"fsdp_ipc-{process.pid}-*"))
            for name in left:
                (_SHM_DIR / name).unlink(missing_ok=True)
            if rank in failures:
                continue
            if rank in killed:
                failures[rank] = "did not exit after it had returned: something keeps the process alive"
            elif process.exitcode:
                failures[rank] = f"returned, then exited with code {process.exitcode} (its stderr says more)"
            elif left:
                failures[rank] = f"left shared memory behind: {left}"
    if failures:
        raise RankFailure(failures, world_size)
    return [results[rank] for rank in range(world_size)]


def _context() -> mp.context.ForkServerContext:
    # The fork server keeps the environment of its start, so the thread limit has to be there before.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _filters() -> list[Any]:
    """The warning filters in force here (pytest's own), for the ranks to obey the same ones."""
    kept = []
    for entry in warnings.filters:
        try:
            pickle.dumps(entry)
        except Exception:  # a category defined inside a function cannot travel
            continue
        kept.append(entry)
    return kept


def _collect(
    processes: list[Any],
    pipes: list[Any],
    folder: str,
    timeout_s: float,
    results: dict[int, Any],
    failures: dict[int, str],
) -> None:
    open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout_s
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        ready: list[Any] = mp.connection.wait(list(open_pipes), timeout=left)
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                good, value = False, _died(rank, processes[rank], folder)
            except Exception:
                good, value = False, f"its result cannot be read here:\n{traceback.format_exc()}"
            if good:
                results[rank] = value
            else:
                failures[rank] = value
                pipe.close()  # it exits now, and peers that wait for it fail by themselves, as in a real job
                deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
    for rank in open_pipes.values():
        failures[rank] = f"still running when time was up; stacks:\n{_stacks(processes[rank], folder, rank)}"


def _died(rank: int, process: Any, folder: str) -> str:
    code = process.exitcode
    cause = (
        f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    )
    crash = Path(folder, f"stack{rank}")
    return f"process died without a word ({cause})\n{crash.read_text() if crash.exists() else ''}"


def _stacks(process: Any, folder: str, rank: int) -> str:
    path = Path(folder, f"stack{rank}")
    if process.pid is None or not path.exists():
        return "(it never started)"
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    return path.read_text()


def _stop(process: Any, deadline: float) -> bool:
    """Wait until the deadline, then kill. False if it had to be killed."""
    process.join(max(0.1, deadline - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
        return False
    return True


def _rank_main(
    rank: int,
    world_size: int,
    payload: bytes,
    folder: str,
    backend: str,
    env: dict[str, str],
    filters: list[Any],
    pipe: Any,
) -> None:
    stack_file = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115 - open to the process's end, for a crash to be written to
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    os.environ.clear()
    os.environ.update(env)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        fn, args = pickle.loads(payload)
        warnings.filters[:] = filters  # type: ignore[index]  # a list at run time
        warnings._filters_mutated()  # type: ignore[attr-defined]  # else cached verdicts stay
        message = pickle.dumps((True, fn(rank, world_size, *args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    warnings.simplefilter("default")
    try:
        pipe.send_bytes(message)
        pipe.poll(None)  # until the parent has heard from every rank
    except (BrokenPipeError, EOFError, ConnectionResetError):
        pass
    _leave()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # multiprocessing ends a child by os._exit; an ordinary trainer's exit handlers must run here too.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
