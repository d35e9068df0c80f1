"""Dtype names and typed views into raw bytes."""

from __future__ import annotations

import pytest
import torch

from fsdp_ipc.dtypes import dtype_from_name, dtype_name, num_bytes, view

NAMES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "int64",
    "int32",
    "uint16",
    "uint8",
    "bool",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_torchs_own_and_comes_back(name):
    assert f"torch.{name}" == str(dtype_from_name(name))
    assert dtype_name(dtype_from_name(name)) == name


@pytest.mark.parametrize("name", ["torch.float32", "complex64", "Tensor", "", "__class__", "float"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="unknown dtype name"):
        dtype_from_name(name)


def test_a_dtype_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match=r"torch\.complex64 cannot be sent"):
        dtype_name(torch.complex64)


def test_num_bytes_of_a_scalar_and_of_nothing():
    assert num_bytes("bfloat16", []) == 2
    assert num_bytes("float32", [3, 5]) == 60
    assert num_bytes("float64", [0, 4]) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [[], [1], [7, 3], [0, 4], [2, 1, 5]])
def test_a_view_has_the_bytes_that_were_written(name, shape):
    dtype = dtype_from_name(name)
    raw = torch.randint(0, 2, (num_bytes(name, shape),), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    buffer = torch.full((256,), 255, dtype=torch.uint8)
    buffer[64 : 64 + raw.numel()] = raw

    seen = view(buffer, 64, name, shape)

    assert seen.dtype == dtype
    assert list(seen.shape) == shape
    assert torch.equal(seen.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    if raw.numel():
        assert seen.data_ptr() == buffer.data_ptr() + 64


def test_field_D22_a_misaligned_offset_is_refused():
    """https://github.com/verl-project/verl/pull/7318: an fp32 tensor after three bf16 elements."""
    buffer = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="offset 6 of a float32 tensor is not a multiple of its item size 4"):
        view(buffer, 6, "float32", [2])
    assert view(buffer, 6, "bfloat16", [2]).shape == (2,)


def test_a_misaligned_base_is_refused_too():
    with pytest.raises(ValueError, match="item size"):
        view(torch.zeros(64, dtype=torch.uint8)[2:], 0, "float32", [2])


@pytest.mark.parametrize(
    ("offset", "shape"), [(60, [2]), (64, [1]), (-4, [1]), (0, [17]), (0, [1 << 61]), (4.0, [1]), (True, [1])]
)
def test_out_of_bounds_is_refused(offset, shape):
    with pytest.raises(ValueError, match="does not lie inside the buffer of 64 bytes"):
        view(torch.zeros(64, dtype=torch.uint8), offset, "float32", shape)


@pytest.mark.parametrize("shape", [[-1], [2, -3], [2.0], [True]])
def test_bad_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="sizes >= 0"):
        view(torch.zeros(64, dtype=torch.uint8), 0, "float32", shape)


def test_only_raw_bytes_can_be_viewed():
    with pytest.raises(TypeError, match="uint8"):
        view(torch.zeros(4), 0, "float32", [1])
    with pytest.raises(TypeError, match="uint8"):
        view(torch.zeros(64, dtype=torch.uint8)[::2], 0, "float32", [1])
