"""The server beside the trainer: devices, environment, command line, and that nothing survives the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipes.config import ServerConfig
from recipes.serve import (
    Server,
    ServerFailed,
    log_tail,
    server_argv,
    server_env,
    visible_devices,
    without_expandable_segments,
)


@pytest.mark.parametrize(
    ("requested", "parent", "expected"),
    [
        (None, None, None),
        (None, "4,5", "4,5"),
        (1, "4,5,6,7", "5"),
        ([1, 3], "4,5,6,7", "5,7"),
        ([[0], [1, [2]]], " 4, 5 ,6,7", "4,5,6"),
        ("0,2", "4,5,6,7", "4,6"),
        (1, None, "1"),
        (1, "GPU-aaa,GPU-bbb", "GPU-bbb"),
        ("GPU-bbb", "GPU-aaa,GPU-bbb", "GPU-bbb"),
        ("GPU-b", "GPU-aaa,GPU-bbb", "GPU-bbb"),
        (["GPU-bbb-long-form", 0], "GPU-aaa,GPU-bbb", "GPU-bbb,GPU-aaa"),
        ("GPU-ccc", "4,5", "GPU-ccc"),
        ("MIG-x", None, "MIG-x"),
    ],
)
def test_field_A13_devices_are_named_as_the_driver_knows_them(
    requested: Any, parent: str | None, expected: str | None
) -> None:
    """https://github.com/vllm-project/vime/pull/144: local indices handed on as absolute ones."""
    assert visible_devices(requested, parent) == expected


