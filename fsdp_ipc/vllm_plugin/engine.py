"""The engine that vLLM runs in each worker: it takes a sync's tensors out of the memory of the trainer rank beside it.

vLLM calls `init_transfer_engine` once a session, then `start_weight_update`, `update_weights` and
`finish_weight_update` for each sync. While a sync is loaded, trainer rank and worker talk to each other through their
control block alone: the trainer says how many buckets are complete, the worker how many it has read. A sync is loaded in
`update_weights`, which brings what the worker has to know; or, where it goes like the one before, in
`start_weight_update` already, as the control block's text tells. Each is one call, so no step of the model runs between.
Works with vLLM 0.26 to 0.33, on CUDA and on CPU.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from fsdp_ipc.control import ControlBlock
from fsdp_ipc.version import __version__
from fsdp_ipc.vllm_plugin import completeness
from fsdp_ipc.vllm_plugin.copy_plan import CopyPlanLoader
from fsdp_ipc.vllm_plugin.endpoint import claim_endpoint, readable
from fsdp_ipc.vllm_plugin.experts import held_experts
from fsdp_ipc.vllm_plugin.loader import LoadCounts, NamedTensors, WeightLoader, half_open_layers, heal
from fsdp_ipc.vllm_plugin.payload import AbortInfo, InitInfo, UpdateInfo, parse_update
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow
from fsdp_ipc.vllm_plugin.session import KnownPlan, Session
from fsdp_ipc.vllm_plugin.verify import LiveVerifier, VerifyCounts

logger = logging.getLogger(__name__)

TOKEN_ENV = "FSDP_IPC_TOKEN"
MAX_PLANS = 8

OFFER_S = 0.03
"""How long a start waits whether the trainer offers a sync like the last one; the server does nothing else meanwhile."""


class UpdateAbortedError(RuntimeError):
    """The trainer asked for the open update to be dropped. Raised so that vLLM closes its update session too."""


@dataclass
class _Update:
    """One sync between the call that loads it and `finish_weight_update`."""

    sync: int
    loader: WeightLoader
    num_buckets: int
    keep_alive: bool
    """Whether the trainer's memory stays as it is until the update is closed."""
    repeatable: UpdateInfo | None = None
    verified_buckets: list[list[TensorRow]] | None = None
    """What the trainer left digests of, if it did."""
    open_s: float = 0.0
    load_s: float = 0.0
    wait_s: float = 0.0


