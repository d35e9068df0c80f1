"""What a real server serves, for comparison with one that loaded a checkpoint.

Checksums alone would prove little on CPU, where vLLM packs linear weights away and checksums empty parameters; so the
log-probabilities of a prompt are compared too, to the last bit, and what is said next.
"""

from __future__ import annotations

from dataclasses import dataclass

import requests

from tests.tiny_models import VOCAB
from tests.vllm_server import Server

PROMPT = [2 + (37 * index) % (VOCAB - 2) for index in range(40)]


@dataclass(frozen=True)
class Served:
    """What one replica serves."""

    checksums: dict[str, str]
    logprobs: list[float]
    tokens: list[str]


def served(server: Server | str, replica: int) -> Served:
    """Checksums by worker and parameter, the prompt's log-probabilities and the greedy tokens after it, of one replica."""
    url = server if isinstance(server, str) else server.url
    answer = requests.post(f"{url}/weight_checker", json={"action": "checksum"}, timeout=60)
    assert answer.status_code == requests.codes.ok, answer.text
    prefix = f"dp{replica}:"
    checksums = {
        key.removeprefix(prefix): value
        for key, value in answer.json()["checksums"].items()
        if key.startswith(prefix)
    }
    assert checksums
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 0,
        "prompt_logprobs": 0,
    }
    answer = requests.post(
        f"{url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(replica)}, timeout=60
    )
    assert answer.status_code == requests.codes.ok, answer.text
    choice = answer.json()["choices"][0]
    found = choice["prompt_logprobs"][1:]
    return Served(
        checksums,
        [entry[str(token)]["logprob"] for entry, token in zip(found, PROMPT[1:], strict=True)],
        choice["logprobs"]["tokens"],
    )
