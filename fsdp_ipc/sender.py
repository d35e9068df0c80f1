"""The one object that a training loop holds: `send(version)` on every rank, and vLLM has the new weights."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ipc.callbacks.base import CallbackRunner, SyncCallback
from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.handles import device_key, sweep_stale
from fsdp_ipc.layout import local_of
from fsdp_ipc.on_failure import FailurePolicy, OnFailure, check_on_failure
from fsdp_ipc.plan import PlanLimits
from fsdp_ipc.source import WeightSource
from fsdp_ipc.stage import Stage
from fsdp_ipc.stats import StageTimer, TransferStats
from fsdp_ipc.verify import SentVerifier, Verify, check_verify
from fsdp_ipc.wire.base import Delivery, Timeouts
from fsdp_ipc.wire.native import NativeDelivery
from fsdp_ipc.wire.stock import DIALECTS, StockDialect, StockWire, dialect_for
from fsdp_ipc.wire.stock_delivery import StockDelivery
from fsdp_ipc.wire.stock_experts import PlacementStrategy
from fsdp_ipc.wire.stock_verify import ReplicaCheck

_VERBS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")

Backend = Literal["auto", "fsdp_ipc", "ipc"]

logger = logging.getLogger(__name__)


class WeightSender:
    """Pushes the weights of a sharded trainer into the vLLM workers on the same devices.

    Built on every trainer rank, collectively; so is every call of `send`.

    Args:
        source: The trainer's weights, for example `DTensorSource(model, dtype=torch.bfloat16)`.
        client: Talks to the server; used on the sender rank only, the others may pass None.
        group: The trainer ranks: a `ProcessGroup` or a `DeviceMesh`; None takes the model's own mesh.
        sender_rank: Rank *in the group* that talks to the server.
        backend: `"fsdp_ipc"` (our plugin in the server), `"ipc"` (stock vLLM), or `"auto"`: what the server has.
        packed: Full tensors are put together in persistent staging slots. False gives every tensor its own
            allocation, which is held on every rank until after the barrier that follows `finish`.
        bucket_bytes: Size of a slot in bytes; None sizes it to the largest tensor, at least 2 GiB.
        num_slots: Slots; with two or more, a bucket is gathered while the worker loads the one before.
        timeouts: See `Timeouts`.
        rank_local_experts: Deliver experts to the worker on the same device only, where the layouts allow it.
        peer_reads: With our plugin: workers read the shards of all ranks of their host where they lie (CUDA IPC over NVLink or
            PCIe), wherever the workers find that they can, so that no rank gathers or stages those. Not with `verify`,
            which needs full tensors; False gathers all.
        expert_placement: For the stock wire, whose workers do not tell which experts they hold: the placement that the
            server uses for its expert parallelism, trainer rank i being beside worker i. None delivers all experts to
            all workers there, and so does a server that balances experts, has redundant ones or contradicts.
        keep_together: Sets of checkpoint names that must reach the server in one bucket; a set that does not fit
            `bucket_bytes`, or names what is not sent, is refused.
        verify: Compare digests of what this trainer meant to send with what each worker holds after loading, before the
            version is published: `"full"` every tensor in every sync, `"sample"` an eighth of them in turn, so that all
            are compared within eight syncs. What can't be compared is in `TransferStats.worker["unverified"]`. On the
            stock wire both compare the replicas with each other (`wire.stock_verify`), and need two or more.
        on_failure: What becomes of the server after a failed `send`: `"raise"` leaves it as it is, `"pause"` leaves it
            paused, so that it can't serve weights of two versions, until a `send` has gone well.
        device: Device of the staging memory; None takes the device of the weights.
        on_unknown_version: What to do with a vLLM release whose stock dialect is not known: `"nearest"` takes the
            nearest one with a warning.
        callbacks: Told of every sync on this rank (`fsdp_ipc.callbacks`); closed with the sender.

    Raises:
        ValueError: No process group, no mesh and no `group`, this rank is no member, or settings that can't hold.
        WeightSyncError: On every rank, when one of them can't be set up: the server does not answer, its
            development routes are missing, or it has no weight-transfer backend that we speak.
    """

    __module__ = "fsdp_ipc"

    def __init__(
        self,
        source: WeightSource,
        client: WeightSyncClient | None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        sender_rank: int = 0,
        backend: Backend = "auto",
        packed: bool = True,
        bucket_bytes: int | None = None,
        num_slots: int = 2,
        timeouts: Timeouts | None = None,
        rank_local_experts: bool = True,
        peer_reads: bool = True,
        expert_placement: PlacementStrategy | None = None,
        keep_together: Sequence[Collection[str]] = (),
        verify: Verify = "off",
        on_failure: OnFailure = "raise",
        device: torch.device | None = None,
        on_unknown_version: Literal["refuse", "nearest"] = "refuse",
        callbacks: Sequence[SyncCallback] = (),
    ) -> None:
        _check_settings(backend, bucket_bytes, num_slots, expert_placement)
        check_verify(verify)
        _check_kinds(source, timeouts, callbacks)
        members = group if group is not None else source.mesh()
        if members is None and dist.is_initialized():
            raise ValueError(
                "which ranks take part? The source has no DTensors, so it names no mesh: pass group=, a ProcessGroup or "
                "a DeviceMesh of the trainer ranks"
            )
        self._timeouts = timeouts if timeouts is not None else Timeouts()
        self._group = TrainerGroup(
            members,  # type: ignore[arg-type]  # None is answered there: no process group
            sender_rank=sender_rank,
            timeout_s=self._timeouts.control_s,
        )
        self._lock = threading.Lock()
        self._closed = False
        self._sync = 0
        self._timer = StageTimer()
        settings = {
            "backend": backend,
            "packed": packed,
            "bucket_bytes": bucket_bytes,
            "num_slots": num_slots,
            "sender_rank": sender_rank,
            "on_failure": on_failure,
            "expert_placement": expert_placement,
            "keep_together": [sorted(names) for names in keep_together],
            "peer_reads": peer_reads,
            "verify": verify,
        }
        self._policy = FailurePolicy(on_failure, client, self._group)
        with self._group.together("set-up", same=[f"{name}={value!r}" for name, value in settings.items()]):
            if self._group.is_sender and client is None:
                raise ValueError("the sender rank needs a client, for example HTTPWeightSyncClient(url)")
            if client is not None:
                _check_client(client, self._timeouts)
            check_on_failure(on_failure, client if self._group.is_sender else None)
            sweep_stale()
            self._device = device if device is not None else _device_of(source)
        self._callbacks = CallbackRunner(callbacks, self._group, client)
        chosen, dialect = self._choose(backend, client, on_unknown_version)
        index = self._device.index if self._device.type == "cuda" else self._group.rank
        key = device_key(self._device, index or 0)
        stock = chosen == "ipc"
        limits = PlanLimits(
            bucket_bytes=bucket_bytes,
            num_slots=num_slots,
            packed=packed,
            alignment=1 if stock and packed else 256,
            back_to_back=stock and packed,
        )
        # Packed chunks of the stock wire must lie in one buffer; everywhere else a parameter's own memory will do.
        export_parameters = not (stock and packed)
        self._stage = Stage(
            source,
            self._group,
            self._device,
            key,
            limits,
            export_parameters=export_parameters,
            # The trainer's digests are of what is sent, so a cast must have happened by then.
            cast_on_arrival=not stock and verify == "off",
            keep_together=keep_together,
        )
        self._delivery: Delivery
        if stock:
            wire = StockWire(dialect, packed)
            replicas = None
            if verify != "off":
                with self._group.together("set-up"):
                    replicas = ReplicaCheck(client, dialect) if self._group.is_sender else None
            self._delivery = StockDelivery(
                self._stage,
                client,
                self._group,
                self._device,
                key,
                wire,
                self._timeouts,
                expert_placement=expert_placement if rank_local_experts else None,
                replicas=replicas,
            )
        else:
            self._delivery = NativeDelivery(
                self._stage,
                client,
                self._group,
                self._device,
                key,
                self._timeouts,
                rank_local_experts=rank_local_experts,
                # The trainer's digests are of full tensors, which nobody would have.
                peer_reads=peer_reads and verify == "off",
                publishes=dialect.weight_version,
                verifier=None if verify == "off" else SentVerifier(verify, self._group, self._device, key),
            )

    @property
    def group(self) -> TrainerGroup:
        """The trainer ranks."""
        return self._group

    @property
    def is_sender(self) -> bool:
        """Whether this rank talks to the server."""
        return self._group.is_sender

    @property
    def spans(self) -> tuple[tuple[str, int, float, float], ...]:
        """The stages of the last `send` on this rank: name, bucket (or -1), begin and end in seconds since it began."""
        return tuple(self._timer.spans)

    def send(self, version: int | str | None = None) -> TransferStats:
        """All ranks, collective: give every worker exactly the weights of now, and publish `version`.

        Returns on every rank only after every worker has them; the weights may then be changed.

        Args:
            version: Published by the server with the weights, where its release can (0.27 and later).

        Returns:
            What was done, as this rank saw it.

        Raises:
            WeightSyncError: On every rank, naming the rank and the cause; the version was not published.
            CallbackError: On every rank, after a sync that went well: a required callback failed.
            RuntimeError: Another `send` of this sender is running, or the sender is closed.
        """
        if self._closed:
            raise RuntimeError("this sender is closed: build a new WeightSender")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("a send is running already: wait until it has returned before the next one")
        try:
            return self._send(None if version is None else str(version))
        finally:
            self._lock.release()

    def close(self) -> None:
        """This rank: give staging memory, control block and groups back. Idempotent, not collective."""
        if self._closed:
            return
        self._closed = True
        self._callbacks.close()
        self._delivery.close()
        self._stage.close()
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, version: str | None) -> TransferStats:
        self._sync += 1
        timer = self._timer = StageTimer()
        try:
            self._callbacks.begin(self._sync, version, timer, lambda: self._stage.plan.num_buckets)
            worker = self._delivery.deliver(version, self._sync, timer)
        except BaseException as caught:  # noqa: BLE001  raised again below
            # Ctrl-C, too: the next send must find nothing half-open.
            error = self._group.tell("prepare", caught)
            self._delivery.recover(f"{type(error).__name__}: {error}")
            self._policy.failed(error, self._sync)
            self._callbacks.failed(error)
            raise error from error.__cause__
        self._policy.succeeded()
        plan = self._stage.plan
        stats = TransferStats(
            version=version,
            sync=self._sync,
            backend=self._delivery.backend,
            bytes=self._stage.wire_bytes,
            num_tensors=self._stage.num_tensors,
            num_buckets=plan.num_buckets,
            resident_bytes=self._stage.resident_bytes,
            peer_bytes=self._stage.peer_bytes,
            seconds=timer.seconds(),
            stage_s=timer.stage_s,
            worker=worker,
        )
        self._callbacks.end(stats)
        return stats

    def _choose(
        self, backend: Backend, client: WeightSyncClient | None, on_unknown: Literal["refuse", "nearest"]
    ) -> tuple[str, StockDialect]:
        """All ranks, collective: the backend that the server has, and the dialect of its release."""
        found: tuple[str, StockDialect] | None = None
        with self._group.together("server"):
            if self._group.is_sender:
                chosen, version = _ask(backend, client)
                stock = chosen == "ipc"
                if stock and self._device.type != "cuda":
                    raise ValueError(
                        "the stock ipc backend moves CUDA memory only, and these weights are on the CPU: start the "
                        'server with --weight-transfer-config \'{"backend":"fsdp_ipc"}\''
                    )
                found = chosen, _dialect(version, on_unknown if stock else None)
        found = self._group.broadcast_object(found, "server")
        if self._group.is_sender:
            logger.info("weight transfer over the %s wire, %d trainer rank(s)", found[0], self._group.size)
        return found


def _ask(backend: Backend, client: Any) -> tuple[str, str]:
    info = client.server_info() if hasattr(client, "server_info") else None
    if info is None:
        return ("fsdp_ipc" if backend == "auto" else backend), str(getattr(client, "version", ""))
    if not info.dev_mode:
        raise ValueError(
            f"the server (vLLM {info.version}) has no weight-transfer routes: start it with VLLM_SERVER_DEV_MODE=1"
        )
    if backend == "auto":
        if info.backend in ("fsdp_ipc", "ipc"):
            return str(info.backend), info.version
        if info.backend_known:
            raise ValueError(
                f"the server (vLLM {info.version}) was started with weight-transfer backend {info.backend!r}; expected "
                '"fsdp_ipc" (this package installed beside vLLM and --weight-transfer-config '
                '\'{"backend":"fsdp_ipc"}\') or "ipc"'
            )
        return "fsdp_ipc", info.version
    if info.backend_known and info.backend != backend:
        raise ValueError(
            f"backend={backend!r} was asked for, but the server (vLLM {info.version}) was started with "
            f'{info.backend!r}: start it with --weight-transfer-config \'{{"backend":"{backend}"}}\''
        )
    return backend, info.version


def _dialect(version: str, on_unknown: Literal["refuse", "nearest"] | None) -> StockDialect:
    """The dialect of a release; None for our own wire, which every release from 0.22 on speaks."""
    if not version:
        return DIALECTS[-1]
    if on_unknown is not None:
        return dialect_for(version, on_unknown=on_unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dialect_for(version, on_unknown="nearest")


def _check_client(client: Any, timeouts: Timeouts) -> None:
    """Refuse what is no client; hold its requests to the sender's own time-out."""
    # By attribute: from Python 3.12 on, `isinstance` does not see the verbs of a client that passes them on to another.
    missing = [verb for verb in _VERBS if not callable(getattr(client, verb, None))]
    if missing:
        raise TypeError(
            f"expected a client such as HTTPWeightSyncClient(url), got {type(client).__name__} without "
            f"{', '.join(missing)}: {client!r}"
        )
    if getattr(client, "request_timeout_s", 0.0) > timeouts.request_s:
        client.request_timeout_s = timeouts.request_s


