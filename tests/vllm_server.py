"""A real vLLM OpenAI server on the CPU, for tests: started, waited for, and stopped with all of its children.

Starting takes one to two minutes on two cores, so fixtures should share a server. It is started by module because the
console script of the CPU wheel looks for the metadata of another distribution.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

_MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Base URL on the loopback interface.
        process: The front end; its children are the engines.
        log: Everything that the server wrote.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, route: str, body: Any = None, *, timeout_s: float = 120.0) -> requests.Response:
        """POST JSON; the caller looks at the status."""
        return requests.post(f"{self.url}{route}", json=body, timeout=timeout_s)

    def get(self, route: str, *, timeout_s: float = 30.0) -> requests.Response:
        """GET; the caller looks at the status."""
        return requests.get(f"{self.url}{route}", timeout=timeout_s)

    def log_tail(self, lines: int = 60) -> str:
        """The end of the log, for a failure's message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def vllm_server(
    model: Path,
    *,
    log: Path,
    weight_transfer_config: Mapping[str, Any] | None = None,
    load_format: str = "dummy",
    dtype: str = "bfloat16",
    runner: str | None = None,
    data_parallel_size: int = 1,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = 400.0,
) -> Iterator[Server]:
    """Run a server for the length of a `with` block.

    Args:
        model: Folder with the config and, for `load_format="auto"`, the weights.
        log: File for the server's output.
        weight_transfer_config: vLLM's option of that name, for example `{"backend": "fsdp_ipc"}`.
        load_format: `dummy` (random weights) or `auto`.
        dtype: The dtype that the server runs in.
        runner: `pooling` for an embedding model.
        data_parallel_size: Replicas behind the one front end.
        extra_args: More command-line arguments.
        env: Additions to the environment.
        start_timeout_s: How long the health check may take to succeed.

    Raises:
        RuntimeError: The server ended or did not answer in time; the text has the end of its log.
    """
    port = _free_port()
    command = [sys.executable, "-m", _MODULE, "--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", load_format, "--dtype", dtype]
    command += [
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
        "--enforce-eager",
        "--no-enable-log-requests",
    ]
    if weight_transfer_config is not None:
        command += ["--weight-transfer-config", json.dumps(dict(weight_transfer_config))]
    if runner is not None:
        command += ["--runner", runner]
    if data_parallel_size > 1:
        command += ["--data-parallel-size", str(data_parallel_size)]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread a worker and no pinning: replicas would otherwise fight for the same first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **(env or {}),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *extra_args],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        _wait_healthy(server, start_timeout_s)
        yield server
    finally:
        _stop(process)


def _wait_healthy(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if server.process.poll() is not None:
            raise RuntimeError(
                f"vLLM ended with {server.process.returncode}; its log ends:\n{server.log_tail()}"
            )
        try:
            if server.get("/health", timeout_s=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"vLLM did not answer within {timeout_s} s; its log ends:\n{server.log_tail()}"
            )
        time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the front end to end, then kill what is left of it and of the processes that it started."""
    family = _descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(8)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
    for pid, started in family.items():
        # A pid may have been given to another process meanwhile; the start time tells.
        if _started(pid) == started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> dict[int, str]:
    """Start time by pid of all processes below `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    queue = [root]
    while queue:
        parent = queue.pop()
        for pid, its_parent in parents.items():
            if its_parent == parent and pid not in found and (started := _started(pid)) is not None:
                found[pid] = started
                queue.append(pid)
    return found


def _started(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if fields is not None else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name, which may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
