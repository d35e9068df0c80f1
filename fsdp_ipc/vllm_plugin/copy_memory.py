"""The records of `CopyRecorder`: what is known of a storage, and how copies carry it on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_ipc.vllm_plugin.copy_layout import Layout, translate

__all__ = ["Kernel", "Memory", "Piece", "Span", "carried"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements that lie in one memory and came from one incoming tensor, or from a constant.

    Attributes:
        name: The incoming tensor; None for a constant.
        source: Where in that tensor, counted from its first element.
        target: Where in the storage, counted from its first element.
        dtype: Of the target.
        tensor: A view of the incoming memory, only until the piece is proved.
        origin: Storage offset of the incoming tensor's first element, for `tensor`.
        constant: Whether all its elements were equal when it was proved.
    """

    name: str | None
    source: Layout
    target: Layout
    dtype: torch.dtype
    tensor: torch.Tensor | None = None
    origin: int = 0
    constant: bool = False


@dataclass(eq=False)
class Memory:
    """What is known of one storage."""

    storage: StorageWeakRef
    live: bool = False
    pieces: list[Piece] = field(default_factory=list)
    high: int = -1
    """The farthest element that any piece reaches."""
    moved: set[int] = field(default_factory=set)
    """Pieces (by index) that were copied on."""
    names: set[str] = field(default_factory=set)
    """Incoming tensors with any influence on what lies here."""
    spoiled: str | None = None
    """Why its contents are not, or not known to be, plain copies."""
    derived: str | None = None
    """What else was made from its contents."""


@dataclass(eq=False)
class Kernel:
    """A live parameter or buffer, under every name that it has.

    Attributes:
        tensor: The tensor that the model computes with.
        users: The modules that own it, and its name in each.
    """

    tensor: torch.Tensor
    users: list[tuple[nn.Module, str]]

    @property
    def layout(self) -> Layout:
        """Where it lies in its storage."""
        return Layout.of(self.tensor)


@dataclass(frozen=True, slots=True)
class Span:
    """An incoming tensor's bytes in its storage."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype


def carried(
    origin: Memory, dtype: torch.dtype, at: Layout, to_dtype: torch.dtype, to: Layout
) -> tuple[list[Piece], str | None]:
    """The pieces of one memory, as far as `at` takes them along, in their new place `to`."""
    if origin.spoiled or origin.derived:
        return [], origin.spoiled or origin.derived
    carried: list[Piece] = []
    for i, piece in enumerate(origin.pieces):
        if piece.target.apart(at):
            continue
        if piece.dtype != dtype or (
            dtype != to_dtype and piece.tensor is not None and piece.tensor.dtype != dtype
        ):
            return [], "cast more than once"
        moved = translate(piece.target, at, to)
        if moved is not None:
            carried.append(replace(piece, target=moved, dtype=to_dtype))
        else:
            inside = translate(at, piece.target, piece.source if piece.name is not None else piece.target)
            if inside is None:
                return [], "rearranged"
            source = inside if piece.name is not None else piece.source
            carried.append(replace(piece, source=source, target=to, dtype=to_dtype))
        origin.moved.add(i)
    return carried, None if carried else "holds data that the transfer did not bring"
