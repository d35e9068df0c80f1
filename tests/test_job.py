"""The main job: torchrun, FSDP2 with uneven shards, fp32 masters with bf16 wire, and a real server of two replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served, served
from tests.tiny_models import qwen3_config, write_checkpoint
from tests.torchrun import torchrun
from tests.vllm_server import vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(900)]

# Odd sizes: the embedding, the head, gate and up are uneven over two ranks.
CONFIG = qwen3_config(vocab_size=193, intermediate_size=99)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("job")
    model = write_checkpoint(folder / "model", CONFIG)
    with vllm_server(
        model,
        log=folder / "server.log",
        weight_transfer_config={"backend": "fsdp_ipc"},
        data_parallel_size=2,
    ) as server:
        torchrun("-m", "tests.push_job", server.url, str(model), str(folder))
        assert server.get("/weight_info").json()["weight_version"] == "unpacked"
    return json.loads((folder / "found.json").read_text()), folder


def test_uneven_shards_were_pushed_in_at_least_four_buckets(found: tuple[dict[str, Any], Path]) -> None:
    results, _ = found
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"} <= set(results["uneven"])
    assert results["pushes"]["first"]["stats"]["num_buckets"] >= 4
    assert results["pushes"]["unpacked"]["stats"]["num_buckets"] == 1


@pytest.mark.parametrize("checkpoint", ["first", "trained"])
def test_both_replicas_serve_what_a_server_serves_that_loaded_the_checkpoint(
    found: tuple[dict[str, Any], Path], checkpoint: str
) -> None:
    results, folder = found
    with vllm_server(folder / checkpoint, log=folder / f"{checkpoint}.log", load_format="auto") as server:
        loaded = served(server, 0)
    pushes = ["first", "unpacked"] if checkpoint == "first" else ["trained"]
    for push in pushes:
        for replica in results["pushes"][push]["replicas"]:
            assert Served(**replica) == loaded, push
    other = "trained" if checkpoint == "first" else "first"
    assert results["pushes"][other]["replicas"][0]["logprobs"] != loaded.logprobs
