"""What a benchmark or a test asks of vLLM's workers: digests of live parameters, damage on purpose, memory figures.

A server started with `--worker-extension-cls recipes.worker_extension.WorkerChecks` has these methods on each worker,
and `POST /collective_rpc` (development mode) calls them. That route returns the first data-parallel engine's result
only, so each worker writes its own to a file in a folder that the caller names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.weight_digest import Digester


class WorkerChecks:
    """Methods that vLLM mixes into its worker class; their names must not be any of the worker's own."""

    model_runner: Any
    parallel_config: Any
    device: torch.device

    def check_digests(self, folder: str) -> None:
        """Digest of every parameter; of 3-D parameters one a leading index, by global expert."""
        _answer(self, folder, lambda: held_digests(_model(self), self.device))

    def check_scramble(self, folder: str) -> None:
        """Flip bits of every parameter, so that weights that nobody sent cannot pass for sent ones."""

        def scramble() -> dict[str, Any]:
            nbytes = 0
            for param in _model(self).parameters():
                data = param.data
                if data.dim() > 1 and not data.is_contiguous():
                    data = data.transpose(-1, -2)  # kernels keep some weights so
                if data.numel() and data.is_contiguous():
                    data = data.view(-1).view(torch.uint8)
                    data.bitwise_xor_(0x15)
                    nbytes += data.numel()
            return {"bytes": nbytes}

        _answer(self, folder, scramble)

    def check_memory(self, folder: str, reset: str = "no") -> None:
        """Allocator figures of this worker, in bytes; `reset="yes"` starts the peaks anew first."""

        def memory() -> dict[str, Any]:
            if reset == "yes" and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            return memory_figures(self.device)

        _answer(self, folder, memory)

    def check_load_file(self, folder: str, path: str) -> None:
        """Load a checkpoint that a trainer saved with `torch.save`: the straight way that a sync is compared with."""

        def load() -> dict[str, Any]:
            from fsdp_ipc.vllm_plugin.loader import LayerwiseLoader

            tensors = torch.load(path, map_location="cpu", weights_only=True)
            loader = LayerwiseLoader(_model(self), self.model_runner.model_config)
            loader.examined = (
                True  # the file has every tensor; padded vocabularies look unfinished to the check
            )
            loader.start("file")
            loader.load(0, list(tensors.items()), keep_alive=True)
            return {"num_tensors": loader.finish().num_tensors}

        _answer(self, folder, load)


def held_digests(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Digests of what the model computes with, by parameter."""
    digester = Digester(device)
    with torch.no_grad():
        for name, tensor in _held(model):
            digester.add(name, tensor)
    return digester.result()


def memory_figures(device: torch.device) -> dict[str, Any]:
    """Allocator figures of this process; on a CPU its resident memory."""
    if device.type != "cuda":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "allocations": stats.get("allocation.all.allocated", 0),
        "segments": stats.get("segment.all.allocated", 0),
        "device_used": total - free,
    }


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            name, tensor = f"{prefix}.{key}", param.data
            rows = getattr(module, "org_vocab_size", None)
            if tensor.numel() == 0 and key == "weight":
                unpacked = _by_probing(module)
                if unpacked is None:
                    continue
                tensor = unpacked
            if isinstance(rows, int) and tensor.dim() and tensor.shape[0] > rows:
                tensor = tensor[:rows]  # the padding holds nothing
            if tensor.dim() < 3:
                yield name, tensor
                continue
            for index, expert in enumerate(_experts(module, tensor.shape[0])):
                yield f"{name}[{expert}]", tensor[index]


def _experts(module: nn.Module, count: int) -> list[int]:
    """Global expert of each local one, from the layer's table (global expert to local slot, or -1)."""
    table: Any = getattr(module, "_expert_map", None)
    if not isinstance(table, torch.Tensor):
        return list(range(count))
    slots = {slot: expert for expert, slot in enumerate(table.tolist()) if slot >= 0}
    return [slots[slot] for slot in range(count)]


def _by_probing(module: Any) -> torch.Tensor | None:
    """A weight that a CPU kernel has packed away, read back with unit vectors: each output is one column, exactly."""
    method = getattr(module, "quant_method", None)
    size = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
    if method is None or not isinstance(size, int):
        return None
    columns = [
        method.apply(module, rows, None) for rows in torch.eye(size, dtype=module.weight.dtype).split(512)
    ]
    return torch.cat(columns).t().contiguous()


def _model(worker: Any) -> nn.Module:
    model: nn.Module = worker.model_runner.get_model()
    return model


def _answer(worker: Any, folder: str, produce: Callable[[], dict[str, Any]]) -> None:
    parallel = worker.parallel_config
    index = int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)
    try:
        result: dict[str, Any] = {"ok": produce()}
    except Exception as error:  # noqa: BLE001 - reported to the caller, who has no other way to see it
        result = {"error": f"{type(error).__name__}: {error}"}
    path = Path(folder) / f"{index:04d}.json"
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").rename(path)
