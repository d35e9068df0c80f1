"""The sender's requests of the native wire: sent from threads, so that the trainer gathers while they are out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fsdp_ipc.clients.base import OverlappingClient, WeightSyncClient, refuse_asleep
from fsdp_ipc.plan import TransferPlan
from fsdp_ipc.rows import TensorRow
from fsdp_ipc.wire.base import outcome, quietly


class NativeRequests:
    """Start, update and finish of one sync after the other, and what is still open on the server.

    Args:
        client: Of the sender; None on every other rank, where all methods do nothing and nothing is ever out.
    """

    def __init__(self, client: WeightSyncClient | None) -> None:
        self._client = client
        self._threads = None if client is None else ThreadPoolExecutor(2, thread_name_prefix="fsdp_ipc")
        self._soon = client if isinstance(client, OverlappingClient) else None
        self._may_be_open = False
        self.started: Future[None] | None = None
        self.updated: Future[None] | None = None
        self.finished: Future[None] | None = None

    @property
    def overlapping(self) -> bool:
        """Whether the client can have two requests out at the same time."""
        return self._soon is not None

    @property
    def loading(self) -> Future[None] | None:
        """The request in which the workers load."""
        return self.updated or self.started

    def start(self, close_first: str | None) -> None:
        """Open an update on the server.

        Args:
            close_first: The session in whose name an update that is open already is closed; None leaves it alone.
        """
        client = self._client
        self.started = self.updated = self.finished = None
        self._may_be_open = False
        if client is None or self._threads is None:
            return
        if self._soon is not None and close_first is None and self._soon.surely_awake:
            self.started = self._soon.start_weight_update_soon()
            return

        def start() -> None:
            refuse_asleep(client)
            try:
                client.start_weight_update()
            except Exception as error:
                # A trainer that was killed in the middle of an update has left it open, and a handshake does not close it.
                if close_first is None or "already active" not in str(error):
                    raise
                self._close_update(client, close_first, "left open by an earlier trainer")
                client.start_weight_update()

        self.started = self._threads.submit(start)

    def update(self, payload: dict[str, Any]) -> None:
        """Send the payload after the start, if that goes well: what it ends with is the start's to tell."""
        client, started = self._client, self.started
        if client is None or self._threads is None or started is None:
            return

        def update() -> None:
            # Not into a later sync, if this one was given up meanwhile.
            if started.exception() is None and self.started is started:
                client.update_weights(payload)

        self.updated = self._threads.submit(update)

    def finish(self, version: str | None) -> None:
        """Close the update and publish the version; may be called while the start is out, if the client can do that."""
        if self._soon is not None:
            self.finished = self._soon.finish_weight_update_soon(version)
        elif self._client is not None and self._threads is not None:
            self.finished = self._threads.submit(self._client.finish_weight_update, version)

    def end(self, timeout_s: float) -> None:
        """After a failure: wait for whatever is out."""
        deadline = time.monotonic() + timeout_s
        for request in (self.started, self.updated, self.finished):
            outcome(request, max(0.0, deadline - time.monotonic()))

    def may_be_open(self) -> None:
        """Some workers may have begun: what is open on the server is closed by `recover` even if the start failed."""
        self._may_be_open = True

    def recover(self, session: str, reason: str) -> None:
        """After a failure: close the half-open update on the server, as well as can be."""
        is_open = (self._may_be_open or _went_well(self.started)) and not _went_well(self.finished)
        self.started = self.updated = self.finished = None
        self._may_be_open = False
        if self._client is not None and is_open:
            self._close_update(self._client, session, reason)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _close_update(self, client: WeightSyncClient, session: str, reason: str) -> None:
        quietly(lambda c: c.update_weights({"session": session, "abort": reason[:2000]}), client)
        quietly(lambda c: c.finish_weight_update(), client)


def _went_well(request: Future[None] | None) -> bool:
    return request is not None and request.done() and request.exception() is None


def plan_json(plan: TransferPlan, keys: Sequence[str]) -> dict[str, Any]:
    """A plan as it travels to the workers (`vllm_plugin.payload_plan`).

    Args:
        plan: The plan.
        keys: Device keys of the trainer ranks, in group order.
    """
    return {
        "tensors": [_row_json(row) for row in plan.rows],
        "num_buckets": plan.num_buckets,
        "packed": plan.packed,
        "local": {
            key: [_row_json(r) for r in rows] for key, rows in zip(keys, plan.local_rows, strict=True) if rows
        },
        "holders": [
            {reader: [keys[rank] for rank in ranks] for reader, ranks in zip(keys, table, strict=True)}
            for table in plan.holders
        ],
    }


def _row_json(row: TensorRow) -> list[Any]:
    return list(row) if row.shards >= 0 else list(row[:7]) if row.held else list(row[:6])
