"""Shared memory, handles on the wire, and the CUDA plane as far as a machine without a GPU can tell."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from fsdp_ipc import cuda_ipc, handles, shm
from fsdp_ipc.cuda_ipc import CudaMemory
from fsdp_ipc.handles import (
    IpcHandle,
    ShmMemory,
    allocate,
    device_key,
    export,
    normalize_device_key,
    open_handle,
    stock_rebuild_args,
    sweep_stale,
)
from tests.peer import Peer

CPU = torch.device("cpu")
SHM = Path("/dev/shm")

pytestmark = pytest.mark.usefixtures("clean_shm")


def cuda_handle(**changes):
    memory = CudaMemory(
        memory_handle=b"\x02c" + bytes(range(64)),
        storage_bytes=4096,
        storage_offset=512,
        ref_counter=b"/torch_123_4567_0",
        ref_counter_offset=7,
        event=bytes(64),
    )
    fields: dict[str, Any] = {
        "device": "c0ffee00-1111-2222-3333-444455556666",
        "nbytes": 1000,
        "offset": 24,
        "memory": memory,
    }
    return IpcHandle(**(fields | changes))


def shm_handle(**changes):
    memory = ShmMemory(file=f"fsdp_ipc-1-{'0a' * 16}", file_bytes=4096)
    fields: dict[str, Any] = {"device": "cpu:host:0", "nbytes": 4096, "offset": 0, "memory": memory}
    return IpcHandle(**(fields | changes))


def files_of(pid):
    return sorted(SHM.glob(f"fsdp_ipc-{pid}-*"))


# The wire


@pytest.mark.parametrize("handle", [cuda_handle(), shm_handle()], ids=["cuda", "shm"])
def test_a_handle_comes_back_from_json_as_it_was(handle):
    text = json.dumps(handle.to_json())
    assert IpcHandle.from_json(json.loads(text)) == handle
    assert json.loads(text)["kind"] == handle.kind


@pytest.mark.parametrize("handle", [cuda_handle(), shm_handle()], ids=["cuda", "shm"])
def test_every_field_is_needed_and_no_other_is_taken(handle):
    whole = handle.to_json()
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(ValueError, match=f"'{name}' is missing"):
            IpcHandle.from_json(rest)
    with pytest.raises(ValueError, match="unknown handle fields: pickle"):
        IpcHandle.from_json(whole | {"pickle": "gASVCg=="})


@pytest.mark.parametrize("handle", [cuda_handle(), shm_handle()], ids=["cuda", "shm"])
@pytest.mark.parametrize("junk", [None, [], {}, -1, 1.5, "\x00", "../../etc/passwd", "A" * 5000, 1 << 70])
def test_every_field_refuses_junk_by_name(handle, junk):
    for name in handle.to_json():
        if name == "device" and isinstance(junk, str) and junk.isprintable() and len(junk) < 255:
            continue  # a device key is only ever compared
        with pytest.raises(ValueError, match=f"'{name}'"):
            IpcHandle.from_json(handle.to_json() | {name: junk})


@pytest.mark.parametrize("obj", [None, [], "x", 3, [["kind", "shm"]]])
def test_what_is_no_object_is_refused(obj):
    with pytest.raises(ValueError, match="JSON object"):
        IpcHandle.from_json(obj)


def b64(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("handle", "name", "value"),
    [
        (shm_handle(), "kind", "cuda"),  # the fields of the other kind are then missing
        (shm_handle(), "file", f"/dev/shm/fsdp_ipc-1-{'0a' * 16}"),
        (shm_handle(), "file", f"fsdp_ipc-1-{'0a' * 16}\n"),
        (shm_handle(), "file", f"fsdp_ipc-1-{'0a' * 16}.ctl"),
        (shm_handle(), "file", f"fsdp_ipc-1-{'0A' * 16}"),
        (shm_handle(), "file", "torch_1_2_3"),
        (shm_handle(), "nbytes", 4097),
        (shm_handle(), "nbytes", 0),
        (shm_handle(), "nbytes", True),
        (shm_handle(), "offset", 1),  # then nbytes reaches past the end
        (shm_handle(), "offset", 4096),
        (shm_handle(), "device", "cpu:host:0 "),
        (cuda_handle(), "nbytes", 4073),
        (cuda_handle(), "offset", 3097),
        (cuda_handle(), "storage_bytes", 1023),
        (cuda_handle(), "memory_handle", b64(bytes(64))),
        (cuda_handle(), "memory_handle", b64(b"\x02x" + bytes(64))),
        (cuda_handle(), "memory_handle", b64(b"\x02c" + bytes(63))),
        (cuda_handle(), "ref_counter", b64(b"/torch_1_2_0/../../x")),
        (cuda_handle(), "ref_counter", b64(b"/somebody_elses_file")),
        (cuda_handle(), "ref_counter", b64(b"/torch_1_2_0\n")),
        (cuda_handle(), "ref_counter_offset", 10_000),
        (cuda_handle(), "event", b64(bytes(63))),
        (cuda_handle(), "event", "not base64!"),
        (cuda_handle(), "event_sync", 0),
    ],
)
def test_a_value_out_of_range_is_refused(handle, name, value):
    with pytest.raises(ValueError, match="handle field"):
        IpcHandle.from_json(handle.to_json() | {name: value})


def test_a_handle_to_expandable_segments_says_what_to_turn_off():
    fields = cuda_handle().to_json() | {"memory_handle": b64(b"\x02e" + bytes(40))}
    with pytest.raises(ValueError, match="expandable segments; turn them off"):
        IpcHandle.from_json(fields)


# Shared memory


def test_the_file_is_private_and_its_memory_zero_and_shared():
    buffer = allocate(5000, CPU, key="cpu:host:3")
    (path,) = files_of(os.getpid())
    status = path.stat()
    assert re.fullmatch(rf"fsdp_ipc-{os.getpid()}-[0-9a-f]{{32}}", path.name)
    assert (status.st_mode & 0o777, status.st_size, status.st_uid) == (0o600, 5000, os.geteuid())
    assert buffer.bytes.dtype == torch.uint8
    assert buffer.bytes.shape == (5000,)
    assert not buffer.bytes.any()
    assert buffer.handle.device == "cpu:host:3"

    opened = open_handle(buffer.handle, CPU)
    buffer.bytes[4999] = 7
    assert opened.bytes[4999] == 7
    opened.close()
    buffer.close()


def test_mode_does_not_follow_the_umask():
    before = os.umask(0)
    try:
        buffer = allocate(10, CPU, key="k")
    finally:
        os.umask(before)
    (path,) = files_of(os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    buffer.close()


def test_close_unlinks_once_and_for_all():
    buffer = allocate(10, CPU, key="k")
    opened = open_handle(buffer.handle, CPU)
    seen = opened.bytes
    buffer.bytes[0] = 9
    buffer.close()
    buffer.close()
    assert files_of(os.getpid()) == []
    assert seen[0] == 9, "what is mapped stays mapped"
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.bytes
    with pytest.raises(FileNotFoundError, match="do not share /dev/shm"):
        open_handle(buffer.handle, CPU)
    opened.close()
    opened.close()
    with pytest.raises(ValueError, match="closed"):
        _ = opened.bytes
    assert buffer.closed
    assert opened.closed


def test_a_dropped_buffer_leaves_no_file():
    allocate(10, CPU, key="k")
    assert files_of(os.getpid()) == []


def test_a_part_of_the_file_can_be_named():
    buffer = allocate(100, CPU, key="k")
    buffer.bytes.copy_(torch.arange(100))
    part = IpcHandle(device="k", nbytes=10, offset=40, memory=buffer.handle.memory)
    assert open_handle(part, CPU).bytes.tolist() == list(range(40, 50))
    buffer.close()


@pytest.mark.parametrize("nbytes", [0, -5])
def test_nothing_cannot_be_allocated(nbytes):
    with pytest.raises(ValueError, match="at least 1 byte"):
        allocate(nbytes, CPU, key="k")


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="CUDA device or the CPU, got meta"):
        allocate(10, torch.device("meta"), key="k")
    with pytest.raises(ValueError, match="CUDA device or the CPU, got meta"):
        device_key(torch.device("meta"), 0)


def test_full_shared_memory_is_a_memory_error_that_says_how_full(monkeypatch):
    monkeypatch.setattr(shm, "free_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="1000 bytes free, 5000 are wanted"):
        allocate(5000, CPU, key="k")


def test_memory_that_fills_up_meanwhile_is_a_memory_error_and_leaves_no_file(monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match="are wanted"):
        allocate(5000, CPU, key="k")
    assert files_of(os.getpid()) == []


@pytest.fixture
def fake_file():
    """Make files under names of ours; they go at the end."""
    made = []

    def make(nbytes=64, mode=0o600, pid=None):
        path = SHM / f"fsdp_ipc-{pid or os.getpid()}-{secrets.token_hex(16)}"
        path.write_bytes(bytes(nbytes))
        path.chmod(mode)
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def handle_to(path, nbytes=64):
    return shm_handle(nbytes=nbytes, memory=ShmMemory(file=path.name, file_bytes=nbytes))


def test_a_proper_file_opens(fake_file):
    assert open_handle(handle_to(fake_file()), CPU).bytes.numel() == 64


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_open_to_others_is_refused(fake_file, mode):
    with pytest.raises(PermissionError, match="expected 0600"):
        open_handle(handle_to(fake_file(mode=mode)), CPU)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(fake_file):
    path = fake_file()
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to uid 12345"):
        open_handle(handle_to(path), CPU)


@pytest.mark.parametrize("nbytes", [63, 65])
def test_a_file_of_another_size_is_refused_and_not_grown(fake_file, nbytes):
    path = fake_file()
    with pytest.raises(ValueError, match=f"has 64 bytes; expected {nbytes}"):
        open_handle(handle_to(path, nbytes), CPU)
    assert path.stat().st_size == 64


def test_a_symbolic_link_is_refused(fake_file):
    target, link = fake_file(), fake_file()
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(ValueError, match="symbolic link"):
        open_handle(handle_to(link), CPU)


def test_a_fifo_is_refused_without_waiting_for_a_writer(fake_file):
    path = fake_file()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match="not a regular file"):
        open_handle(handle_to(path), CPU)


def test_a_name_that_leaves_the_directory_is_refused_before_it_is_used():
    handle = shm_handle(memory=ShmMemory(file="../../etc/passwd", file_bytes=64), nbytes=64)
    with pytest.raises(ValueError, match="not of the form"):
        open_handle(handle, CPU)


def test_a_handle_of_the_other_plane_is_refused():
    with pytest.raises(ValueError, match="CUDA memory of c0ffee00"):
        open_handle(cuda_handle(), CPU)
    with pytest.raises(ValueError, match="CPU shared memory"):
        open_handle(shm_handle(), torch.device("cuda", 0))


# Two processes


def peer_open(state, fields):
    state["opened"] = open_handle(IpcHandle.from_json(fields), CPU)
    return state["opened"].bytes.tolist()


def peer_read(state):
    return state["opened"].bytes.tolist()


def peer_fill(state, value):
    state["opened"].bytes.fill_(value)


def peer_allocate(state, *, keep=True):
    buffer = allocate(100, CPU, key="k")
    if keep:
        state["buffer"] = buffer
    return buffer.handle.to_json()


def test_two_processes_see_the_same_bytes():
    buffer = allocate(64, CPU, key="k")
    buffer.bytes.copy_(torch.arange(64))
    with Peer() as peer:
        assert peer.call(peer_open, buffer.handle.to_json()) == list(range(64))
        buffer.bytes.fill_(255)
        assert peer.call(peer_read) == [255] * 64
        peer.call(peer_fill, 3)
        assert buffer.bytes.tolist() == [3] * 64
        buffer.close()
        assert peer.call(peer_read) == [3] * 64, "the consumer's mapping outlives the file"


def test_files_go_at_exit_and_a_killed_process_is_swept():
    with Peer() as leaver, Peer() as victim:
        leaver.call(peer_allocate)
        handle = IpcHandle.from_json(victim.call(peer_allocate))
        assert len(files_of(leaver.pid)) == len(files_of(victim.pid)) == 1

        sweep_stale()
        assert len(files_of(victim.pid)) == 1, "its maker lives"

        leaver.close()
        assert files_of(leaver.pid) == []

        opened = open_handle(handle, CPU)  # an open reader does not keep a dead trainer's file
        victim.kill()
        victim.close()
        assert len(files_of(victim.pid)) == 1
        assert sweep_stale() >= 1
        assert files_of(victim.pid) == []
        opened.close()


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_locked_file_is_not_swept_though_its_pid_is_not_visible(fake_file):
    """A maker in another PID namespace: no such process here, but its lock holds."""
    path = fake_file(pid=dead_pid())
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    sweep_stale()
    assert path.exists()
    os.close(fd)
    sweep_stale()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_swept(fake_file):
    path = fake_file(pid=dead_pid())
    os.chown(path, 12345, -1)
    sweep_stale()
    assert path.exists()


def test_other_names_are_not_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    pid = dead_pid()
    kept = [
        tmp_path / name for name in ("torch_1_2_3", f"fsdp_ipc-{pid}-short", f"x-fsdp_ipc-{pid}-{'0' * 32}")
    ]
    for path in [*kept, tmp_path / f"fsdp_ipc-{pid}-{'0' * 32}", tmp_path / f"fsdp_ipc-{pid}-{'0' * 32}.ctl"]:
        path.write_bytes(b"x")
    assert sweep_stale() == 2
    assert sorted(tmp_path.iterdir()) == sorted(kept)


FORKS = """
import os, sys, torch
from fsdp_ipc.handles import allocate
buffer = allocate(10, torch.device("cpu"), key="k")
path = "/dev/shm/" + buffer.handle.memory.file
if os.fork() == 0:
    buffer.close()
    sys.exit(0)
