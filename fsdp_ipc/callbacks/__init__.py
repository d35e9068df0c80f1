"""Callbacks of a sync: `WeightSender(..., callbacks=[...])`. See `SyncCallback` for what they are told and when."""

from fsdp_ipc.callbacks.base import CallbackError, Sync, SyncCallback
from fsdp_ipc.callbacks.metrics import MetricsFile, MLflow, TensorBoard, WandB
from fsdp_ipc.callbacks.progress import SyncProgress
from fsdp_ipc.callbacks.server import CheckVersion, PauseServer, ResetPrefixCache
from fsdp_ipc.callbacks.tracing import OpenTelemetry

__all__ = [
    "CallbackError",
    "CheckVersion",
    "MLflow",
    "MetricsFile",
    "OpenTelemetry",
    "PauseServer",
    "ResetPrefixCache",
    "Sync",
    "SyncCallback",
    "SyncProgress",
    "TensorBoard",
    "WandB",
]
