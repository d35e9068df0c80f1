"""How many bytes a push moves between ranks: counted where the collectives are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def counted_traffic() -> Iterator[Counter[str]]:
    """Count what this rank receives from others in all-gathers and broadcasts of tensor data, which travel as bytes.

    Yields:
        `bytes` and `calls`, filled while the block runs.
    """
    found: Counter[str] = Counter()
    saved: dict[str, Callable[..., Any]] = {}

    def gather(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: torch.Tensor, piece: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Votes of the control plane are int64.
            if out.dtype == torch.uint8:
                found["bytes"] += out.nbytes - piece.nbytes
                found["calls"] += 1
            return original(out, piece, *args, **kwargs)

        return call

    def broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.uint8:
                found["bytes"] += tensor.nbytes
                found["calls"] += 1
            return original(tensor, *args, **kwargs)

        return call

    for name, wrap in (
        ("all_gather_single", gather),
        ("all_gather_into_tensor", gather),
        ("broadcast", broadcast),
    ):
        if hasattr(dist, name):
            saved[name] = getattr(dist, name)
            setattr(dist, name, wrap(saved[name]))
    try:
        yield found
    finally:
        for name, original in saved.items():
            setattr(dist, name, original)