os.wait()
assert os.path.exists(path), "the child unlinked its parent's file"
"""

FORKSERVER = """
import glob, multiprocessing as mp, torch
from fsdp_ipc.handles import allocate
KEPT = []
def child():
    KEPT.append(allocate(10, torch.device("cpu"), key="k"))
if __name__ == "__main__":
    for method in ("fork", "forkserver"):
        process = mp.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        left = glob.glob(f"/dev/shm/fsdp_ipc-{process.pid}-*")
        assert not left, (method, left)
"""


@pytest.mark.parametrize("program", [FORKS, FORKSERVER], ids=["parents_file", "childs_file"])
def test_forked_processes_unlink_their_own_files_and_no_others(program, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# Device keys


def test_field_A19_the_uuid_comes_from_the_device_properties(monkeypatch):
    """https://github.com/MoonshotAI/checkpoint-engine/pull/21: the list of nvidia-smi breaks under remapping."""

    def no_program(*args, **kwargs):
        raise AssertionError("a program was started")

    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(uuid="c0ffee00-1111-2222-3333-444455556666")

    monkeypatch.setattr(subprocess, "Popen", no_program)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert device_key(torch.device("cuda", 2), 9) == "c0ffee00-1111-2222-3333-444455556666"
    assert device_key(torch.device("cuda"), 9) == "c0ffee00-1111-2222-3333-444455556666"
    assert asked == [2, 5], "the local index of the device, never the rank"


