"""Digests on a GPU: the Triton kernel against torch's operators and the written definition, and its speed.

Run on one GPU: `python -m tests.gpu.digest_check`. Prints one JSON object; exit code 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fsdp_ipc.digest import CHUNK_WORDS, Digester, Run, digest_of, word_factor
from fsdp_ipc.digest_file import DigestFile, Region
from fsdp_ipc.vllm_plugin.copy_layout import Layout
from fsdp_ipc.vllm_plugin.copy_memory import Piece
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow
from fsdp_ipc.vllm_plugin.verify import LiveVerifier, VerificationError, VerifyCounts

_U64 = (1 << 64) - 1
_DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)


def by_definition(data: list[int], position: int) -> int:
    """What `fsdp_ipc.digest` promises, one byte at a time."""
    return sum((byte << 8 * (p % 4)) * word_factor(p // 4) for p, byte in enumerate(data, position)) & _U64


def compare(device: torch.device) -> dict[str, Any]:
    """Odd sizes, addresses and positions, as several runs that share sums."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8, generator=generator).to(device)
    chunk = 4 * CHUNK_WORDS
    sizes = (
        1,
        2,
        3,
        4,
        7,
        16,
        30,
        255,
        4096,
        16384,
        16400,
        70001,
        chunk - 4,
        chunk,
        chunk + 12,
        5 * chunk + 1,
    )
    runs = [
        Run(memory[first : first + size], position, slot)
        for slot, (size, first, position) in enumerate(
            (size, first, position)
            for size in sizes
            for first in (0, 1, 2, 4, 6, 16, 256)
            for position in (0, 2, 3, 4, chunk - 8, 7 * chunk + 6)
        )
    ]
    sums = [torch.zeros(len(runs), dtype=torch.int64, device=device) for _ in range(2)]
    kernel, plain = Digester(runs, device), Digester(runs, device, triton=False)
    kernel.add(sums[0])
    plain.add(sums[1])
    differing = (sums[0] != sums[1]).nonzero().flatten().tolist()
    small = [n for n, run in enumerate(runs) if run.memory.numel() <= 4096]
    wrong = [
        n for n in small if by_definition(runs[n].memory.tolist(), runs[n].position) != int(sums[0][n]) & _U64
    ]
    tensors = {}
    for dtype in _DTYPES:
        tensor = memory[: 999 * 4].view(dtype)[3:]
        flat = tensor.view(torch.uint8).tolist()
        tensors[str(dtype)] = digest_of(tensor) == by_definition(flat, 0)
    flipped = memory.clone()
    flipped[1234567] ^= 1
    return {
        "triton": kernel.prepared,
        "runs": len(runs),
        "differ_from_torch": len(differing),
        "differ_from_definition": len(wrong),
        "dtypes": tensors,
        "one_bit_noticed": digest_of(flipped) != digest_of(memory),
    }