@pytest.mark.parametrize(
    ("requested", "parent", "message"),
    [
        (4, "4,5,6,7", "not among the 4"),
        (-1, "4,5", "not among"),
        ([0, "0"], "4,5", "twice"),
        ([], "4,5", "no device"),
        ("GPU-", "GPU-aaa,GPU-bbb", "matches 2"),
        ("GPU-c", "GPU-aaa,GPU-bbb", "matches 0"),
        (1.5, None, "expected an index"),
        (True, None, "expected an index"),
    ],
)
def test_a_device_that_cannot_be_meant_is_refused(requested: Any, parent: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        visible_devices(requested, parent)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("conf", "kept"),
    [
        ("expandable_segments:True", None),
        (" expandable_segments : True , max_split_size_mb:64", " max_split_size_mb:64"),
        (
            "max_split_size_mb:64,expandable_segments:True,garbage_collection_threshold:0.8",
            "max_split_size_mb:64,garbage_collection_threshold:0.8",
        ),
        (
            "roundup_power2_divisions:[64:8,256:4],expandable_segments:True",
            "roundup_power2_divisions:[64:8,256:4]",
        ),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_field_A12_the_server_gets_no_expandable_segments(name: str, conf: str, kept: str | None) -> None:
    """https://github.com/vllm-project/vllm/pull/14189: the trainer's allocator setting inherited by a server."""
    env = server_env({name: conf}, num_replicas=1, config=ServerConfig(), on_gpu=True, num_cpus=8)
    assert env.get(name) == kept
    assert without_expandable_segments(conf) == (kept or "")


def test_the_servers_environment() -> None:
    trainer = {
        "PATH": "/bin",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "VLLM_PLUGINS": "other",
    }
    gpu = server_env(trainer, num_replicas=2, config=ServerConfig(devices=[1, 2]), on_gpu=True, num_cpus=8)
    assert gpu["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert gpu["VLLM_PLUGINS"] == "other,fsdp_ipc"
    assert gpu["VLLM_SERVER_DEV_MODE"] == "1"
    assert gpu["PATH"] == "/bin"
    gone = {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}
    assert not (gone | {"VLLM_ALLOW_INSECURE_SERIALIZATION"}) & set(gpu)
    cpu = server_env(trainer, num_replicas=2, config=ServerConfig(), on_gpu=False, num_cpus=8)
    assert cpu["OMP_NUM_THREADS"] == "4"
    assert cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    stock = server_env(trainer, num_replicas=2, config=ServerConfig(backend="ipc"), on_gpu=True, num_cpus=8)
    assert stock["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert stock["VLLM_PLUGINS"] == "other"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_servers_command_line(on_gpu: bool) -> None:
    config = ServerConfig(extra_args=["--seed", "3"])
    argv = server_argv(Path("/m"), port=1234, num_replicas=2, config=config, on_gpu=on_gpu)
    options = dict(zip(argv[3::2], argv[4::2], strict=False))
    assert options["--host"] == "127.0.0.1"
    assert options["--data-parallel-size"] == "2"
    assert json.loads(options["--weight-transfer-config"]) == {"backend": "fsdp_ipc"}
    assert ("--gpu-memory-utilization" in argv) == on_gpu
    assert argv[-2:] == ["--seed", "3"]


def test_the_servers_command_line_with_everything_asked_for() -> None:
    config = ServerConfig(
        host="0.0.0.0", allow_remote=True, tensor_parallel_size=2, sleep_mode=True, enforce_eager=False, max_num_seqs=5
    )  # fmt: skip
    argv = server_argv(Path("/m"), port=1234, num_replicas=2, config=config, on_gpu=True)
    options = dict(pairwise(argv))
    assert options["--host"] == "0.0.0.0"
    assert options["--tensor-parallel-size"] == "2"
    assert options["--max-num-seqs"] == "5"
    assert "--enable-sleep-mode" in argv
    assert "--enforce-eager" not in argv
    on_cpu = server_argv(Path("/m"), port=1234, num_replicas=2, config=config, on_gpu=False)
    assert "--enable-sleep-mode" not in on_cpu, "a CPU server knows no sleep"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "some-host"])
def test_an_address_that_others_can_reach_needs_permission(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match=r"inference\.allow_remote=true"):
        Server(
            tmp_path,
            num_replicas=1,
            config=ServerConfig(host=host),
            log_path=tmp_path / "log",
            on_gpu=False,
        )
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("backend", ["fsdp_ipc", "ipc"])
def test_only_the_stock_back_end_ever_gets_insecure_serialization(backend: str) -> None:
    for value in ("1", "0", None):
        environ = {} if value is None else {"VLLM_ALLOW_INSECURE_SERIALIZATION": value}
        for on_gpu in (False, True):
            config = ServerConfig(backend=backend)
            env = server_env(environ, num_replicas=1, config=config, on_gpu=on_gpu, num_cpus=2)
            assert env.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == ("1" if backend == "ipc" else None)


# A stand-in for vLLM: it starts a child, says its pids, and obeys or ignores SIGTERM.
_FAKE = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"])
print("pids", os.getpid(), child.pid, flush=True)
if "die" in sys.argv:
    print("\\033[31mno such model\\033[0m", flush=True)
    sys.exit(7)
time.sleep(99)
"""


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(
        "recipes.serve.server_argv", lambda *_, **k: [sys.executable, "-c", _FAKE, *k["config"].extra_args]
    )
    return monkeypatch


def _start(folder: Path, *args: str) -> Server:
    config = ServerConfig(extra_args=list(args), start_timeout_s=20)
    return Server(folder, num_replicas=1, config=config, log_path=folder / "server.log", on_gpu=False)


def _pids(log: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for line in log_tail(log, 100):
            if line.startswith("pids"):
                return [int(pid) for pid in line.split()[1:]]
        time.sleep(0.05)
    raise AssertionError(f"the stand-in never spoke: {log_tail(log, 100)}")


def _gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("args", [(), ("stubborn",)])
def test_close_stops_the_server_and_its_children(
    fake_vllm: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...]
) -> None:
    fake_vllm.setenv("FSDP_IPC_STOP_GRACE_S", "1")
    server = _start(tmp_path, *args)
    pids = _pids(server.log_path)
    assert all(_alive(pid) for pid in pids)
    server.close()
    server.close()
    assert not any(_alive(pid) for pid in pids)


def test_a_server_that_dies_is_told_with_its_log(fake_vllm: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_vllm.setenv("FSDP_IPC_STOP_GRACE_S", "1")
    with _start(tmp_path, "die") as server:
        pids = _pids(server.log_path)
        with pytest.raises(ServerFailed, match=r"exit code 7(.|\n)*\| no such model"):
            server.wait_healthy()
        assert not any(_alive(pid) for pid in pids)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_server_goes_when_the_trainer_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    script = f"""
import signal, sys, time
# A run in the background may have been started with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
import recipes.serve
from recipes.config import ServerConfig
recipes.serve.server_argv = lambda *_, **k: [sys.executable, "-c", {_FAKE!r}]
folder = Path({str(tmp_path)!r})
server = recipes.serve.Server(folder, num_replicas=1, config=ServerConfig(), log_path=folder / "server.log", on_gpu=False)
time.sleep(99)
"""
    env = {**os.environ, "FSDP_IPC_STOP_GRACE_S": "1"}
    root = Path(__file__).parent.parent
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=root, env=env, stderr=subprocess.DEVNULL)
    try:
        pids = _pids(tmp_path / "server.log")
        trainer.send_signal(how)
        trainer.wait(10)
        assert _gone(pids, within_s=10)
    finally:
        trainer.kill()
        trainer.wait()
