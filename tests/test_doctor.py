"""What `python -m fsdp_ipc doctor` finds, and that a broken check hides no other."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fsdp_ipc import doctor
from fsdp_ipc.__main__ import main
from fsdp_ipc.doctor import Finding, examine


def _texts(findings: list[Finding], level: str) -> str:
    return "\n".join(finding.text for finding in findings if finding.level == level)


def test_this_machine_is_well() -> None:
    findings = examine(environ={})
    assert _texts(findings, "fail") == ""
    assert "another process reads what this one exports" in _texts(findings, "ok")
    assert "expandable segments are off" in _texts(findings, "ok")


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
    findings = examine(environ={"VLLM_PLUGINS": "other", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
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
