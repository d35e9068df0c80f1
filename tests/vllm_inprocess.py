"""A tiny vLLM model in this process, on CPU and without a server: what a worker holds, and the engine on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass
class InProcess:
    """Builder of models in one vLLM process environment."""

    folder: Path

    def build(self, checkpoint: Path, *, load_format: str = "auto") -> tuple[nn.Module, Any]:
        """A loaded model and its vLLM config."""
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        args = EngineArgs(
            model=str(checkpoint), enforce_eager=True, max_model_len=512, load_format=load_format
        )
        config = args.create_engine_config()
        config.parallel_config.rank = 0
        # Attention layers register by name in the config, so each model gets a config of its own.
        with set_current_vllm_config(config):
            self._join(config)
            return get_model(vllm_config=config), config

    def _join(self, config: Any) -> None:
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

        init_distributed_environment(1, 0, f"file://{self.folder}/store", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)

    def engine(self, model: nn.Module, config: Any) -> Any:
        """The engine as vLLM's worker makes it."""
        from vllm.config.weight_transfer import WeightTransferConfig

        from fsdp_ipc.vllm_plugin.engine import FSDPIPCWeightTransferEngine

        return FSDPIPCWeightTransferEngine(
            WeightTransferConfig(backend="fsdp_ipc"), config, torch.device("cpu"), model
        )


@contextmanager
def inprocess_vllm() -> Iterator[InProcess]:
    """vLLM's process-wide state for a single CPU worker, taken down at the end."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # vLLM's CPU worker does the same: there is no accelerator whose cache could be emptied.
    saved = torch.accelerator.empty_cache, torch.accelerator.synchronize
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield InProcess(Path(folder))
            cleanup_dist_env_and_memory()
    finally:
        torch.accelerator.empty_cache, torch.accelerator.synchronize = saved


def computed_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the model computes with, by name, as far as it can be seen.

    On CPU vLLM packs linear weights into closures and empties the parameters, so a linear layer is asked for its
    product with the identity: each element of the result is one weight plus zeros, and so exact.
    """
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for own, param in module._parameters.items():
            if param is not None and param.numel():
                seen[f"{name}.{own}"] = param.detach().clone()
        linear = getattr(module, "cpu_linear", None)
        columns = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
        if linear is not None and columns is not None:
            eye = torch.eye(columns, dtype=torch.bfloat16)
            seen[f"{name}:computed"] = linear(eye, module.weight, None).detach().clone()
    return seen
