"""Move the weights of an FSDP2 trainer into the vLLM workers that share its GPUs.

`WeightSender(DTensorSource(model), HTTPWeightSyncClient(url)).send(version)` on every trainer rank, and the server
holds exactly those weights. Needs torch and an HTTP client; touches no CUDA on import.
"""

from fsdp_ipc.callbacks import CallbackError, SyncCallback
from fsdp_ipc.clients import HTTPWeightSyncClient, ServerRequestError, WeightSyncClient
from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.full import Held
from fsdp_ipc.group import TrainerGroup
from fsdp_ipc.hooks import WeightSyncHook, trainer_callback
from fsdp_ipc.layout import layout_of
from fsdp_ipc.metadata import Layout, ParamMeta, StreamItem, TensorSpec
from fsdp_ipc.naming import Naming, Rename, naming_for
from fsdp_ipc.prepared import Found, look_into, sender_for
from fsdp_ipc.recipe import Emit, ParamRecipe
from fsdp_ipc.sender import WeightSender
from fsdp_ipc.source import DTensorSource, WeightSource
from fsdp_ipc.stats import TransferStats
from fsdp_ipc.version import __version__
from fsdp_ipc.wire.base import Timeouts

__all__ = [
    "CallbackError",
    "DTensorSource",
    "Emit",
    "Found",
    "HTTPWeightSyncClient",
    "Held",
    "Layout",
    "Naming",
    "ParamMeta",
    "ParamRecipe",
    "Rename",
    "ServerRequestError",
    "StreamItem",
    "SyncCallback",
    "TensorSpec",
    "Timeouts",
    "TrainerGroup",
    "TransferStats",
    "WeightSender",
    "WeightSource",
    "WeightSyncClient",
    "WeightSyncError",
    "WeightSyncHook",
    "__version__",
    "layout_of",
    "look_into",
    "naming_for",
    "sender_for",
    "trainer_callback",
]
