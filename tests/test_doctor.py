"""What `python -m fsdp_ipc doctor` finds, and that a broken check hides no other."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from fsdp_ipc import doctor
from fsdp_ipc.__main__ import main
from fsdp_ipc.doctor import examine
from fsdp_ipc.finding import Finding


def _texts(findings: list[Finding], level: str) -> str:
    return "\n".join(finding.text for finding in findings if finding.level == level)


def test_this_machine_is_well() -> None:
    findings = examine(environ={})
    assert _texts(findings, "fail") == ""
    assert "another process reads what this one exports" in _texts(findings, "ok")
    for check in (
        "expandable segments are off",
        "namespaces: PID",
        "gloo is there",
        "no GPU is visible",
        "fsdp_ipc 0.",
    ):
        assert check in _texts(findings, "ok") or torch.cuda.device_count()


def test_the_command_says_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("nothing wrong in")


def test_a_server_that_nobody_runs_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 1
    shown = capsys.readouterr().out
    assert "fail  GET /health at http://127.0.0.1:9" in shown
    assert "1 of " in shown.splitlines()[-1]


def test_an_environment_in_the_way_is_told() -> None:
    pytest.importorskip("vllm", reason="needs vLLM: install the extra 'vllm' or 'cpu'")
    findings = list(doctor._vllm({"VLLM_PLUGINS": "other", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}))
    assert "keeps the plugin out" in _texts(findings, "fail")
    assert "only the stock back end needs it" in _texts(findings, "warn")


def test_field_A10_expandable_segments_are_told() -> None:
    """https://github.com/pytorch/pytorch/issues/165685: they cannot be exported everywhere."""
    findings = examine(environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert "expandable segments are on" in _texts(findings, "warn")


def test_field_A18_a_data_plane_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/RL-Align/RL-Kernel/pull/60: on some machines no handle can be opened at all."""
    monkeypatch.setattr(doctor, "_READER", "raise RuntimeError('invalid resource handle')")
    assert "cannot read what this one exports" in _texts(examine(environ={}), "fail")
    monkeypatch.setattr(doctor, "_READER", "print('other bytes')")
    assert "it read other bytes" in _texts(examine(environ={}), "fail")


def test_a_check_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise OSError("no such directory")
        yield

    monkeypatch.setattr(doctor, "_shared_memory", broken)
    findings = examine(environ={})
    assert _texts(findings, "fail") == "OSError: no such directory"
    assert "another process reads" in _texts(findings, "ok")


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_ipc", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == importlib.metadata.version("fsdp-ipc")


def test_wsl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_kernel_version", lambda: "Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert "this is WSL" in _texts(list(doctor._platform()), "warn")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [f.level for f in doctor._platform() if "WSL" in f.text] == ["fail"]


def test_a_torch_without_collectives_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "has no gloo" in _texts(list(doctor._process_groups()), "fail")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "has no NCCL" in _texts(list(doctor._process_groups()), "fail")


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert "2.11 or newer is needed" in _texts(list(doctor._torch()), "fail")


def test_a_rank_beyond_its_gpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(doctor, "device_key", lambda device, index: f"uuid-{index}")
    findings = list(doctor._devices({"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "3"}))
    assert "GPU 0: H200, uuid-0" in _texts(findings, "ok")
    assert "LOCAL_RANK=3, but 1 GPU(s) are visible" in _texts(findings, "fail")
    assert _texts(list(doctor._devices({"LOCAL_RANK": "0"})), "fail") == ""


def test_little_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shm, "free_bytes", lambda: 64 << 20)
    assert "--shm-size=4g" in _texts(list(doctor._shared_memory()), "warn")


def test_a_vllm_that_is_too_old_is_told() -> None:
    assert doctor._installed("vllm", "0.19.0").level == "warn"
    assert "too old" in doctor._installed("vllm", "0.19.0").text
    assert doctor._installed("vllm", "0.26.0").level == "ok"


def test_a_missing_plugin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "vLLM does not find the plugin" in _texts(list(doctor._vllm({})), "fail")
