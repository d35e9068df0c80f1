"""The multi-rank runner itself: results, tracebacks, hangs, deaths, leftovers."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runner import RankFailure, run_ranks


def _sum(rank: int, world_size: int, offset: int) -> tuple[int, torch.Tensor, str]:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return rank, value, os.environ["SOME_NAME"]


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("boom on one")
    dist.barrier()


def _hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def _die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)


def _warn(rank: int, world_size: int) -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


def _litter(rank: int, world_size: int) -> None:
    Path(f"/dev/shm/fsdp_ipc-{os.getpid()}-{'0' * 32}").touch()


def test_results_come_back_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "set later than the fork server")
    results: list[Any] = run_ranks(_sum, 2, 5)
    assert [r[0] for r in results] == [0, 1]
    assert all(r[1].item() == 11 and r[2] == "set later than the fork server" for r in results)


def test_a_raise_on_one_rank_is_told_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match="ValueError: boom on one") as caught:
        run_ranks(_raise_on_one, 2)
    assert "_raise_on_one" in caught.value.failures[1]


def test_a_hang_is_told_with_its_stack() -> None:
    with pytest.raises(RankFailure, match="in _hang") as caught:
        run_ranks(_hang, 2, timeout_s=6)
    assert set(caught.value.failures) == {0}


def test_a_death_is_told() -> None:
    with pytest.raises(RankFailure, match="exit code 3"):
        run_ranks(_die, 2)


def test_warnings_are_errors_on_ranks_too() -> None:
    with pytest.raises(RankFailure, match="UserWarning: careless"):
        run_ranks(_warn, 1)


def test_files_left_in_shared_memory_are_told() -> None:
    with pytest.raises(RankFailure, match="left shared memory behind"):
        run_ranks(_litter, 1)
