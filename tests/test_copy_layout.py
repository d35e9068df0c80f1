"""Strided arithmetic of the copy plan, against lists of every element's place."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis", reason="needs hypothesis: install the extra 'dev'")

from hypothesis import given
from hypothesis import strategies as st

from fsdp_ipc.vllm_plugin.copy_layout import Layout, covers, translate


def places(layout: Layout) -> list[int]:
    """Every element's offset, in logical order."""
    found = [layout.offset]
    for n, stride in zip(layout.size, layout.stride, strict=True):
        found = [at + i * stride for at in found for i in range(n)]
    return found


def memory(draw: st.DrawFn, size: list[int]) -> torch.Tensor:
    """A tensor of this size whose dims lie in any order, with gaps or without."""
    order = draw(st.permutations(range(len(size))))
    gap = draw(st.booleans())
    tensor = torch.empty([size[i] + gap for i in order])
    tensor = tensor[tuple(slice(0, size[i]) for i in order)]
    return tensor.permute([order.index(i) for i in range(len(size))])


@st.composite
def copies(draw: st.DrawFn) -> tuple[Layout, Layout, Layout]:
    """A view, where it is copied to, and something that may be a part of the view."""
    size = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    here, there = memory(draw, size), memory(draw, size)
    offset, offset_there = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    part = here
    for dim, n in enumerate(size):
        start = draw(st.integers(0, n - 1))
        part = part.narrow(dim, start, draw(st.integers(1, n - start)))
    if draw(st.booleans()) and part.is_contiguous():
        part = part.flatten()
    inner = Layout(part.storage_offset() + offset, tuple(part.shape), tuple(part.stride()))
    if draw(st.integers(0, 4)) == 0:
        few = st.integers(0, 5)
        inner = Layout(draw(few), (draw(st.integers(1, 3)), draw(st.integers(1, 3))), (draw(few), draw(few)))
    outer = Layout(offset, tuple(size), tuple(here.stride()))
    return outer, Layout(offset_there, tuple(size), tuple(there.stride())), inner


@given(copies())
def test_a_part_is_followed_to_where_it_was_copied(case: tuple[Layout, Layout, Layout]) -> None:
    outer, there, inner = case
    moved = translate(inner, outer, there)
    if moved is not None:
        where = dict(zip(places(outer), places(there), strict=True))
        assert places(moved) == [where[at] for at in places(inner)]
        assert moved.size == inner.size


@given(st.data())
def test_parts_cover_a_whole_exactly_when_each_element_is_hit_once(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    whole = torch.empty(size)
    if data.draw(st.booleans()):
        whole = whole.transpose(0, -1)
    tensors = [whole]
    for _ in range(data.draw(st.integers(0, 4))):
        victim = tensors.pop(data.draw(st.integers(0, len(tensors) - 1)))
        dim = data.draw(st.integers(0, victim.ndim - 1))
        cut = data.draw(st.integers(0, victim.shape[dim]))
        halves = victim.narrow(dim, 0, cut), victim.narrow(dim, cut, victim.shape[dim] - cut)
        tensors += [half for half in halves if half.numel()]
    parts = [Layout.of(tensor) for tensor in tensors]
    change = data.draw(st.sampled_from(["none", "drop", "double", "odd"]))
    if change == "drop":
        parts.pop()
    elif change == "double":
        parts.append(data.draw(st.sampled_from(parts)))
    elif change == "odd":
        few = st.integers(0, 4)
        parts.append(Layout(data.draw(few), (2, 2), (data.draw(few), data.draw(few))))
    said = covers(Layout.of(whole), data.draw(st.permutations(parts)))
    exact = sorted(at for part in parts for at in places(part)) == sorted(places(Layout.of(whole)))
    # Cuts along dims are always told apart; odd strides may count as overlapping, never as covering wrongly.
    assert (said is None) == exact or (change == "odd" and said is not None)


def test_a_view_counts_from_the_tensor_not_from_the_storage() -> None:
    storage = torch.arange(100)
    tensor = storage[40:64].view(4, 6)
    part = tensor[1:3, 2:5]
    assert torch.equal(Layout.of(part, start=40).view_of(tensor), part)
