"""A worker of the native wire that loads into a model as vLLM's does, and verifies like the plugin; without vLLM.

Tensors are read out of the trainer's memory by `NativeWorker`, go through the plugin's copy plan into live parameters of
`tests.plain_reload` modules, and are compared with the trainer's digests by the plugin's verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.vllm_plugin.copy_layout import Layout
from fsdp_ipc.vllm_plugin.copy_memory import Piece
from fsdp_ipc.vllm_plugin.copy_plan import CopyPlanLoader
from fsdp_ipc.vllm_plugin.payload import UpdateInfo, parse_update
from fsdp_ipc.vllm_plugin.verify import LiveVerifier
from tests.native_worker import NativeWorker
from tests.plain_reload import Layer, Model, PlainReload, computing_loader, parameter


class VerifyingWorker(NativeWorker):
    """A `NativeWorker` with a model.

    Args:
        index: Which endpoint it takes.
        model: The model; `toy_model()` fits the toy trainer of `tests.toy`.
        tamper: Called with the model after every load, before the digests are taken.
        settings: As for `NativeWorker`.
    """

    def __init__(
        self, index: int, model: Model, *, tamper: Callable[[Model], object] | None = None, **settings: Any
    ) -> None:
        super().__init__(index, **settings)
        self.model = model
        self.tamper = tamper
        self.loader = CopyPlanLoader(model, None, reload=PlainReload)
        self.reports: list[dict[str, Any]] = []
        self._verifier = LiveVerifier(torch.device("cpu"))
        self._info: UpdateInfo | None = None
        self._buckets: dict[str, Any] = {}

    def update(self, update_info: dict[str, Any]) -> None:
        """As the engine: open the rank's file of digests, then read."""
        info = parse_update(update_info)
        if isinstance(info, UpdateInfo):
            if info.plan is not None:
                self._buckets[info.plan_digest] = info.plan.buckets_for(self._endpoint.device)
            if info.digests:
                rows = sum(len(rows) for rows in self._buckets[info.plan_digest])
                self._verifier.open(info.digests[self._endpoint.device], rows)
        super().update(update_info)

    def _receive(self, info: Any, control: ControlBlock) -> None:
        self._info = info
        super()._receive(info, control)

    def finish(self) -> None:
        """Load, verify, report."""
        super().finish()
        info = self._info
        assert info is not None
        assert self._control is not None
        basis, landed = self._load(info)
        if info.digests is None:
            super().say_closed()
            return
        who = f"worker {self.index} ({self._endpoint.device})"
        try:
            counts = self._verifier.check(info.sync, self._buckets[info.plan_digest], basis, landed, who)
        except Exception as error:
            self.loader.drop(str(error))
            self._control.fail(info.sync, str(error))
            raise
        self.reports.append(
            {
                "kind": "sync",
                "sync": info.sync,
                "num_tensors": len(self.weights),
                "verified": counts.verified,
                "unverified": counts.unverified,
                "verified_parts": counts.verified_parts,
            }
        )
        self._control.write_report(self.reports[-1])
        super().say_closed()

    def say_closed(self) -> None:
        """Not before the digests were compared."""

    def _load(self, info: UpdateInfo) -> tuple[object, Callable[[str], Any]]:
        """Load what was read; where it lies afterwards."""
        self.loader.start(f"{info.plan_digest}:{info.sync}")
        self.loader.load(0, list(self.weights.items()), keep_alive=False)
        self.loader.finish()
        if self.tamper is not None:
            self.tamper(self.model)
        return self.loader.where()

    def close(self) -> None:
        """Give everything back."""
        super().close()
        self._verifier.close()


class HoldingWorker(VerifyingWorker):
    """A `VerifyingWorker` without a model: what it read is what it holds, whatever the names."""

    def __init__(self, index: int, **settings: Any) -> None:
        super().__init__(index, Model(), **settings)

    def _load(self, info: UpdateInfo) -> tuple[object, Callable[[str], Any]]:
        """Nothing to load."""
        return self.weights, self._landed

    def _landed(self, name: str) -> list[tuple[torch.Tensor, Piece]]:
        tensor = self.weights[name]
        whole = Layout.of(tensor)
        return [(tensor, Piece(name=name, source=whole, target=whole, dtype=tensor.dtype))]


def toy_model(width: int = 13, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Where `tests.toy.Toy` goes: four layers merged in two, a padded embedding, one computed weight, one that is cast."""

    def merged(names: Iterable[int]) -> Layer:
        targets = {
            f"layers.{n}.{part}": (part, at) for at, n in enumerate(names) for part in ("weight", "bias")
        }
        return Layer(
            targets,
            weight=parameter(2 * width, width, dtype=dtype, loader=_stacked),
            bias=parameter(2 * width, dtype=dtype, loader=_stacked),
        )

    return Model(
        embed=Layer({"embed.weight": ("weight",)}, weight=parameter(16, width, dtype=dtype, loader=_padded)),
        first=merged((0, 2)),
        second=merged((3, 1)),
        norm=Layer(
            {"norm.weight": ("weight",), "norm.bias": ("bias",)},
            weight=parameter(width, dtype=dtype),
            bias=parameter(width, dtype=dtype, loader=computing_loader),
        ),
        one=Layer(
            {"one.weight": ("weight",)},
            weight=parameter(width, 1, dtype=dtype, loader=lambda p, t: p.data.copy_(t.t())),
        ),
        router=Layer({"bias_of_router": ("bias",)}, bias=parameter(5, dtype=torch.bfloat16)),
    )


def _stacked(param: torch.nn.Parameter, tensor: torch.Tensor, at: int) -> None:
    param.data.narrow(0, at * tensor.shape[0], tensor.shape[0]).copy_(tensor)


def _padded(param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    param.data[: tensor.shape[0]].copy_(tensor)
    param.data[tensor.shape[0] :].fill_(0)
