"""Jobs and recipes as a person starts them, from the root of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def launcher(ranks: int) -> list[str]:
    """The beginning of a command line under torchrun: `-m` and a module, or a script, comes next."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def torchrun(
    *arguments: str, ranks: int | None = 2, timeout_s: float = 300.0, env: dict[str, str] | None = None
) -> str:
    """Run a job and return what it printed; a failure shows all of it.

    Args:
        arguments: What comes behind the launcher.
        ranks: Number of ranks; None starts it without torchrun.
        timeout_s: Seconds that it may take.
        env: Additions to the environment.
    """
    done = subprocess.run(
        [*([sys.executable] if ranks is None else launcher(ranks)), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def start_recipe(
    module: str,
    *settings: str,
    ranks: int | None,
    timeout_s: float = 800.0,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run a recipe to its end; the line of JSON that it leaves. Arguments as of `torchrun`."""
    printed = torchrun("-m", module, *settings, ranks=ranks, timeout_s=timeout_s, env=env)
    line: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return line