def live(device: torch.device) -> dict[str, Any]:
    """The worker's half on this device: a merged parameter, a transposed one, an expert of many, and a slice."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    shapes = {"q": (96, 64), "k": (31, 64), "turned": (300, 1100), "expert": (40, 24), "slice": (50, 64)}
    sent = {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }
    merged = torch.cat([sent["q"], sent["k"]])
    turned = sent["turned"].t().contiguous()
    experts = torch.stack([sent["expert"] + n for n in range(3)])
    experts[1].copy_(sent["expert"])
    columns = sent["slice"][:, 32:].contiguous()

    def whole(
        name: str, held: torch.Tensor, at: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, Piece]:
        return held, Piece(name=name, source=Layout.of(source), target=Layout.of(at), dtype=held.dtype)

    places = {
        "q": [whole("q", merged, merged[:96], sent["q"])],
        "k": [whole("k", merged, merged[96:], sent["k"])],
        "turned": [whole("turned", turned, turned.t(), sent["turned"])],
        "expert": [whole("expert", experts, experts[1], sent["expert"])],
        "slice": [whole("slice", columns, columns, sent["slice"][:, 32:])],
    }
    rows = [TensorRow(name, t.dtype, tuple(t.shape), 0, 0, 0) for name, t in sent.items()]
    file = DigestFile.create(len(rows), rank=0)
    verifier = LiveVerifier(device)
    verifier.open(file.name, len(rows))
    digests = torch.tensor([_signed(digest_of(sent[row.name])) for row in rows])
    buckets, basis = [rows], object()

    def check(sync: int) -> VerifyCounts:
        honoured, regions = file.asked(-1) or (0, [])
        parts = [_signed(_of_region(sent[rows[region.row].name], region)) for region in regions]
        file.write(sync, 0, 1, digests, honoured=honoured, parts=torch.tensor(parts, dtype=torch.int64))
        return verifier.check(sync, buckets, basis, places.__getitem__, "worker")

    first, second = check(1), check(2)
    missed = []
    for name, held, index in (
        ("q", merged, (95, 63)),
        ("k", merged, (96, 0)),
        ("turned", turned, (7, 9)),
        ("expert", experts, (1, 39, 23)),
        ("slice", columns, (49, 31)),
    ):
        bits = held.view(torch.int16)
        bits[index] ^= 1
        try:
            check(3)
            missed.append(name)
        except VerificationError as error:
            if f"{name!r} (sent" not in str(error) or "1 of 5" not in str(error):
                missed.append(f"{name}: {error}")
        bits[index] ^= 1
    check(4)
    file.close()
    verifier.close()
    return {
        "first": first.verified,
        "second": second.verified,
        "unverified": second.unverified,
        "missed": missed,
    }


def _of_region(tensor: torch.Tensor, region: Region) -> int:
    """The digest of a region by another way: everything else set to zero."""
    sizes, strides = zip(*region.dims, strict=True)
    alone = torch.zeros_like(tensor)
    alone.as_strided(sizes, strides, region.offset).copy_(tensor.as_strided(sizes, strides, region.offset))
    return digest_of(alone)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def speed(device: torch.device, nbytes: int, num_tensors: int, lead: int = 0) -> dict[str, float]:
    """GB/s over `num_tensors` neighbours; `lead` bytes take them off their alignment."""
    memory = torch.randint(0, 1 << 30, (nbytes // 4 + 64,), dtype=torch.int32, device=device).view(
        torch.uint8
    )
    size = nbytes // num_tensors // 512 * 512
    runs = [Run(memory[lead + n * size : lead + (n + 1) * size], 0, n) for n in range(num_tensors)]
    sums = torch.zeros(num_tensors, dtype=torch.int64, device=device)
    began = time.perf_counter()
    digester = Digester(runs, device)
    prepare_s = time.perf_counter() - began
    seconds = _timed(lambda: digester.add(sums))
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(5):
        digester.add(sums)
    allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    return {
        "gb": size * num_tensors / 1e9,
        "tensors": num_tensors,
        "ms": seconds * 1e3,
        "gb_per_s": size * num_tensors / seconds / 1e9,
        "prepare_s": prepare_s,
        "allocations": allocations,
    }


def copy_speed(device: torch.device, nbytes: int) -> float:
    """GB/s that a large copy reads (it writes as much): what memory can give."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return nbytes / _timed(lambda: target.copy_(source)) / 1e9


def _timed(call: Callable[[], object], repeat: int = 10) -> float:
    call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def main() -> int:
    """Check and time; 1 if anything is wrong."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = compare(device)
    held = live(device)
    timed = {
        "8_gb_in_300": speed(device, 8 << 30, 300),
        "8_gb_in_20000": speed(device, 8 << 30, 20000),
        "1_gb_off_by_4": speed(device, 1 << 30, 300, lead=4),
        "1_gb_off_by_2": speed(device, 1 << 30, 300, lead=2),
    }
    good = (
        found["triton"]
        and not found["differ_from_torch"]
        and not found["differ_from_definition"]
        and all(found["dtypes"].values())
        and found["one_bit_noticed"]
        and (held["first"], held["second"], held["missed"]) == (4, 5, [])
        and not any(one["allocations"] for one in timed.values())
    )
    report = {
        "good": bool(good),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "checks": found,
        "live": held,
        "speed": timed,
        "copy_read_gb_per_s": copy_speed(device, 8 << 30),
    }
    print(json.dumps(report))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