def test_cpu_keys_name_host_and_rank():
    assert device_key(CPU, 3) == f"cpu:{os.uname().nodename}:3"


@pytest.mark.parametrize(
    "spelling",
    [
        "c0ffee00-1111",
        "GPU-c0ffee00-1111",
        "gpu-C0FFEE00-1111",
        "MIG-c0ffee00-1111",
        " MIG-GPU-c0ffee00-1111\n",
    ],
)
def test_field_A15_every_spelling_of_a_gpu_is_the_same_key(spelling):
    """https://github.com/sgl-project/sglang/pull/32685."""
    assert normalize_device_key(spelling) == "c0ffee00-1111"


def test_cpu_keys_keep_their_case():
    assert normalize_device_key("cpu:Host-GPU-1:0") == "cpu:Host-GPU-1:0"


# The CUDA plane without CUDA


def test_field_E13_torch_takes_the_fifteen_rebuild_arguments_that_we_know():
    """https://github.com/vllm-project/vime/issues/58: the payload is the bare tuple, index 6 the device."""
    assert cuda_ipc.signature_matches()
    assert len(cuda_ipc.REBUILD_PARAMETERS) == 15
    assert cuda_ipc.DEVICE_INDEX == 6


SHARED = (
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


class FakeCudaStorage:
    _untyped_storage = SimpleNamespace(device=torch.device("cuda", 0))

    def _share_cuda_(self):
        return SHARED


class FakeCudaTensor:
    requires_grad = False
    is_nested = False
    layout = torch.strided
    dtype = "dtype"
    _backward_hooks = None

    def _typed_storage(self):
        return FakeCudaStorage()

    def size(self):
        return "tensor_size"

    def stride(self):
        return "tensor_stride"

    def storage_offset(self):
        return "tensor_offset"


def test_reduce_tensor_gives_the_values_in_that_order(monkeypatch):
    """Torch's own code runs; only the call into the CUDA driver is replaced."""
    monkeypatch.setattr(reductions, "StorageWeakRef", lambda storage: None)
    monkeypatch.setattr(reductions, "shared_cache", {})
    rebuild, args = reductions.reduce_tensor(FakeCudaTensor())
    assert rebuild is reductions.rebuild_cuda_tensor
    named = dict(zip(cuda_ipc.REBUILD_PARAMETERS, args, strict=True))
    by_name = {name: value for name, value in named.items() if isinstance(value, str)}
    assert all(name == value for name, value in by_name.items())
    assert set(by_name) >= {*SHARED, "tensor_size", "tensor_stride", "tensor_offset", "dtype"}
    assert (named["tensor_cls"], named["storage_cls"]) == (FakeCudaTensor, FakeCudaStorage)


def test_the_export_carries_what_torch_gave_and_counts_the_consumer_out(monkeypatch):
    values = {
        "storage_handle": b"\x02c" + bytes(64),
        "storage_size_bytes": 4096,
        "storage_offset_bytes": 512,
        "ref_counter_handle": b"/torch_1_2_0",
        "ref_counter_offset": 3,
        "event_handle": bytes(64),
        "event_sync_required": True,
    }
    released = []
    args = tuple(values.get(name) for name in cuda_ipc.REBUILD_PARAMETERS)
    monkeypatch.setattr(cuda_ipc, "rebuild_args", lambda tensor: args)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *a: released.append(a))
    memory, offset = cuda_ipc.share(torch.zeros(8)[3:])
    assert offset == 12
    assert memory.memory_handle == values["storage_handle"]
    assert (memory.storage_bytes, memory.storage_offset) == (4096, 512)
    assert (memory.ref_counter, memory.ref_counter_offset) == (b"/torch_1_2_0", 3)
    assert memory.event == bytes(64)
    assert memory.event_sync is False, "the event of the first share says nothing about later writes"
    assert released == [(b"/torch_1_2_0", 3)]


