"""A sync as spans of OpenTelemetry."""

from __future__ import annotations

from typing import Any

from fsdp_ipc.callbacks.base import Sync, SyncCallback
from fsdp_ipc.stats import TransferStats


class OpenTelemetry(SyncCallback):
    """Emits a span `weight_sync` for each sync on each rank, a child of the current one, and in it a span for each stage.

    Needs opentelemetry-api; where the spans go is set up by the job (opentelemetry-sdk and an exporter).

    Args:
        tracer: Tracer to use; None takes that of the global provider.
    """

    __module__ = "fsdp_ipc.callbacks"

    def __init__(self, tracer: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ImportError("OpenTelemetry needs its package: pip install opentelemetry-sdk") from error
        self._trace: Any = trace
        self._tracer: Any = tracer if tracer is not None else trace.get_tracer("fsdp_ipc")

    def on_sync_end(self, sync: Sync, stats: TransferStats) -> None:
        """Emit the spans."""
        facts: dict[str, str | int] = {
            "backend": stats.backend,
            "bytes": stats.bytes,
            "num_tensors": stats.num_tensors,
            "num_buckets": stats.num_buckets,
        }
        self._emit(sync, facts, stats.seconds, None)

    def on_sync_error(self, sync: Sync, error: BaseException) -> None:
        """Emit the spans so far, with the error."""
        self._emit(sync, {}, sync.seconds, error)

    def _emit(
        self, sync: Sync, facts: dict[str, str | int], seconds: float, error: BaseException | None
    ) -> None:
        def at(offset_s: float) -> int:
            return sync.began_ns + int(offset_s * 1e9)

        attributes: dict[str, str | int] = {
            "rank": sync.rank,
            "num_ranks": sync.num_ranks,
            "sync": sync.number,
        }
        if sync.version is not None:
            attributes["version"] = sync.version
        attributes = {f"fsdp_ipc.{name}": value for name, value in {**attributes, **facts}.items()}
        span = self._tracer.start_span("weight_sync", start_time=at(0.0), attributes=attributes)
        if error is not None:
            span.record_exception(error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
        inside = self._trace.set_span_in_context(span)
        for name, bucket, began, ended in sync.spans:
            bucket_of = {"fsdp_ipc.bucket": bucket} if bucket >= 0 else {}
            stage = self._tracer.start_span(
                f"weight_sync.{name}", context=inside, start_time=at(began), attributes=bucket_of
            )
            stage.end(end_time=at(ended))
        span.end(end_time=at(seconds))
