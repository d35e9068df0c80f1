"""The ways to push weights that a benchmark compares: ours, ours over the stock wire, vLLM's own trainer, a file."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import requests
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ipc import DTensorSource, WeightSender
from fsdp_ipc.clients import HTTPWeightSyncClient
from fsdp_ipc.verify import Verify
from recipes.probe import WorkerProbe
from recipes.ranks import on_rank0
from recipes.shapes import checkpoint_tensors, sent_naming

VARIANTS = (
    "vllm_packed",
    "vllm_unpacked",
    "stock_packed",
    "stock_unpacked",
    "ours",
    "ours_unpacked",
    "ours_everywhere",
    "ours_gathered",
    "ours_sampled",
    "ours_verified",
    "file",
)
"""vLLM's own trainer function; our sender over the stock wire; our sender with our plugin (packed,
unpacked, every expert to every worker, ranks gather what workers could read where it lies, `verify="sample"`,
`verify="full"`); a file in between."""

Span = tuple[str, int, float, float]

_VERIFY: dict[str, Verify] = {"sampled": "sample", "verified": "full"}


class Unavailable(Exception):  # noqa: N818 - an outcome, not a failure
    """This variant cannot run here; the text says why."""


@contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Count the HTTP requests of this process by route while the block runs."""
    found: Counter[str] = Counter()
    original = HTTPConnection.putrequest  # where every client of Python's ends, vLLM's own included

    def putrequest(self: HTTPConnection, method: str, url: str, *args: Any, **kwargs: Any) -> None:
        found[urlsplit(url).path] += 1
        original(self, method, url, *args, **kwargs)

    HTTPConnection.putrequest = putrequest  # type: ignore[method-assign]
    try:
        yield found
    finally:
        HTTPConnection.putrequest = original  # type: ignore[method-assign]


class Variant(Protocol):
    """One way to push. Every method is called on all ranks, in step."""

    server: str

    def send(self) -> dict[str, Any]:
        """Push the weights of now; what is known of it besides its time (stages, bytes)."""

    def spans(self) -> list[Span]:
        """Stages of the last push: name, bucket, begin and end in seconds."""

    def close(self) -> None:
        """Give everything back."""


class OurVariant:
    """`WeightSender`, over either wire."""

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        backend: str,
        packed: bool,
        experts: str,
        dtype: torch.dtype,
        bucket_bytes: int | None,
        num_slots: int,
        group: Any,
        rank_local_experts: bool,
        peer_reads: bool,
        verify: Verify,
    ) -> None:
        self.server = backend
        source = DTensorSource(model, dtype=dtype, keep=(), naming=sent_naming(model, experts))
        self._sender = WeightSender(
            source,
            HTTPWeightSyncClient(url),
            group=group,
            backend=backend,  # type: ignore[arg-type]
            packed=packed,
            bucket_bytes=bucket_bytes,
            num_slots=num_slots,
            rank_local_experts=rank_local_experts,
            peer_reads=peer_reads,
            verify=verify,
        )

    def send(self) -> dict[str, Any]:
        stats = self._sender.send()
        return {
            "stage_s": dict(stats.stage_s),
            "bytes": stats.bytes,
            "tensors": stats.num_tensors,
            "buckets": stats.num_buckets,
            "resident_bytes": stats.resident_bytes,
            "peer_bytes": stats.peer_bytes,
            "worker": stats.worker,
        }

    def spans(self) -> list[Span]:
        return list(self._sender.spans)

    def close(self) -> None:
        self._sender.close()