@pytest.fixture
def fake_cuda(monkeypatch):
    """Stand in for the driver: `_new_shared_cuda` notes its arguments and returns CPU memory."""
    calls = []

    def new_shared(*args):
        calls.append(args)
        return torch.arange(4096, dtype=torch.int64).to(torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=cuda_handle().device)
    )
    return calls


def test_the_open_passes_what_torchs_own_rebuild_passes(fake_cuda):
    handle = cuda_handle()
    memory = handle.memory
    cuda_ipc.open_storage(memory, torch.device("cuda", 3))
    named = {
        "tensor_cls": torch.Tensor,
        "tensor_size": (4,),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.UntypedStorage,
        "dtype": torch.uint8,
        "storage_device": 3,
        "storage_handle": memory.memory_handle,
        "storage_size_bytes": memory.storage_bytes,
        "storage_offset_bytes": memory.storage_offset,
        "requires_grad": False,
        "ref_counter_handle": memory.ref_counter,
        "ref_counter_offset": memory.ref_counter_offset,
        "event_handle": memory.event,
        "event_sync_required": memory.event_sync,
    }
    torch_cuda_init = torch.cuda._lazy_init
    torch.cuda._lazy_init = lambda: None
    try:
        reductions.rebuild_cuda_tensor(*(named[name] for name in cuda_ipc.REBUILD_PARAMETERS))
    finally:
        torch.cuda._lazy_init = torch_cuda_init
    ours, torchs = fake_cuda
    assert ours == torchs


