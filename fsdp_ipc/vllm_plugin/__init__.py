"""The worker side: a vLLM plugin that receives weights over the native wire.

vLLM loads the entry point `vllm.general_plugins` in each of its processes and calls `register`, after which
`--weight-transfer-config '{"backend": "fsdp_ipc"}'` selects the engine. Importing this package imports no vLLM.
"""

from __future__ import annotations

BACKEND = "fsdp_ipc"

__all__ = ["BACKEND", "register"]


def register() -> None:
    """Add the engine to vLLM's factory; vLLM calls this in every process, sometimes more than once.

    The engine module itself is imported only in a worker that is configured to use it.

    Raises:
        ImportError: When this vLLM has no weight-transfer engines (before 0.17).
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # A second registration of a name raises; the registry is vLLM's only record of the first one.
    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "fsdp_ipc.vllm_plugin.engine", "FSDPIPCWeightTransferEngine"
    )
