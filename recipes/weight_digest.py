"""Do the workers hold exactly these weights? Digests of both sides, made by different roads.

The trainer's side starts from full tensors under checkpoint names and puts them together the way vLLM stores them
(`qkv_proj` is q, k, v; `w13_weight` of an expert is gate, up). The worker's side reads the live parameters
(`recipes.worker_extension`). Only the digest function is shared, and no code of `fsdp_ipc`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

_CHUNK = 1 << 22
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_PARTS = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_EXPERT = re.compile(
    r"^(?P<stem>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate_proj|up_proj|down_proj)\.weight$"
)
_FUSED = re.compile(r"^(?P<stem>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


class Digester:
    """Digests of tensors on one device; results stay there until `result`, so that nothing waits in between."""

    def __init__(self, device: torch.device) -> None:
        index = torch.arange(_CHUNK, dtype=torch.int64, device=device)
        mixed = index * _signed(_FACTOR) + 0x1234567
        mixed ^= mixed >> 29
        mixed *= _signed(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> 32
        self._weights = mixed | 1
        self._sums: list[tuple[str, int, list[torch.Tensor]]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor's bits, whatever its dtype; where each element lies counts."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        nbytes = flat.numel()
        for word in (torch.int32, torch.int16):
            if nbytes % word.itemsize == 0:
                # The word must not depend on where the memory lies: other words give another digest.
                aligned = flat.storage_offset() % word.itemsize == 0
                flat = (flat if aligned else flat.clone()).view(word)
                break
        sums = []
        for first in range(0, flat.numel(), _CHUNK):
            piece = flat[first : first + _CHUNK].to(torch.int64)
            piece += 1
            piece *= self._weights[: piece.numel()]
            sums.append(piece.sum())
        self._sums.append((name, nbytes, sums))

    def result(self) -> dict[str, str]:
        """Digests by name, of everything added since the last call."""
        flat = [s for _, _, sums in self._sums for s in sums]
        values = iter(torch.stack(flat).tolist() if flat else [])
        digests = {}
        for name, nbytes, sums in self._sums:
            total = nbytes
            for _ in sums:
                total = (total * _FACTOR + (next(values) & _MASK)) & _MASK
            digests[name] = f"{total:016x}"
        self._sums = []
        return digests


@torch.no_grad()
def expected_digests(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> dict[str, tuple[str, ...]]:
    """What workers must hold, by vLLM parameter, one expert at a time; several digests where any of them is right.

    Args:
        tensors: Checkpoint names and full tensors in the dtype that the server runs in.
        device: Device of the tensors.
    """
    digester = Digester(device)
    for name, tensor in _as_stored(tensors):
        digester.add(name, tensor)
    found: dict[str, tuple[str, ...]] = {}
    for name, digest in digester.result().items():
        plain = name.removesuffix("|swapped")
        found[plain] = (*found.get(plain, ()), digest)
    return found


def _as_stored(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    waiting: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        if match := _FUSED.match(name):
            target = "w2_weight" if match["kind"] == "down_proj" else "w13_weight"
            for expert in range(tensor.shape[0]):
                yield f"{match['stem']}.{target}[{expert}]", tensor[expert]
                if target == "w13_weight":
                    gate, up = tensor[expert].chunk(2)
                    yield f"{match['stem']}.{target}[{expert}]|swapped", torch.cat([up, gate])
            continue
        if match := _EXPERT.match(name):
            if match["kind"] == "down_proj":
                yield f"{match['stem']}.w2_weight[{match['expert']}]", tensor
                continue
            whole, at, count = (
                f"{match['stem']}.w13_weight[{match['expert']}]",
                int(match["kind"] == "up_proj"),
                2,
            )
        else:
            stem, _, leaf = name.rpartition(".")
            parent, _, module = stem.rpartition(".")
            if module not in _PARTS or leaf != "weight":
                yield name, tensor
                continue
            merged, at, count = _PARTS[module]
            whole = f"{parent}.{merged}.weight"
        parts = waiting.setdefault(whole, {})
        # An iterator may reuse the memory of what it has yielded.
        parts[at] = tensor
        if len(parts) == count:
            del waiting[whole]
            yield whole, torch.cat([parts[i] for i in range(count)])
            if whole.endswith("]"):
                # Some of vLLM's expert kernels keep up before gate.
                yield f"{whole}|swapped", torch.cat([parts[1], parts[0]])
    if waiting:
        raise ValueError(f"parts are missing of {sorted(waiting)[:8]}")


@dataclass(kw_only=True)
class Verdict:
    """What the comparison of one worker with the expectation gave."""

    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether the worker holds everything that it should, bit for bit."""
        return self.checked > 0 and not self.wrong and not self.missing

    def text(self) -> str:
        """One line for a report."""
        if self.good:
            return f"{self.checked} parameters bit-exact"
        return (
            f"WRONG: {len(self.wrong)} of {self.checked} parameters differ {self.wrong[:6]}, "
            f"{len(self.missing)} not found {self.missing[:6]}; others there: {self.other[:6]}"
        )


def compare(
    expected: Mapping[str, tuple[str, ...]], held: Mapping[str, str], *, sharded_experts: bool = False
) -> Verdict:
    """Compare what one worker holds with what it should.

    Args:
        expected: From `expected_digests`.
        held: The worker's digests by parameter.
        sharded_experts: The worker holds some of the experts only: those missing are no error.
    """
    verdict = Verdict()
    plain = {name.replace(".routed_experts.", "."): digest for name, digest in held.items()}
    for name, digests in expected.items():
        if name not in plain:
            if not (sharded_experts and name.endswith("]")):
                verdict.missing.append(name)
            continue
        verdict.checked += 1
        if plain[name] not in digests:
            verdict.wrong.append(name)
    verdict.other = sorted(plain.keys() - expected.keys())
    return verdict


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
