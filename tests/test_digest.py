"""Digests: against a definition written out byte by byte, and what they must notice."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ipc.digest import CHUNK_WORDS, Digester, Run, digest_of, word_factor
from fsdp_ipc.digest_file import DigestFile
from fsdp_ipc.verify import shares

CPU = torch.device("cpu")
U64 = (1 << 64) - 1
CHUNK = 4 * CHUNK_WORDS


def by_definition(data: Sequence[int], position: int = 0) -> int:
    """What the module's text says, one byte at a time."""
    total = 0
    for p, byte in enumerate(data, position):
        total += (byte << 8 * (p % 4)) * word_factor(p // 4)
    return total & U64


def digest(runs: Sequence[Run], slots: int = 1) -> list[int]:
    sums = torch.zeros(slots, dtype=torch.int64)
    Digester(runs, CPU).add(sums)
    return [value & U64 for value in sums.tolist()]


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@given(
    size=st.integers(0, 70),
    lead=st.integers(0, 9),
    position=st.one_of(st.integers(0, 9), st.integers(CHUNK - 40, CHUNK + 9)),
)
def test_any_place_and_alignment(size: int, lead: int, position: int) -> None:
    memory = random_bytes(size + lead)[lead:]
    assert digest([Run(memory, position, 0)]) == [by_definition(memory.tolist(), position)]


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, 17 * CHUNK + 7])
def test_over_many_chunks(size: int) -> None:
    memory = random_bytes(size)
    words = [int.from_bytes(bytes(memory[i : i + 4].tolist()), "little") for i in range(0, 4 * 50, 4)]
    assert digest([Run(memory[:200], 0, 0)]) == [sum(w * word_factor(i) for i, w in enumerate(words)) & U64]
    # In parts that are small enough for the definition, and as one.
    cuts = [0, 1, 6, CHUNK // 2, CHUNK - 5, size]
    parts = [Run(memory[a:b], a, 0) for a, b in itertools.pairwise(cuts)]
    assert digest(parts) == digest([Run(memory, 0, 0)])
    end = memory[-300:]
    before, whole = digest([Run(memory[:-300], 0, 0)]), digest([Run(memory, 0, 0)])
    assert (whole[0] - before[0]) & U64 == by_definition(end.tolist(), size - 300)


def test_every_single_bit_counts() -> None:
    memory = random_bytes(37)
    seen = {digest([Run(memory, 0, 0)])[0]}
    for at in range(37):
        for bit in range(8):
            memory[at] ^= 1 << bit
            seen.add(digest([Run(memory, 0, 0)])[0])
            memory[at] ^= 1 << bit
    assert len(seen) == 1 + 37 * 8


def test_order_counts_near_and_far() -> None:
    memory = random_bytes(3 * CHUNK)
    good = digest([Run(memory, 0, 0)])
    for first, second, size in ((0, 1, 1), (0, 2, 2), (0, 4, 4), (8, CHUNK + 8, 64), (0, CHUNK, CHUNK)):
        other = memory.clone()
        other[first : first + size] = memory[second : second + size]
        other[second : second + size] = memory[first : first + size]
        assert not torch.equal(other, memory)
        assert digest([Run(other, 0, 0)]) != good


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]
)
def test_of_a_tensor_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 7).mul(9).to(dtype)
    assert digest_of(tensor) == by_definition(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    assert digest_of(tensor.t()) == by_definition(tensor.t().contiguous().view(-1).view(torch.uint8).tolist())
    assert digest_of(tensor[:0]) == 0


@pytest.mark.parametrize("num_shares", [1, 3, 8])
def test_shares_are_even_and_cover_everything(num_shares: int) -> None:
    sizes = [1000, 3, 5, 900, 40, 40, 40, 7, 0, 12, 300, 299, 1]
    chosen = shares(sizes, num_shares)
    weights = [
        sum(s for s, c in zip(sizes, chosen, strict=True) if c == share) for share in range(num_shares)
    ]
    assert set(chosen) <= set(range(num_shares))
    assert sum(weights) == sum(sizes)
    assert max(weights) <= max(1000, sum(sizes) / num_shares + 300)
    assert chosen == shares(sizes, num_shares)


def test_the_file_tells_one_sync_from_another(clean_shm: None) -> None:
    sent = DigestFile.create(3, rank=2)
    read = DigestFile.open(sent.name, 3)
    values = torch.tensor([1, -2, 3])
    with pytest.raises(ValueError, match="digests of sync 0 where those of sync 7 were expected"):
        read.read(7)
    sent.write(7, 1, 8, values)
    found = read.read(7)
    assert (found.rank, found.share, found.num_shares) == (2, 1, 8)
    assert torch.equal(found.digests, values)
    with pytest.raises(ValueError, match="digests of sync 7 where those of sync 8 were expected"):
        read.read(8)
    with pytest.raises(ValueError, match="is no file of digests"):
        DigestFile.open(sent.name, 4)
    with pytest.raises(ValueError, match="bytes; expected"):
        DigestFile.open(sent.name, 40)
    with pytest.raises(ValueError, match="not of the form"):
        DigestFile.open("../etc/passwd", 3)
    sent.close()
    with pytest.raises(FileNotFoundError):
        DigestFile.open(sent.name, 3)
    read.close()


_INTERPRETED = """
import torch
from fsdp_ipc.digest import CHUNK_WORDS, Digester, Run
g = torch.Generator().manual_seed(1)
memory = torch.randint(0, 256, (20000,), dtype=torch.uint8, generator=g)
runs = []
for slot, (first, size) in enumerate([(0, 20000), (16, 64), (4, 17000), (2, 30), (1, 31), (7, 1), (32, 16387), (9, 0)]):
    for position in (0, 3, 4 * CHUNK_WORDS - 24):
        runs.append(Run(memory[first : first + size], position, slot))
sums = [torch.zeros(8, dtype=torch.int64) for _ in range(2)]
Digester(runs, torch.device("cpu"), triton=False).add(sums[0])
Digester(runs, torch.device("cpu")).add(sums[1])
assert sums[0].count_nonzero() == 7
print(torch.equal(*sums))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch for CUDA"
)
def test_the_kernel_interpreted_gives_the_same() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], env=env, check=False, capture_output=True, text=True
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip(
            "this Triton's interpreter does not go with this numpy; tests.gpu.digest_check runs the kernel"
        )
    assert done.stdout.strip() == "True", done.stderr


def test_threads_do_not_disturb_each_other() -> None:
    tensors = [random_bytes(5 * CHUNK, seed) for seed in range(4)]
    alone = [digest_of(tensor) for tensor in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(digest_of, tensors * 8)) == alone * 8
