"""The doctor's look at a server: what it answers, and, where it runs on this host under this user, its process.

The process tells what no route does: its GPUs, its environment, and whether it shares the namespaces that memory is
exported through.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from fsdp_ipc.clients import HTTPWeightSyncClient, ServerRequestError
from fsdp_ipc.clients.base import ServerInfo
from fsdp_ipc.cuda_ipc import expandable_segments_requested
from fsdp_ipc.finding import Finding
from fsdp_ipc.handles import device_key
from fsdp_ipc.wire.base import Timeouts
from fsdp_ipc.wire.stock import dialect_for

__all__ = ["ServerProcess", "examine_server"]

_SLOW_S = 2.0
_CONFIG = '--weight-transfer-config \'{"backend":"fsdp_ipc"}\''
_UUIDS = """
import torch
from fsdp_ipc.handles import device_key
for i in range(torch.cuda.device_count()):
    print(device_key(torch.device("cuda", i), i))
"""


class ServerProcess:
    """The process that listens at a URL of this host, as far as /proc shows it to this user.

    Args:
        url: Base URL of the server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.is_here = _is_here(parts.hostname or "")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.pid = _listener(port) if self.is_here else None

    def environ(self) -> dict[str, str] | None:
        """Its environment when it was started; None where it is not to be seen."""
        if self.pid is None:
            return None
        try:
            data = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return None
        pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
        return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}

    def namespace(self, kind: str) -> int | None:
        """Inode of one of its namespaces; None where it is not to be seen."""
        return namespace(kind, self.pid) if self.pid is not None else None


def namespace(kind: str, pid: int | None = None) -> int | None:
    """Inode of a namespace (`"pid"`, `"ipc"`) of a process, this one without a pid; None where /proc does not say."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{'self' if pid is None else pid}/ns/{kind}").stat().st_ino
    return None


def examine_server(url: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything about one server.

    Args:
        url: Its base URL.
        environ: The trainer's environment.
    """
    client = HTTPWeightSyncClient(url, request_timeout_s=30.0, connect_timeout_s=5.0)
    began = time.monotonic()
    try:
        client.health()
        seconds = time.monotonic() - began
        info = client.server_info()
    except ServerRequestError as error:
        yield Finding("fail", str(error))
        return
    yield Finding("ok", f"{url}: vLLM {info.version}, workers: {info.world_size}")
    yield from _dialect(url, info)
    yield _back_end(url, info)
    yield from _waits(url, seconds)
    process = ServerProcess(url)
    theirs = process.environ()
    yield from _environment(
        url, info, theirs if theirs is not None else _told_environment(client, url), environ
    )
    if info.dev_mode:
        yield _sleep(url, client)
    yield from _process(url, process, theirs, environ)


def _dialect(url: str, info: ServerInfo) -> Iterator[Finding]:
    try:
        dialect = dialect_for(info.version)
    except ValueError as error:
        level = "warn" if info.backend == "fsdp_ipc" else "fail"
        yield Finding(level, f"{url}: {error}")
        return
    first, last = (".".join(map(str, release)) for release in (dialect.first, dialect.last))
    publishes = "publishes a weight version" if dialect.weight_version else "publishes no weight version"
    yield Finding("ok", f"{url}: dialect of vLLM {first} to {last}; {publishes}")


def _back_end(url: str, info: ServerInfo) -> Finding:
    if not info.dev_mode:
        return Finding(
            "fail", f"{url}: no weight-transfer routes; start the server with VLLM_SERVER_DEV_MODE=1"
        )
    if info.backend in ("fsdp_ipc", "ipc"):
        return Finding("ok", f"{url}: weight-transfer back end {info.backend}")
    if info.backend_known:
        return Finding(
            "fail", f"{url}: weight-transfer back end {info.backend}; start the server with {_CONFIG}"
        )
    return Finding("warn", f"{url}: the server does not tell its weight-transfer back end")


def _waits(url: str, seconds: float) -> Iterator[Finding]:
    limits = Timeouts()
    text = (
        f"{url}: answered in {seconds * 1e3:.0f} ms; a request may take {limits.request_s:g} s, a worker "
        f"{limits.transfer_s:g} s, another rank {limits.control_s:g} s (WeightSender(timeouts=...))"
    )
    yield Finding("ok" if seconds < _SLOW_S else "warn", text)


def _sleep(url: str, client: HTTPWeightSyncClient) -> Finding:
    try:
        asleep = client.weights_asleep()
    except ServerRequestError as error:
        return Finding("ok", f"{url}: no sleep mode ({error.status})")
    if asleep:
        return Finding(
            "fail",
            f"{url}: its weights sleep, and an update would kill its engine: wake_up(tags=['weights']) before a send",
        )
    with contextlib.suppress(ServerRequestError):
        if client.is_paused():
            return Finding(
                "warn",
                f"{url}: its weights are awake, but it is paused and answers no requests, perhaps since a sync that failed: "
                "resume() of the client, POST /resume",
            )
    return Finding("ok", f"{url}: its weights are awake")