class FSDPIPCWeightTransferEngine(WeightTransferEngine):
    """Receives weights over the native wire; vLLM's factory builds one in each worker.

    The constructor's arguments differ between vLLM releases and go to vLLM's base class as they come.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session: Session | None = None
        self._update: _Update | None = None
        self._loader: WeightLoader | None = None
        self._verifier = LiveVerifier(self.device)

    # The four routes.

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Check a handshake as decoded from JSON.

        Raises:
            ValueError: Naming the field that is wrong.
        """
        return InitInfo.from_json(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo | AbortInfo:
        """Check an update as decoded from JSON.

        Raises:
            ValueError: Naming the field that is wrong.
        """
        return parse_update(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Start a session with the trainer rank on this worker's device; an earlier session ends.

        Raises:
            ValueError: The token is wrong, or no trainer rank is on this device or free.
        """
        _check_token(init_info.token)
        self._drop_session()
        claim = claim_endpoint(init_info.endpoints, self.device, self.worker_index)
        try:
            control = ControlBlock.open(claim.endpoint.control)
        except BaseException:
            claim.close()
            raise
        self._session = Session(
            session=init_info.session, claim=claim, control=control, timeout_s=init_info.timeout_s
        )
        reads, unread = readable(init_info.endpoints, self.device)
        control.write_report(
            {
                "kind": "hello",
                "reads": reads,
                "unread": unread,
                "worker_index": self.worker_index,
                "pid": os.getpid(),
                "vllm": vllm_version,
                "plugin": __version__,
                "experts": held_experts(self.model),
            }
        )
        logger.info(
            "Weight sync session %s: worker %d reads from %s.",
            init_info.session,
            self.worker_index,
            claim.endpoint.device,
        )

    def start_weight_update(self) -> None:
        """Check that a session is open and the model whole; load at once what the trainer offers.

        Raises:
            ValueError: No handshake came before.
            TimeoutError: What was offered did not come in time.
            PeerError: The trainer rank failed or its process is gone.
        """
        if self._session is None:
            raise ValueError(
                "fsdp_ipc: no session. Call init_weight_transfer_engine before start_weight_update."
            )
        self._update = None
        if self._loader is None:
            self._loader = self._make_loader()
        # What somebody else's failed reload left half-open is found by the loader's own start.
        self._loader.abort()
        self._receive_offered(self._session)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one sync. Returns after the last bucket has been read."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo | AbortInfo) -> None:
        """Load bucket after bucket as the trainer completes them.

        Raises:
            UpdateAbortedError: This was the request to abort.
            ValueError: Session, sync number, plan or handles are not acceptable; no data was moved.
            TimeoutError: The trainer did not complete a bucket in time.
            PeerError: The trainer rank failed or its process is gone.
        """
        session = self._session
        if session is None or not hmac.compare_digest(session.session, update_info.session):
            raise ValueError(
                f"fsdp_ipc: unknown session {update_info.session}. Another trainer has taken over or the worker was "
                "restarted; call init_weight_transfer_engine again."
            )
        if isinstance(update_info, AbortInfo):
            self._abort_update()
            raise UpdateAbortedError(f"fsdp_ipc: update aborted: {update_info.abort}")
        try:
            self._load(session, self._open_update(session, update_info))
        except BaseException as error:  # noqa: BLE001  raised again there
            self._fail(session, update_info.sync, error)

    def finish_weight_update(self) -> None:
        """Let the loader finalize, then write the report that the trainer reads.

        Raises:
            ValueError: No update was received since `start_weight_update`.
            IncompleteUpdateError: Some parameter did not get all of its weights.
            VerificationError: A parameter does not hold what the trainer meant to send.
        """
        session, update = self._session, self._update
        if session is None or update is None:
            raise ValueError("fsdp_ipc: nothing to finish: no update was received since start_weight_update.")
        began = time.monotonic()
        try:
            counts = update.loader.finish()
            if counts.queued:
                self._synchronize()
            verified = self._verify(session, update)
        except BaseException as error:  # noqa: BLE001  raised again there
            self._fail(session, update.sync, error)
        self._update = None
        session.repeatable = update.repeatable
        update.load_s += time.monotonic() - began - (verified.seconds if verified is not None else 0.0)
        session.control.write_report(_sync_report(update, counts, verified))
        session.control.consume(update.sync, update.num_buckets + 1)

    def shutdown(self) -> None:
        """Release the trainer's memory; vLLM calls this when a trainer leaves and when the worker ends."""
        self._drop_session()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Part of the engine's interface in vLLM 0.26 only; the trainer's side of this backend is `WeightSender`."""
        raise NotImplementedError("fsdp_ipc: send weights with fsdp_ipc.WeightSender in the trainer.")

    # Who we are.

    @property
    def worker_index(self) -> int:
        """Index over all data-parallel replicas of this server, as vLLM counts list-form updates."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)

    # One sync.

    def _receive_offered(self, session: Session) -> None:
        """Receive a sync that goes like the last one, without a request, if the trainer offers it within a moment."""
        control, sync, last = session.control, session.last_sync + 1, session.repeatable
        if last is None or not control.wait_offered(sync, OFFER_S):
            control.decline(sync)
            return
        try:
            control.take(sync)
            views = self._open_update(session, replace(last, sync=sync))  # while the other ranks hear of it
            if control.wait_confirmed(sync, session.timeout_s):
                self._load(session, views)
            else:
                self._abort_update()
        except BaseException as error:  # noqa: BLE001  raised again there
            self._fail(session, sync, error)

    def _open_update(self, session: Session, info: UpdateInfo) -> list[NamedTensors]:
        """All that comes before the first byte is moved; returns the tensors by bucket, as they lie in the trainer's memory."""
        if info.sync <= session.last_sync:
            raise ValueError(
                f"fsdp_ipc: sync {info.sync} comes after sync {session.last_sync}; expected a higher number."
            )
        if self._update is not None:
            self._abort_update()
        plan = self._known_plan(session, info)
        views = session.views(info, plan, self.device)
        if self._loader is None or self._loader.model is not self.model:
            self._loader = self._make_loader()
        self._loader.examined, self._loader.casts = plan.examined, plan.casts
        update = _Update(
            sync=info.sync, loader=self._loader, num_buckets=len(views), keep_alive=not plan.packed
        )
        if plan.packed:
            digests: dict[str, str] | None = None if info.digests is None else {}
            update.repeatable = replace(info, plan=None, allocations=None, digests=digests)
        if info.digests is not None:
            update.verified_buckets = plan.buckets
            if info.digests:
                name = info.digests.get(session.device)
                if name is None:
                    raise ValueError(f"fsdp_ipc: no file of digests for device {session.device}.")
                self._verifier.open(name, sum(len(rows) for rows in plan.buckets))
        began = time.monotonic()
        update.loader.start(f"{info.plan_digest}:{info.epoch}")
        update.open_s = time.monotonic() - began
        self._update = update
        return views

    def _load(self, session: Session, views: list[NamedTensors]) -> None:
        """Load bucket after bucket as the trainer completes them."""
        control, update = session.control, self._update
        assert update is not None
        sync = session.last_sync = update.sync
        session.repeatable = None
        began = time.monotonic()
        for bucket, tensors in enumerate(views):
            waited = time.monotonic()
            control.wait_produced(sync, bucket + 1, session.timeout_s)
            update.wait_s += time.monotonic() - waited
            if tensors:
                update.loader.load(bucket, tensors, keep_alive=update.keep_alive)
                # The trainer may overwrite the bucket as soon as it is consumed, so nothing may still be reading it.
                self._synchronize()
            control.consume(sync, bucket + 1)
        # A trainer that gave up while this worker was slow may write to its memory again, and the finish may be queued.
        control.wait_produced(sync, len(views), session.timeout_s)
        update.load_s = update.open_s + time.monotonic() - began - update.wait_s

    def _verify(self, session: Session, update: _Update) -> VerifyCounts | None:
        """Compare what the live parameters hold with what the trainer meant to send, if it left digests."""
        if update.verified_buckets is None:
            return None
        loader = update.loader
        if not isinstance(loader, CopyPlanLoader):
            raise TypeError(f"fsdp_ipc: a {type(loader).__name__} cannot tell where weights lie.")
        basis, landed = loader.where()
        who = f"worker {self.worker_index} ({session.device})"
        try:
            return self._verifier.check(update.sync, update.verified_buckets, basis, landed, who)
        except BaseException:
            # Whatever wrote the wrong bytes, the next sync shall not repeat it.
            loader.drop("the weights were not those that the trainer sent")
            raise

    def _make_loader(self) -> WeightLoader:
        return CopyPlanLoader(self.model, self.model_config)

    def _known_plan(self, session: Session, info: UpdateInfo) -> KnownPlan:
        if info.plan is None:
            known = session.plans.get(info.plan_digest)
            if known is None:
                raise ValueError(f"fsdp_ipc: unknown plan {info.plan_digest}; send the plan along.")
            return known
        buckets = info.plan.buckets_for(session.device)
        casts = {row.name: row.dtype for rows in buckets for row in rows if row.cast_from is not None}
        known = KnownPlan(buckets=buckets, packed=info.plan.packed, casts=casts)
        known.examined = completeness.check(self.model, known.buckets, vllm_config=self.vllm_config)
        session.plans.pop(info.plan_digest, None)
        session.plans[info.plan_digest] = known
        while len(session.plans) > MAX_PLANS:
            session.plans.pop(next(iter(session.plans)))
        return known

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _abort_update(self) -> None:
        """Drop an open update and make the model's structure whole, whoever left it so."""
        self._update = None
        if self._session is not None:
            self._session.repeatable = None
        if self._loader is None:
            self._loader = self._make_loader()
        self._loader.abort()
        # Somebody else's failed reload, such as one of vLLM's own.
        if half_open_layers(self.model):
            logger.warning("The model was left half-open by an earlier reload; restoring its parameters.")
            heal(self.model, self.model_config)

    def _fail(self, session: Session, sync: int, error: BaseException) -> NoReturn:
        """Tell the trainer rank first, because it may be waiting for this worker; then restore, then raise."""
        try:
            session.control.fail(sync, f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception("Could not tell the trainer rank that the update failed.")
        try:
            self._abort_update()
        except Exception:
            logger.exception("Could not restore the model after a failed update; restart this server.")
        raise error

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._abort_update()
        self._loader = None
        self._verifier.close()
        session.close_buffers()
        session.control.close()
        session.claim.close()


def _check_token(token: str | None) -> None:
    expected = os.environ.get(TOKEN_ENV)
    if expected and not hmac.compare_digest((token or "").encode(), expected.encode()):
        raise ValueError(
            f"fsdp_ipc: the trainer's token does not match this server's. Set {TOKEN_ENV} to the same value for both."
        )


def _sync_report(update: _Update, counts: LoadCounts, verified: VerifyCounts | None) -> dict[str, Any]:
    report = {
        "kind": "sync",
        "sync": update.sync,
        "open_s": update.open_s,
        "load_s": update.load_s,
        "wait_s": update.wait_s,
        "num_tensors": counts.num_tensors,
        "replayed_params": counts.replayed_params,
        "loader_params": counts.loader_params,
        "reasons": counts.reasons,
    }
    if verified is not None:
        report |= {
            "verified": verified.verified,
            "unverified": verified.unverified,
            "verify_s": verified.seconds,
        }
        report["verify_share"] = [verified.share, verified.num_shares]
        report["verified_parts"] = verified.verified_parts
    return report
