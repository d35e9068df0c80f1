"""Clients: vLLM's weight-transfer verbs over HTTP, Ray, or in the same process.

The Ray client lives in `fsdp_ipc.clients.ray` and the in-process one in `fsdp_ipc.clients.inprocess`; they import
ray and vLLM, this package does not.
"""

from fsdp_ipc.clients.base import OverlappingClient, ServerInfo, ServerRequestError, WeightSyncClient
from fsdp_ipc.clients.http import HTTPWeightSyncClient

__all__ = [
    "HTTPWeightSyncClient",
    "OverlappingClient",
    "ServerInfo",
    "ServerRequestError",
    "WeightSyncClient",
]
