"""Move the weights of an FSDP2 trainer into the vLLM workers that share its GPUs."""

from fsdp_ipc.errors import WeightSyncError
from fsdp_ipc.version import __version__

__all__ = ["WeightSyncError", "__version__"]
