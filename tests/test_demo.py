"""The demo as a person starts it: torchrun, Hydra, a real server of two replicas, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torchrun import start_recipe


@pytest.mark.vllm
@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_server_recites_what_the_trainer_has_learned(tmp_path: Path) -> None:
    num_ranks = torch.cuda.device_count() or 2
    settings = ["train.steps=120", "hook.every=60", "data.max_tokens=40", f"hydra.run.dir={tmp_path}"]
    line = start_recipe("recipes.train", *settings, ranks=num_ranks)
    assert not line["before"].startswith("\n\nBeautiful")
    assert line["after"].startswith("\n\nBeautiful is better than ugly.")
    assert [push["version"] for push in line["pushes"]] == ["60", "120"]
    assert all(push["bytes"] == 2 * line["parameters"] for push in line["pushes"])
    assert _holders(tmp_path / "server.log") == []


def _holders(log: Path) -> list[str]:
    """Processes that still have the server's log open: the guard, the server, and its engines all write to it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [str(link.readlink()) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if str(log) in links:
            found.append(process.name)
    return found