def _check_kinds(source: Any, timeouts: Any, callbacks: Any) -> None:
    if any(not callable(getattr(source, name, None)) for name in ("items", "tensors", "mesh")):
        raise TypeError(f"expected a source such as DTensorSource(model), got {type(source).__name__}")
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise TypeError(
            f"timeouts={timeouts!r}: expected Timeouts(request_s=..., transfer_s=..., control_s=...)"
        )
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks={callbacks!r}: expected a list of callbacks")


def _check_settings(backend: str, bucket_bytes: Any, num_slots: int, expert_placement: str | None) -> None:
    if backend not in ("auto", "fsdp_ipc", "ipc"):
        raise ValueError(f"backend={backend!r}: expected 'auto', 'fsdp_ipc' or 'ipc'")
    if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or bucket_bytes <= 0):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected a positive whole number of bytes, or None")
    if num_slots < 1:
        raise ValueError(f"num_slots={num_slots}: expected 1 or more")
    if expert_placement not in (None, "linear", "round_robin"):
        raise ValueError(
            f"expert_placement={expert_placement!r}: expected 'linear', 'round_robin' or None; leave it out for a server "
            "that balances its experts"
        )


def _device_of(source: WeightSource) -> torch.device:
    mesh = source.mesh()
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    for held in source.tensors():
        if isinstance(held, torch.Tensor):
            device = local_of(held).device
            return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    return torch.device("cpu")