class VLLMVariant:
    """vLLM's own trainer function, as its examples call it: full tensors one by one, then `trainer_send_weights`."""

    def __init__(
        self, model: nn.Module, url: str, *, packed: bool, experts: str, dtype: torch.dtype, buffer_bytes: int
    ) -> None:
        self.server = "ipc"
        self._model, self._url, self._experts, self._dtype = model, url, experts, dtype
        self._session = requests.Session()
        self._session.trust_env = False
        try:
            module = importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
        except ImportError as error:
            raise Unavailable(f"vLLM is not importable in the trainer: {error}") from error
        send = getattr(module.IPCWeightTransferEngine, "trainer_send_weights", None)
        arguments = getattr(module, "IPCTrainerSendWeightsArgs", None)
        if send is None or arguments is None:
            raise Unavailable("this release of vLLM has no trainer_send_weights of the form of 0.22 to 0.26")
        self._send = send
        self._arguments = arguments(
            send_mode="http", url=url, packed=packed, packed_buffer_size_bytes=buffer_bytes
        )
        self._post("init_weight_transfer_engine", {"init_info": {}})

    def send(self) -> dict[str, Any]:
        sent: Counter[str] = Counter()
        self._post("start_weight_update")
        self._send(self._tensors(sent), self._arguments)
        self._post("finish_weight_update")
        return {"bytes": sent["bytes"], "tensors": sent["tensors"]}

    def spans(self) -> list[Span]:
        return []

    def close(self) -> None:
        self._session.close()

    def _tensors(self, sent: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint_tensors(self._model, self._experts, self._dtype):
            sent["bytes"] += tensor.nbytes
            sent["tensors"] += 1
            yield name, tensor

    def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        def post() -> None:
            answer = self._session.post(f"{self._url}/{route}", json=body, timeout=300)
            if not answer.ok:
                raise RuntimeError(f"{route}: status {answer.status_code}: {answer.text[:2000]}")

        on_rank0(post)


class FileVariant:
    """The straight way: `full_tensor()` of all parameters, `torch.save`, and the workers load the file."""

    def __init__(
        self, model: nn.Module, probe: WorkerProbe, path: Path, *, experts: str, dtype: torch.dtype
    ) -> None:
        self.server = "fsdp_ipc"
        self._model, self._probe, self._path = model, probe, path
        self._experts, self._dtype = experts, dtype

    def send(self) -> dict[str, Any]:
        full = dict(checkpoint_tensors(self._model, self._experts, self._dtype))
        nbytes = sum(tensor.nbytes for tensor in full.values())

        def save_and_load() -> None:
            torch.save({name: tensor.cpu() for name, tensor in full.items()}, self._path)
            self._probe.call("check_load_file", str(self._path))

        on_rank0(save_and_load)
        return {"bytes": nbytes, "tensors": len(full)}

    def spans(self) -> list[Span]:
        return []

    def close(self) -> None:
        if dist.get_rank() == 0:
            self._path.unlink(missing_ok=True)


def make_variant(
    name: str,
    model: nn.Module,
    *,
    urls: dict[str, str],
    probe: Callable[[str], WorkerProbe],
    experts: str,
    dtype: torch.dtype,
    bucket_bytes: int | None,
    stock_bucket_bytes: int,
    num_slots: int,
    group: Any,
    folder: Path,
) -> Variant:
    """All ranks, collective: the variant of that name.

    Raises:
        Unavailable: It cannot run here.
        ValueError: There is none of that name.
    """
    name, tuned = split_name(name)
    if tuned is not None:
        bucket_bytes, num_slots = tuned
    kind, _, mode = name.partition("_")
    server = "fsdp_ipc" if kind in ("ours", "file") else "ipc"
    if server not in urls:
        raise Unavailable(f"no server with backend {server}")
    device = next(model.parameters()).device
    if server == "ipc" and device.type != "cuda":
        raise Unavailable("the stock ipc backend moves CUDA memory only")
    if kind == "file":
        return FileVariant(model, probe("fsdp_ipc"), folder / "weights.pt", experts=experts, dtype=dtype)
    if kind == "vllm":
        return VLLMVariant(
            model,
            urls[server],
            packed=mode == "packed",
            experts=experts,
            dtype=dtype,
            buffer_bytes=max(stock_bucket_bytes, _largest(model, dtype)),
        )
    return OurVariant(
        model,
        urls[server],
        backend=server,
        packed=mode != "unpacked",
        experts=experts,
        dtype=dtype,
        bucket_bytes=max(stock_bucket_bytes, _largest(model, dtype)) if kind == "stock" else bucket_bytes,
        num_slots=num_slots,
        group=group,
        rank_local_experts=mode != "everywhere",
        peer_reads=mode != "gathered",
        verify=_VERIFY.get(mode, "off"),
    )


def split_name(name: str) -> tuple[str, tuple[int, int] | None]:
    """`ours@512x3` is `ours` with three slots of 512 MiB: the variant, and bytes and number of slots where given.

    Raises:
        ValueError: There is no such variant, or the slots are not `MiBxnumber`.
    """
    base, _, slots = name.partition("@")
    found = re.fullmatch(r"(\d+)x(\d+)", slots)
    if base not in VARIANTS or (slots and (found is None or not base.startswith("ours"))):
        raise ValueError(
            f"variant {name!r}: expected one of {', '.join(VARIANTS)}; those of ours may name MiB and number of their "
            "slots, as in ours@512x3"
        )
    return base, (int(found[1]) << 20, int(found[2])) if found else None


def _largest(model: nn.Module, dtype: torch.dtype) -> int:
    return max(p.numel() for p in model.parameters()) * dtype.itemsize
