"""A trainer without vLLM, Ray and transformers: torch and the HTTP client are enough for the whole send."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker

ROOT = Path(__file__).parent.parent


def push_from(python: str, tmp_path: Path) -> None:
    """Two ranks of that Python push twice; what two workers of this process then hold must be what they sent."""
    workers = [NativeWorker(index) for index in range(2)]
    out = tmp_path / "expected.pt"
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        ranks = [
            subprocess.Popen(
                [
                    python,
                    "-m",
                    "tests.torch_only_job",
                    server.url,
                    str(rank),
                    "2",
                    str(tmp_path / "store"),
                    str(out),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
        assert server.violations == []
    assert said[0].splitlines()[-1].startswith("fsdp_ipc ")
    assert said[0].splitlines()[-1].endswith("[]"), "nothing of vLLM, Ray or transformers was imported"
    expected = torch.load(out, weights_only=True)
    for worker in workers:
        assert worker.weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(worker.weights[name], expected[name])] == []


def test_the_whole_send_works_with_torch_and_urllib3_alone(tmp_path: Path) -> None:
    push_from(sys.executable, tmp_path)


def test_all_other_packages_are_hidden_from_that_trainer() -> None:
    code = (
        "import importlib.metadata, sys\n"
        "from tests.torch_only_job import hide_all_others\n"
        "hidden = hide_all_others()\n"
        "for name in ('vllm', 'ray', 'transformers', 'hydra', 'pytest'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    raise SystemExit(name + ' is importable')\n"
        "import torch, urllib3, fsdp_ipc\n"
        "print(len(hidden))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 5
