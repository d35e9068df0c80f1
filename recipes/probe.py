"""The caller's side of `recipes.worker_extension`: one call, every worker's answer; and the proof made of them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
import torch
from torch import nn

from recipes.ranks import on_rank0
from recipes.shapes import checkpoint_tensors
from recipes.weight_digest import Verdict, compare, expected_digests


class WorkerProbe:
    """Asks every worker of a server.

    Args:
        url: The server, started with the extension and in development mode, on this machine.
        num_workers: Workers over all data-parallel replicas.
        timeout_s: Seconds for one call.
    """

    def __init__(self, url: str, num_workers: int, timeout_s: float = 120.0) -> None:
        self.url, self.num_workers, self.timeout_s = url, num_workers, timeout_s
        self._session = requests.Session()
        self._session.trust_env = False

    def call(self, method: str, *args: str) -> list[dict[str, Any]]:
        """Call a method on every worker.

        Raises:
            RuntimeError: The server refused, a worker failed, or not all of them answered.
        """
        folder = tempfile.mkdtemp(prefix="probe-")
        try:
            self._request(method, [folder, *args])
            results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            raise RuntimeError(f"{method}: {errors[0]}")
        if len(results) != self.num_workers:
            raise RuntimeError(f"{method}: {len(results)} of {self.num_workers} workers answered")
        return [result["ok"] for result in results]

    def _request(self, method: str, args: list[str]) -> None:
        """Have every worker call the method."""
        answer = self._session.post(
            f"{self.url}/collective_rpc", json={"method": method, "args": args}, timeout=self.timeout_s
        )
        if not answer.ok:
            raise RuntimeError(f"{method}: status {answer.status_code}: {answer.text[:2000]}")

    def digests(self) -> list[dict[str, str]]:
        """Digests by parameter, a dict a worker."""
        return self.call("check_digests")

    def scramble(self) -> None:
        """Flip bits of all parameters."""
        self.call("check_scramble")

    def memory(self, *, reset: bool = False) -> list[dict[str, Any]]:
        """Allocator figures, a dict a worker."""
        return self.call("check_memory", "yes" if reset else "no")

    def verify(self, expected: Mapping[str, tuple[str, ...]], *, sharded_experts: bool = False) -> Verdict:
        """Compare every worker with the expectation.

        Under expert parallelism each expert must be on some worker.

        Returns:
            The first worker's verdict that is not good, else one that counts the parameters of all.
        """
        total = Verdict()
        found: set[str] = set()
        for held in self.digests():
            verdict = compare(expected, held, sharded_experts=sharded_experts)
            if not verdict.good:
                return verdict
            total.checked += verdict.checked
            found |= {name.replace(".routed_experts.", ".") for name in held}
        total.missing = [name for name in expected if name not in found]
        return total


class ActorProbe(WorkerProbe):
    """Asks the one worker of a Ray actor that is vLLM's `LLM`."""

    def __init__(self, actor: Any) -> None:
        super().__init__("", 1)
        self._actor = actor

    def _request(self, method: str, args: list[str]) -> None:
        import ray

        ray.get(self._actor.collective_rpc.remote(method, args=tuple(args)), timeout=self.timeout_s)


def prove(
    model: nn.Module,
    probes: Sequence[WorkerProbe],
    device: torch.device,
    *,
    dtype: str = "bfloat16",
    experts: str = "each",
    sharded_experts: bool = False,
    reload_in: Path | None = None,
) -> str:
    """All ranks, collective, right after a push: every worker holds the model's weights, bit for bit.

    Args:
        model: The trainer's module.
        probes: Of all servers; used on rank 0 only.
        device: This rank's device.
        dtype: Dtype that the servers run in.
        experts: See `recipes.shapes.EXPERT_STYLES`.
        sharded_experts: Whether each worker holds some of the experts only.
        reload_in: Folder for a file with the weights. Kernels of a CPU server keep experts packed in a way of their own,
            so there a worker must hold what it holds after all of it was damaged and loaded again from that file.

    Returns:
        One line that says what was compared.

    Raises:
        RuntimeError: On every rank; a worker holds something else.
    """
    tensors = checkpoint_tensors(model, experts, getattr(torch, dtype))
    if reload_in is not None:
        saved = {name: tensor.clone() for name, tensor in tensors}
        return on_rank0(lambda: _reload_all(saved, probes, reload_in / "weights.pt"))
    expected = expected_digests(tensors, device)

    def compare_all() -> str:
        verdicts = [probe.verify(expected, sharded_experts=sharded_experts) for probe in probes]
        if not all(verdict.good for verdict in verdicts):
            raise RuntimeError("; ".join(verdict.text() for verdict in verdicts))
        return f"{sum(verdict.checked for verdict in verdicts)} parameters on the workers are bit-exact"

    return on_rank0(compare_all)


def _reload_all(tensors: dict[str, torch.Tensor], probes: Sequence[WorkerProbe], path: Path) -> str:
    torch.save(tensors, path)
    checked = 0
    for probe in probes:
        pushed = probe.digests()
        probe.scramble()
        probe.call("check_load_file", str(path))
        for worker, (held, loaded) in enumerate(zip(pushed, probe.digests(), strict=True)):
            wrong = [name for name in loaded if held.get(name) != loaded[name]]
            if wrong or held.keys() != loaded.keys():
                raise RuntimeError(f"worker {worker}: not what a file gives: {wrong[:6]} of {len(loaded)}")
            checked += len(loaded)
    return f"{checked} parameters on the workers are what a file with the weights gives"
