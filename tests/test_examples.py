"""The examples as a person starts them, with real vLLM engines: each one proves what its workers hold."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchrun import start_recipe

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(900)]

pytest.importorskip("hydra", reason="needs Hydra: install the extra 'recipes'")


def _num_gpus() -> int:
    return torch.cuda.device_count()


QUICK = ["train.steps=4", "hook.every=2", "data.max_tokens=8"]


def _two_proven_pushes(line: dict[str, Any]) -> None:
    assert [push["version"] for push in line["pushes"]] == ["2", "4"]
    assert len(line["proofs"]) == 2
    assert all(proof.endswith("bit-exact") for proof in line["proofs"])


def test_one_gpu_over_http(tmp_path: Path) -> None:
    line = start_recipe("recipes.http_one_gpu", *QUICK, f"hydra.run.dir={tmp_path}", ranks=None)
    _two_proven_pushes(line)
    assert line["before"] is not None and line["after"] is not None


def test_a_trainer_that_never_imports_vllm_pushes_into_a_server_that_runs(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.config import ModelConfig, ServerConfig
    from recipes.models import write_model_dir
    from recipes.serve import Server

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model_dir = write_model_dir(
        ModelConfig(**sizes, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024),
        tmp_path / "model",
    )
    config = AutoConfig.from_pretrained(model_dir)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model_dir)
    ranks = _num_gpus() or 2
    settings = ServerConfig(
        extra_args=["--worker-extension-cls", "recipes.worker_extension.WorkerChecks"], start_timeout_s=400
    )
    # vLLM cannot be imported there, whatever is installed: a package of that name that raises comes first.
    blocked = tmp_path / "blocked" / "vllm"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('not in this environment')\n")
    with Server(
        model_dir,
        num_replicas=ranks,
        config=settings,
        log_path=tmp_path / "server.log",
        on_gpu=_num_gpus() > 0,
    ) as server:
        server.wait_healthy()
        line = start_recipe(
            "recipes.http_remote_trainer",
            *QUICK,
            f"model.path={model_dir}",
            f"inference.url={server.url}",
            "prove=true",
            f"hydra.run.dir={tmp_path}/run",
            ranks=ranks,
            env={"PYTHONPATH": f"{blocked.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
    _two_proven_pushes(line)
    assert line["vllm_imported"] is False
    assert line["after"] is not None


def test_sharded_experts_reach_the_workers(tmp_path: Path) -> None:
    ranks = _num_gpus() or 2
    line = start_recipe("recipes.moe_ep", "pushes=2", f"hydra.run.dir={tmp_path}", ranks=ranks)
    assert [push["version"] for push in line["pushes"]] == ["1", "2"]
    assert len(line["proofs"]) == 2
    assert line["slept"] == (_num_gpus() > 0), "a CPU server cannot sleep"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray")
def test_two_vllm_actors_of_a_local_ray_get_the_weights_of_two_trainer_ranks(tmp_path: Path) -> None:
    ranks = min(2, _num_gpus()) or 2
    line = start_recipe(
        "recipes.ray_one_gpu",
        *QUICK,
        f"ranks={ranks}",
        f"hydra.run.dir={tmp_path}",
        ranks=None,
        env={"RAY_AUTH_MODE": "disabled"},
    )
    _two_proven_pushes(line)
    assert line["ranks"] == ranks
    checked = {int(proof.split()[0]) for proof in line["proofs"]}
    # All parameters of both workers: the decoder layers' eight each, embedding, norm and head.
    assert checked == {ranks * (2 * 8 + 3)}
