"""Comparisons of the bits in device memory, in blocks so that they need little memory themselves."""

from __future__ import annotations

import torch

__all__ = ["bits", "is_constant", "same_bits"]

_BLOCK = 1 << 25  # elements compared at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaNs compare equal to themselves and -0.0 differs from 0.0."""
    if tensor.element_size() not in _INTEGERS:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def same_bits(result: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a result is, bit for bit, what copying the source into it would give (cast included)."""
    if result.shape != source.shape:
        return False
    return all(
        torch.equal(bits(a), bits(b.to(a.dtype)))
        for a, b in zip(_blocks(result), _blocks(source), strict=True)
    )


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether all elements have the same bits. Such data look the same after any reordering."""
    values = bits(tensor)
    if values.numel() <= 1:
        return True
    first = values[(0,) * values.ndim]
    return all(bool((block == first).all()) for block in _blocks(values))


def _blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.ndim == 0 or tensor.numel() <= _BLOCK:
        return [tensor]
    rows = max(1, _BLOCK // max(1, tensor[0].numel()))
    return list(tensor.split(rows))
