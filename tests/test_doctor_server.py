"""What the doctor says of a server: each check made to fail, one at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fsdp_ipc import doctor_server
from fsdp_ipc.__main__ import main
from fsdp_ipc.doctor_server import ServerProcess, examine_server
from tests.fake_server import FakeServer

HERE, THERE = "GPU-here", "GPU-there"


def findings(server: FakeServer | str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Texts by level."""
    url = server if isinstance(server, str) else server.url
    told: dict[str, str] = {"ok": "", "warn": "", "fail": ""}
    for finding in examine_server(url, environ or {}):
        told[finding.level] += finding.text + "\n"
    return told


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the server's process an environment."""

    def give(**environ: str) -> None:
        monkeypatch.setattr(ServerProcess, "environ", lambda self: environ)

    give()
    return give


def test_a_good_server_of_this_process(started_with: Any) -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        told = findings(server)
    assert (told["warn"], told["fail"]) == ("", "")
    for words in (
        "vLLM 0.32.0, workers: 1",
        "dialect of vLLM 0.32 to ",
        "publishes a weight version",
        "weight-transfer back end fsdp_ipc",
        "a request may take 300 s",
        "its weights are awake",
        "the same PID namespace",
        "the same IPC namespace",
    ):
        assert words in told["ok"], words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"backend": "nccl"}, "weight-transfer back end nccl"),
        ({"backend": None}, '"backend":"fsdp_ipc"'),
        ({"version": "0.19.0", "backend": "ipc"}, "too old"),
        ({"version": "0.99.0", "backend": "ipc"}, "0.99.0"),
    ],
)
def test_the_wrong_server(settings: dict[str, Any], words: str, started_with: Any) -> None:
    started_with(VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    version = settings.pop("version", "0.32.0")
    with FakeServer(**{"backend": "fsdp_ipc", **settings}) as server:
        server.version = version
        assert words in findings(server)["fail"]


def test_a_release_that_only_the_stock_wire_must_know(started_with: Any) -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        server.version = "0.99.0"
        told = findings(server)
    assert "0.99.0" in told["warn"]
    assert told["fail"] == ""


def test_a_sleeping_server(started_with: Any) -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        server.asleep = {"weights", "kv_cache"}
        assert "its weights sleep" in findings(server)["fail"]


def test_a_url_that_is_not_the_base(started_with: Any) -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        assert "not the server's base URL" in findings(f"{server.url}/v1")["fail"]


@pytest.mark.parametrize(
    ("backend", "environ", "level", "words"),
    [
        ("ipc", {}, "fail", "VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
        ("fsdp_ipc", {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, "warn", "does not need: take it out"),
        ("fsdp_ipc", {"VLLM_PLUGINS": "other"}, "fail", "keeps the plugin out of its workers"),
        ("fsdp_ipc", {"FSDP_IPC_TOKEN": "secret"}, "fail", "the same FSDP_IPC_TOKEN"),
        (
            "fsdp_ipc",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "fail",
            "expandable segments and sleep mode",
        ),
    ],
)
def test_the_environment_that_it_was_started_with(
    backend: str, environ: dict[str, str], level: str, words: str, started_with: Any
) -> None:
    started_with(**environ)
    with FakeServer(backend=backend) as server:
        assert words in findings(server)[level]
        assert "secret" not in str(findings(server))
        good = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if backend == "ipc" else {}
        started_with(**good)
        assert words not in findings(server)[level]


def test_the_token_of_both_sides(started_with: Any) -> None:
    started_with(FSDP_IPC_TOKEN="a")
    with FakeServer(backend="fsdp_ipc") as server:
        assert findings(server, {"FSDP_IPC_TOKEN": "a"})["fail"] == ""
        assert "FSDP_IPC_TOKEN" in findings(server, {"FSDP_IPC_TOKEN": "b"})["fail"]


def test_a_server_that_is_slow(monkeypatch: pytest.MonkeyPatch, started_with: Any) -> None:
    monkeypatch.setattr(doctor_server, "_SLOW_S", -1.0)
    with FakeServer(backend="fsdp_ipc") as server:
        assert "answered in" in findings(server)["warn"]


@pytest.mark.parametrize("kind", ["pid", "ipc"])
def test_field_A17_another_namespace(kind: str, monkeypatch: pytest.MonkeyPatch, started_with: Any) -> None:
    """https://github.com/vllm-project/vllm/pull/55906: CUDA IPC fails between PID namespaces."""
    real = doctor_server.namespace
    monkeypatch.setattr(
        doctor_server, "namespace", lambda k, pid=None: 1 if k == kind and pid is not None else real(k, pid)
    )
    with FakeServer(backend="fsdp_ipc") as server:
        told = findings(server)
    assert f"another {kind.upper()} namespace" in told["fail"]
    assert f"--{kind}=host" in told["fail"]


def test_a_process_that_is_not_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_server, "_listener", lambda port: None)
    with FakeServer(backend="fsdp_ipc") as server:
        told = findings(server)
    assert "its process is not to be seen" in told["warn"]
    assert "its environment is not to be seen" in told["ok"]


def test_a_server_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_server, "_is_here", lambda host: False)
    with FakeServer(backend="fsdp_ipc") as server:
        assert "is not an address of this host" in findings(server)["fail"]


def test_addresses_of_this_host() -> None:
    assert doctor_server._is_here("127.0.0.1")
    assert doctor_server._is_here("localhost")
    assert not doctor_server._is_here("192.0.2.7")  # set aside for documentation


def test_field_A13_gpus_that_trainer_and_server_do_not_share(
    monkeypatch: pytest.MonkeyPatch, started_with: Any
) -> None:
    """https://github.com/vllm-project/vime/pull/144: the server took local indices for absolute ones."""
    monkeypatch.setattr(doctor_server, "_own_gpus", lambda: [HERE])
    monkeypatch.setattr(doctor_server, "_gpus_of", lambda environ: [THERE])
    started_with(CUDA_VISIBLE_DEVICES="1")
    ours = {"CUDA_VISIBLE_DEVICES": "4"}
    with FakeServer(backend="fsdp_ipc") as server:
        told = findings(server, ours)["fail"]
        assert "CUDA_VISIBLE_DEVICES: 4 here, 1 there" in told
        assert HERE in told
        assert THERE in told
        monkeypatch.setattr(doctor_server, "_gpus_of", lambda environ: [HERE, THERE])
        assert "sees other GPUs" in findings(server, ours)["warn"]
        monkeypatch.setattr(doctor_server, "_gpus_of", lambda environ: [HERE])
        assert "sees the same 1 GPU(s)" in findings(server, ours)["ok"]


_SERVE = """
import signal, sys
from tests.fake_server import FakeServer
with FakeServer(backend="fsdp_ipc") as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def test_the_environment_of_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stands in for /proc here."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        env={**os.environ, "VLLM_PLUGINS": "other", "FSDP_IPC_TOKEN": "secret"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert ServerProcess(url).pid == process.pid
        told = findings(url)
        assert "VLLM_PLUGINS='other' keeps the plugin out" in told["fail"]
        assert "FSDP_IPC_TOKEN" in told["fail"]
        assert "the same PID namespace" in told["ok"]
        assert main(["doctor", "--url", url]) == 1
        assert "VLLM_PLUGINS" in capsys.readouterr().out
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
