"""A trainer rank in an environment that has torch and urllib3 and nothing else: `python -m tests.torch_only_job`.

Every other installed package is made impossible to import first, so that it does not matter what is installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NEEDED = ("torch", "urllib3")
NEVER = frozenset({"vllm", "ray", "transformers", "accelerate", "hydra", "numpy"})


class WithoutThem(importlib.abc.MetaPathFinder):
    """Asks the usual finders, but for the hidden top-level packages none: they are simply not installed."""

    def __init__(self, hidden: frozenset[str], finders: Sequence[Any]) -> None:
        self.hidden, self.finders = hidden, tuple(finders)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self.hidden:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)


def needed_distributions() -> set[str]:
    """What `pip install torch urllib3` would install here, by normalised name."""
    found: set[str] = set()
    queue = list(NEEDED)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        # Extras are not installed; other markers (system, release) at worst let one package more through.
        queue += [
            re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0] for line in wanted if "extra ==" not in line
        ]
    return found


def hide_all_others() -> frozenset[str]:
    """Make every installed package that torch and urllib3 do not need impossible to import."""
    needed = needed_distributions()
    hidden = set(NEVER)
    for package, distributions in importlib.metadata.packages_distributions().items():
        if not needed & {re.sub(r"[-_.]+", "-", name).lower() for name in distributions}:
            hidden.add(package)
    hidden -= {"fsdp_ipc", "tests", "torch", "urllib3"}
    sys.meta_path[:] = [WithoutThem(frozenset(hidden), sys.meta_path)]
    return frozenset(hidden)


def main(url: str, rank: int, world_size: int, store: str, out: str) -> None:
    """Two pushes with a training step between them; rank 0 leaves what the workers must hold at the end."""
    for name in NEVER:
        try:
            __import__(name)
        except ImportError:
            continue
        raise AssertionError(f"{name} is importable")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tests.toy import build, full, make_sender, shard, step

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = shard(build(), init_device_mesh("cpu", (world_size,)))
    with make_sender(model, url, bucket_bytes=800) as sender:
        sender.send(1)
        step(model)
        stats: Any = sender.send(2)
    wanted = full(model, torch.bfloat16)
    if rank == 0:
        torch.save(wanted, out)
        loaded = sorted(NEVER & {name.partition(".")[0] for name in sys.modules})
        print(stats.backend, stats.num_tensors, loaded)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    hide_all_others()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