def test_field_A14_the_device_index_is_the_receivers(fake_cuda):
    """https://github.com/pytorch/pytorch/issues/149196: each process may see its own GPU as 0."""
    opened = open_handle(cuda_handle(), torch.device("cuda", 3))
    assert fake_cuda[0][0] == 3
    assert not any(isinstance(field, int) and field == 3 for field in cuda_handle().to_json().values())
    assert opened.bytes.tolist() == [value % 256 for value in range(24, 1024)], "the tensor's part, no more"
    opened.close()


def test_field_A3_each_open_maps_anew_and_is_released_once(fake_cuda):
    """https://github.com/vllm-project/vllm/issues/51258: torch's cache of opened storages breaks the pairing."""
    first = open_handle(cuda_handle(), torch.device("cuda", 0))
    second = open_handle(cuda_handle(), torch.device("cuda", 0))
    assert len(fake_cuda) == 2
    assert first.bytes.data_ptr() != second.bytes.data_ptr()


def test_field_A15_a_handle_of_another_gpu_is_refused(fake_cuda):
    """https://github.com/sgl-project/sglang/pull/32685: never open a peer's memory, however it is spelled."""
    with pytest.raises(ValueError, match="for GPU deadbeef, this worker runs on GPU c0ffee00"):
        open_handle(cuda_handle(device="deadbeef"), torch.device("cuda", 0))
    assert fake_cuda == []
    open_handle(cuda_handle(device=f"GPU-{cuda_handle().device.upper()}"), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("CUDA error: invalid device context", "--pid=host"),
        ("CUDA error: invalid resource handle\nCompile with TORCH_USE_CUDA_DSA", "WSL2"),
        ("CUDA error: invalid argument", "CUDA_VISIBLE_DEVICES"),
        ("pidfd_getfd: Operation not permitted", "expandable_segments"),
        ("CUDA error: peer access is not supported between these two devices", "share its GPU"),
        ("cudaMallocAsync does not yet support shareIpcHandle", "backend:cudaMallocAsync"),
    ],
)
def test_field_A17_cuda_errors_come_with_advice(fake_cuda, monkeypatch, text, advice):
    """https://github.com/vllm-project/vllm/pull/55906 and others: the driver's words alone help nobody."""

    def refuse(*args):
        raise RuntimeError(text)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    with pytest.raises(RuntimeError) as caught:
        open_handle(cuda_handle(), torch.device("cuda", 0))
    assert text.splitlines()[0] in str(caught.value)
    assert advice in str(caught.value)
    assert "DSA" not in str(caught.value)


