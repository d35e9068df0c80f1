"""Names of dtypes on the wire, and typed views into raw bytes.

The wire says `"bfloat16"`, never `torch.bfloat16` and never a pickled dtype; a name that is not in the list is
refused before it reaches torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)
_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
_BY_DTYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a dtype, for example `"bfloat16"`.

    Raises:
        ValueError: The dtype cannot be sent (complex, quantised and sub-byte dtypes).
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype} cannot be sent; expected one of {', '.join(_NAMES)}") from None


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype that a wire name stands for.

    Raises:
        ValueError: The name is not in the list of dtypes that can be sent.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"unknown dtype name {name!r}; expected one of {', '.join(_NAMES)}")
    return dtype


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a contiguous tensor of this dtype name and shape (`[]` is one element)."""
    return math.prod(shape) * dtype_from_name(dtype).itemsize


def view(opened_bytes: torch.Tensor, offset: int, dtype_name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a typed, contiguous view of a part of an opened buffer; nothing is copied.

    Args:
        opened_bytes: uint8 `[nbytes]`, as `OpenedBuffer.bytes` gives it.
        offset: Where the tensor starts, in bytes from the start of `opened_bytes`.
        dtype_name: Wire name of the dtype.
        shape: Full shape of the tensor.

    Returns:
        A view that shares the buffer's memory and is valid as long as the sender leaves that memory alone.

    Raises:
        ValueError: The tensor does not lie inside the buffer, or its offset is not a multiple of its item size.
        TypeError: `opened_bytes` is not one-dimensional, contiguous uint8.
    """
    if opened_bytes.dtype != torch.uint8 or opened_bytes.dim() != 1 or not opened_bytes.is_contiguous():
        raise TypeError(
            f"expected contiguous uint8 bytes of one dimension, got {opened_bytes.dtype} {list(opened_bytes.shape)}"
        )
    dtype = dtype_from_name(dtype_name)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"expected sizes >= 0, got shape {list(shape)}")
    length = num_bytes(dtype_name, shape)
    if type(offset) is not int or not 0 <= offset <= opened_bytes.numel() - length:
        raise ValueError(
            f"a {dtype_name} tensor of shape {list(shape)} ({length} bytes) at offset {offset!r} does not lie "
            f"inside the buffer of {opened_bytes.numel()} bytes"
        )
    if (opened_bytes.storage_offset() + offset) % dtype.itemsize or (
        opened_bytes.data_ptr() + offset
    ) % dtype.itemsize:
        raise ValueError(
            f"offset {offset} of a {dtype_name} tensor is not a multiple of its item size {dtype.itemsize}; "
            "the sender must align every tensor"
        )
    return opened_bytes[offset : offset + length].view(dtype).view(tuple(shape))
