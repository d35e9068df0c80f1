"""The copy and cast kernels of the worker on a real GPU, against torch's own copies."""

from __future__ import annotations

import pytest
import torch

from fsdp_ipc.vllm_plugin.copy_kernel import batched_copy

pytestmark = pytest.mark.gpu

SIZES = (8, 4096, 8192, 8200, 65536, 1 << 20, (1 << 20) + 16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_as_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Any bits: every exponent, subnormals, infinities, halfway cases; what is not a number only has to stay one.
    sources = [
        torch.randint(-(2**31), 2**31 - 1, (n,), device="cuda").int().view(torch.float32) for n in SIZES
    ]
    sources.append((torch.randn(8192, device="cuda").to(dtype).float() * (1 + 2.0**-9)).contiguous())
    targets = [torch.full_like(source, 7, dtype=dtype) for source in sources]
    copy = batched_copy(targets, sources)
    assert copy is not None
    copy()
    for target, source in zip(targets, sources, strict=True):
        expected = source.to(dtype)
        number = ~expected.isnan()
        assert torch.equal(bits(target)[number], bits(expected)[number])
        assert torch.equal(target.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_moves_every_bit_and_nothing_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    sources = [torch.randn(n, device="cuda").to(dtype) for n in SIZES]
    rooms = [torch.zeros(n + 16, device="cuda", dtype=dtype) for n in SIZES]
    copy = batched_copy([room[8:-8] for room in rooms], sources)
    assert copy is not None
    copy()
    for room, source in zip(rooms, sources, strict=True):
        assert torch.equal(bits(room[8:-8]), bits(source))
        assert not room[:8].any()
        assert not room[-8:].any()


def test_what_does_not_fit_is_left_to_the_caller() -> None:
    whole = torch.zeros(64, device="cuda")
    assert batched_copy([whole[1:33]], [whole[32:]]) is None
    assert batched_copy([whole[:32].double()], [whole[:32]]) is None
    assert batched_copy([torch.zeros(8)], [torch.zeros(8)]) is None
    assert batched_copy([], []) is None