def test_an_unknown_cuda_error_passes_as_it_is(fake_cuda, monkeypatch):
    def refuse(*args):
        raise RuntimeError("CUDA error: the coffee machine is empty")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    with pytest.raises(RuntimeError, match=r"^CUDA error: the coffee machine is empty$"):
        open_handle(cuda_handle(), torch.device("cuda", 0))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "exporting", [lambda t: export(t, key="k"), stock_rebuild_args], ids=["own", "stock"]
)
def test_what_cannot_be_exported_is_refused(exporting):
    with pytest.raises(TypeError, match="expected a CUDA tensor, got one on cpu"):
        exporting(torch.zeros(4))
    with pytest.raises(TypeError, match="cannot export a Subclass"):
        exporting(torch.zeros(4).as_subclass(Subclass))


def test_a_dtensor_is_refused():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        tensor = DTensor.from_local(torch.zeros(4), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        with pytest.raises(TypeError, match="DTensor: to_local"):
            export(tensor, key="k")
    finally:
        dist.destroy_process_group()


# Expandable segments

ON = [
    "expandable_segments:True",
    " expandable_segments : True ",
    "max_split_size_mb:64,expandable_segments:True",
]
OFF = ["", "expandable_segments:False", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2]"]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "on"), [*((value, True) for value in ON), *((value, False) for value in OFF)]
)
def test_field_A10_the_setting_is_found_in_the_environment(variable, value, on):
    """https://github.com/pytorch/pytorch/issues/165685."""
    assert cuda_ipc.expandable_segments_requested({variable: value}) is on


