"""Copies out of a tensor in parts: whatever is copied, the parts of the copy together are the whole copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ipc.vllm_plugin.copy_layout import Layout
from fsdp_ipc.vllm_plugin.scattered import Scattered


def scattered(whole: torch.Tensor, cuts: list[int]) -> Scattered:
    """A tensor cut at these elements, every part in memory of its own."""
    flat = whole.reshape(-1)
    edges = [0, *sorted(cut for cut in set(cuts) if 0 < cut < flat.numel()), flat.numel()]
    parts = [flat[a:b].clone() for a, b in pairwise(edges)]
    return Scattered(
        tuple(whole.shape), whole.dtype, whole.device, tuple((p, n) for n, p in enumerate(parts))
    )


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 5),
    depth=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    fine=st.booleans(),
    drawn=st.data(),
)
def test_the_parts_of_a_copy_are_the_copy(
    rows: int, columns: int, depth: int, cuts: list[int], fine: bool, drawn: st.DataObject
) -> None:
    whole = torch.arange(rows * columns * depth).view(rows, columns, depth)
    parts = scattered(whole, [cut * (1 if fine else columns * depth) for cut in cuts])
    assert torch.equal(parts.whole(), whole)
    first = [drawn.draw(st.integers(0, n - 1)) for n in whole.shape]
    window = whole[first[0] :, first[1] :, first[2] :]
    if drawn.draw(st.booleans()):
        window = window.transpose(drawn.draw(st.integers(0, 2)), drawn.draw(st.integers(0, 2)))
    memory = torch.full((2 * window.numel() + 3,), -1)
    target = memory[3::2][: window.numel()].view(window.shape) if window.numel() else memory[:0]
    found = parts.split(Layout.of(window), Layout.of(target))
    if found is None:
        assert fine or len(parts.parts) > 1
        return
    for view, there, distance in found:
        held = parts.parts[distance][0]
        assert view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        there.view_of(memory).copy_(view)
    assert torch.equal(target, window)
    assert int((memory == -1).sum()) == memory.numel() - window.numel()


@pytest.mark.parametrize("shape", [(6, 4), (7,), (), (0, 3), (1, 1), (3, 0)])
def test_rows_of_dim_0_can_always_be_told_apart(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    row = max(whole[0].numel(), 1) if whole.dim() and shape[0] else 1
    parts = (
        scattered(whole, [2 * row, 4 * row])
        if whole.numel()
        else Scattered(shape, whole.dtype, whole.device, ())
    )
    assert torch.equal(parts.whole(), whole)
    into = torch.zeros_like(whole)
    found = parts.split(Layout.of(whole), Layout.of(into))
    assert found is not None
    for view, there, _ in found:
        there.view_of(into).copy_(view)
    assert torch.equal(into, whole)


def test_an_index_that_lies_in_two_parts_is_said_to_be_uncuttable() -> None:
    whole = torch.arange(24).view(4, 6)
    parts = scattered(whole, [9])
    assert parts.split(Layout.of(whole), Layout.of(whole)) is None
    flat = Layout(0, (24,), (1,))
    assert [view.numel() for view, _, _ in parts.split(flat, flat) or ()] == [9, 15]
    column = whole[:, :2]  # of row 1 the elements 6 and 7, before the cut
    assert [tuple(v.shape) for v, _, _ in parts.split(Layout.of(column), Layout.of(column)) or ()] == [
        (2, 2),
        (2, 2),
    ]
