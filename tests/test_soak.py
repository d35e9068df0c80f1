"""A soak: syncs of drawn sizes with drawn delays and poison on either side; no byte is wrong, and nothing grows."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.runner import run_ranks
from tests.soak import RANKS, Server, push

MIB = 1 << 20


def soak(seed: int, for_s: float, at_most: int = 1 << 30, *, hasty: str = "") -> list[dict[str, Any]]:
    """What each rank saw."""
    server = Server(seed)
    try:
        return run_ranks(push, RANKS, server.url, seed, for_s, at_most, hasty, timeout_s=for_s + 120)
    finally:
        server.close()


def growth(told: list[dict[str, Any]], who: str) -> dict[str, int]:
    """How much more a process holds in the last third than in the second: peak against peak, warm-up left out."""
    seen = [one[who] for one in told if one[who]]
    third = len(seen) // 3
    return {
        key: max(one[key] for one in seen[2 * third :]) - max(one[key] for one in seen[third : 2 * third])
        for key in seen[0]
    }


def check(
    ranks: list[dict[str, Any]], *, limit_bytes: int, server_limit_bytes: int | None = None
) -> dict[str, Any]:
    """No wrong byte, nothing left, nothing grown; the figures."""
    grown = {f"rank {number}": growth(rank["told"], "rank") for number, rank in enumerate(ranks)}
    grown["server"] = growth(ranks[0]["told"], "server")
    first = ranks[0]
    summary = {
        "syncs": first["syncs"],
        "models": len(first["told"]),
        "seconds": round(first["seconds"]),
        "bytes": first["bytes"],
        "wrong": sum(rank["wrong"] for rank in ranks),
        "growth": grown,
    }
    assert summary["wrong"] == 0, summary
    for rank in ranks:
        assert rank["end"]["files"] == 0, summary
    for who, found in grown.items():
        assert found["descriptors"] <= 0 and found["threads"] <= 0 and found["files"] <= 0, summary
        limit = limit_bytes if who != "server" or server_limit_bytes is None else server_limit_bytes
        assert found["resident"] <= limit, summary
    return summary


def test_a_short_soak() -> None:
    ranks = soak(seed=1, for_s=100.0, at_most=150)
    assert len(ranks[0]["told"]) == 6 and ranks[0]["syncs"] == 150
    # The server is this process, in which hundreds of other tests have left their garbage; the long soak looks closer.
    check(ranks, limit_bytes=24 * MIB, server_limit_bytes=128 * MIB)


@pytest.mark.parametrize("how", ["gathered", "shared"])
def test_a_soak_can_fail(how: str) -> None:
    """A rank that announces buckets before they are filled is found out by what was left in the memory."""
    assert soak(seed=1, for_s=100.0, at_most=5, hasty=how)[0]["wrong"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [11])
def test_a_long_soak(seed: int) -> None:
    """Ten minutes; the figures of docs/reliability.md."""
    summary = check(soak(seed, for_s=600.0), limit_bytes=24 * MIB)
    sys.stdout.write(f"\n{json.dumps(summary)}\n")
