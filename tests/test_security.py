"""What SECURITY.md says, as far as other tests do not show it: no pickle on our wire, no files but our own, secrets apart."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

import fsdp_ipc
from fsdp_ipc import shm
from fsdp_ipc.control import ControlBlock
from fsdp_ipc.handles import device_key
from fsdp_ipc.vllm_plugin.endpoint import claim_endpoint
from fsdp_ipc.vllm_plugin.payload import Endpoint

PACKAGE = Path(fsdp_ipc.__file__).parent
ON_OUR_WIRE = [
    *sorted((PACKAGE / "vllm_plugin").glob("*.py")),
    *(PACKAGE / name for name in ("control.py", "shm.py", "handles.py", "ipc_handle.py", "digest_file.py")),
    PACKAGE / "wire" / "native.py",
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("path", ON_OUR_WIRE, ids=lambda path: path.name)
def test_nothing_on_our_wire_can_run_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        (alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not imported & {"pickle", "cloudpickle", "marshal", "shelve", "dill", "yaml"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"eval", "exec", "torch.load", "compile", "__import__", "os.system"}


def _take(control: str) -> None:
    claim = claim_endpoint(_endpoint(control), CPU, 0)
    try:
        ControlBlock.open(claim.endpoint.control).close()
    finally:
        claim.close()


def _endpoint(control: str) -> list[Endpoint]:
    return [Endpoint(device=device_key(CPU, 0), control=control)]


def test_a_worker_locks_no_file_but_a_control_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name comes over the wire: other files of the user in /dev/shm are none of a payload's business."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    for name in ("somebodys", "torch_1_2", "fsdp_ipc-1-" + "0" * 32, "fsdp_ipc-1-" + "0" * 32 + ".ctl.bak"):
        (tmp_path / name).write_bytes(bytes(4096))
        with pytest.raises(ValueError, match="is not the name of a control block"):
            claim_endpoint(_endpoint(name), CPU, 0)


@pytest.mark.parametrize(
    "kind", ["link", "fifo", "open to others", "another size", "other words", "another user's"]
)
def test_a_worker_takes_no_control_block_that_is_not_what_it_should_be(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    real = ControlBlock.create()
    other = tmp_path / ("fsdp_ipc-1-" + "a" * 32 + ".ctl")
    content = (tmp_path / real.name).read_bytes()
    if kind == "link":
        other.symlink_to(tmp_path / real.name)
    elif kind == "fifo":
        os.mkfifo(other, 0o600)
    else:
        other.write_bytes(content[:-1] if kind == "another size" else content)
        other.chmod(0o644 if kind == "open to others" else 0o600)
    if kind == "other words":
        other.write_bytes(bytes(len(content)))
    if kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(other, 12345, 12345)
    with pytest.raises((ValueError, OSError)):
        _take(other.name)
    _take(real.name)
    real.close()


def test_names_cannot_be_guessed_and_files_are_private() -> None:
    blocks = [ControlBlock.create() for _ in range(4)]
    secrets = {block.name.split("-")[2] for block in blocks}
    assert len(secrets) == 4 and all(len(secret) == len("0" * 32 + ".ctl") for secret in secrets)
    assert {(shm.SHM_DIR / block.name).stat().st_mode & 0o777 for block in blocks} == {0o600}
    for block in blocks:
        block.close()