ALLOCATOR_PROGRAM = """
import logging, torch
logging.basicConfig(format="LOG %(name)s %(message)s")
from fsdp_ipc.cuda_ipc import expandable_segments_off
settings = torch._C._accelerator_getAllocatorSettings
print(settings())
with expandable_segments_off():
    print(settings())
print(settings())
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", " expandable_segments : True "),
        ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2],expandable_segments:False"),
    ],
)
def test_field_A10_it_is_off_for_the_allocation_alone_and_said_so(variable, value):
    """Torch's own parser, in a process that was started with the variable."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTORCH_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALLOCATOR_PROGRAM],
        env=env | {variable: value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, inside, after = done.stdout.split("\n")[:3]
    assert before == after == value
    assert inside == value.replace("True", "False")
    assert ("LOG fsdp_ipc.cuda_ipc expandable_segments:True is set" in done.stderr) is ("True" in value)


def test_expandable_segments_that_the_settings_do_not_show_are_turned_off_by_force(monkeypatch):
    """A later call may have replaced the settings string; then only the exported handle tells."""
    history = ["max_split_size_mb:64"]
    made: list[str] = []

    def share(tensor):
        made.append(history[-1])
        if len(made) == 1:
            raise ValueError("the tensor lies in expandable segments")
        return "memory", 0

    monkeypatch.setattr(cuda_ipc, "_allocator_settings", lambda: history[-1])
    monkeypatch.setattr(cuda_ipc, "_set_allocator_settings", history.append)
    monkeypatch.setattr(cuda_ipc, "share", share)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    tensor, *where = cuda_ipc.allocate(10, CPU)
    assert (tensor.numel(), where) == (10, ["memory", 0])
    assert history == [
        "max_split_size_mb:64",
        "max_split_size_mb:64,expandable_segments:False",
        "max_split_size_mb:64,expandable_segments:True",
    ]


def test_allocation_failure_restores_the_setting(monkeypatch):
    history = ["expandable_segments:True"]
    monkeypatch.setattr(cuda_ipc, "_allocator_settings", lambda: history[-1])
    monkeypatch.setattr(cuda_ipc, "_set_allocator_settings", history.append)
    with pytest.raises(MemoryError), cuda_ipc.expandable_segments_off():
        raise MemoryError
    assert history == ["expandable_segments:True", "expandable_segments:False", "expandable_segments:True"]


def test_importing_the_data_plane_touches_no_cuda():
    program = (
        "import sys, torch\n"
        "import fsdp_ipc.handles, fsdp_ipc.control, fsdp_ipc.staging\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'vllm' not in sys.modules and 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_all_names_that_are_promised_are_there():
    assert all(hasattr(handles, name) for name in handles.__all__)
