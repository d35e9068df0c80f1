"""What a server says: greedy tokens and their log-probabilities, comparable to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import requests

PROMPTS = ([72, 101, 108, 108, 111], [10, 20, 30, 40, 50, 60, 70, 80], [200, 3, 150, 7])


@dataclass(frozen=True)
class Said:
    """Continuations of `PROMPTS`, by replica."""

    tokens: tuple[tuple[str, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def difference(self, other: Said) -> str:
        """Empty if equal; else how they differ."""
        if self.tokens != other.tokens:
            pairs = zip(self.tokens, other.tokens, strict=True)
            return f"other tokens in {sum(a != b for a, b in pairs)} of {len(self.tokens)} continuations"
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        worst = max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))
        return f"log-probabilities differ by up to {worst:g}" if worst else ""


class Speaker:
    """Asks one server, every replica for itself."""

    def __init__(self, url: str, replicas: int = 1, num_tokens: int = 16) -> None:
        self._url, self._replicas, self._num_tokens = url, replicas, num_tokens
        self._session = requests.Session()
        self._session.trust_env = False

    def say(self) -> Said:
        """Continuations with the weights of now: what the prefix cache holds of earlier ones is dropped."""
        self._post("/reset_prefix_cache", None, {})
        tokens, logprobs = [], []
        for replica in range(self._replicas):
            headers = {"X-data-parallel-rank": str(replica)} if self._replicas > 1 else {}
            for prompt in PROMPTS:
                body = {"model": "policy", "prompt": list(prompt), "temperature": 0, "logprobs": 1}
                body |= {"max_tokens": self._num_tokens, "ignore_eos": True}
                answer = self._post("/v1/completions", body, headers)
                found = answer.json()["choices"][0]["logprobs"]
                tokens.append(tuple(found["tokens"]))
                logprobs.append(tuple(float(value) for value in found["token_logprobs"]))
        return Said(tuple(tokens), tuple(logprobs))

    def _post(self, route: str, body: object, headers: dict[str, str]) -> requests.Response:
        answer = self._session.post(f"{self._url}{route}", json=body, headers=headers, timeout=120)
        if not answer.ok:
            raise RuntimeError(f"{route}: status {answer.status_code}: {answer.text[:1000]}")
        return answer