def _told_environment(client: HTTPWeightSyncClient, url: str) -> dict[str, str] | None:
    """The variables of vLLM's own that the server tells in development mode."""
    with contextlib.suppress(ServerRequestError):
        answer = client.request(url, "GET", "/server_info", params={"config_format": "json"})
        told = answer.get("vllm_env") if isinstance(answer, dict) else None
        if isinstance(told, dict):
            return {str(name): _as_set(value) for name, value in told.items() if value is not None}
    return None


def _as_set(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _environment(
    url: str, info: ServerInfo, theirs: Mapping[str, str] | None, ours: Mapping[str, str]
) -> Iterator[Finding]:
    if theirs is None:
        yield Finding("ok", f"{url}: its environment is not to be seen from here")
        return
    insecure = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    if info.backend == "ipc" and theirs.get(insecure) != "1":
        yield Finding(
            "fail", f"{url}: the stock back end pickles its handles: start the server with {insecure}=1"
        )
    if info.backend == "fsdp_ipc" and theirs.get(insecure) == "1":
        yield Finding("warn", f"{url}: runs with {insecure}=1, which the plugin does not need: take it out")
    plugins = theirs.get("VLLM_PLUGINS")
    if info.backend == "fsdp_ipc" and plugins is not None and "fsdp_ipc" not in plugins:
        yield Finding("fail", f"{url}: VLLM_PLUGINS={plugins!r} keeps the plugin out of its workers")
    if info.sleep_mode and expandable_segments_requested(theirs):
        yield Finding(
            "fail",
            f"{url}: expandable segments and sleep mode do not go together: start the server without "
            "expandable_segments in PYTORCH_CUDA_ALLOC_CONF / PYTORCH_ALLOC_CONF",
        )
    token = theirs.get("FSDP_IPC_TOKEN")
    if info.backend == "fsdp_ipc" and token and token != ours.get("FSDP_IPC_TOKEN"):
        yield Finding(
            "fail", f"{url}: wants a token: give the trainer the same FSDP_IPC_TOKEN as the server has"
        )


def _process(
    url: str, process: ServerProcess, theirs: Mapping[str, str] | None, ours: Mapping[str, str]
) -> Iterator[Finding]:
    if not process.is_here:
        yield Finding(
            "fail", f"{url}: is not an address of this host; trainer and server must share GPUs or /dev/shm"
        )
        return
    if process.pid is None:
        yield Finding(
            "warn",
            f"{url}: its process is not to be seen: it belongs to another user, which is refused, or is in another PID "
            "namespace, where CUDA IPC may fail (containers: --pid=host --ipc=host for both)",
        )
        return
    for kind, option in (("pid", "--pid=host"), ("ipc", "--ipc=host")):
        here, there = namespace(kind), process.namespace(kind)
        if None in (here, there):
            continue
        if here == there:
            yield Finding("ok", f"{url}: the same {kind.upper()} namespace")
        else:
            yield Finding(
                "fail",
                f"{url}: another {kind.upper()} namespace than this process has, where exported memory cannot be opened: "
                f"start both containers with {option}, or in one",
            )
    yield from _gpus(url, theirs or {}, ours)


def _gpus(url: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[Finding]:
    """Whether trainer and server see the same GPUs, by UUID."""
    here = _own_gpus()
    if not here:
        return
    try:
        there = _gpus_of(theirs)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("warn", f"{url}: which GPUs it sees cannot be told: {error}")
        return
    name = "CUDA_VISIBLE_DEVICES"
    values = f"{name}: {ours.get(name, 'unset')} here, {theirs.get(name, 'unset')} there"
    shared = [gpu for gpu in here if gpu in there]
    if not shared:
        yield Finding(
            "fail",
            f"{url}: sees none of the GPUs that this process sees ({values}). Here: {here}; there: {there}. A worker reads "
            "from the trainer rank on its own GPU",
        )
    elif set(here) != set(there):
        yield Finding(
            "warn",
            f"{url}: sees other GPUs ({values}). Here: {here}; there: {there}. A worker on a GPU without a trainer rank "
            "fails",
        )
    else:
        yield Finding("ok", f"{url}: sees the same {len(shared)} GPU(s) ({values})")


def _own_gpus() -> list[str]:
    return [device_key(torch.device("cuda", i), i) for i in range(torch.cuda.device_count())]


def _gpus_of(environ: Mapping[str, str]) -> list[str]:
    """UUIDs that a process with this environment sees, asked of the driver."""
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    chosen = {name: environ[name] for name in names if name in environ}
    done = subprocess.run(
        [sys.executable, "-c", _UUIDS],
        env={**kept, **chosen},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


def _is_here(host: str) -> bool:
    """Whether a host name is this host: an address that a socket can be bound to."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address[0], 0))
                return True
    return False


def _listener(port: int) -> int | None:
    """The process that listens at a port, by the descriptors that this user may look at."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return int(entry.name)
    return None


def _listening(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
