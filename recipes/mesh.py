"""How the ranks are laid out: the meshes of the settings, and who reads which data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes.config import MeshConfig

_T = TypeVar("_T")


@dataclass(frozen=True)
class Layout:
    """The meshes of a job; every rank is in each of them.

    Attributes:
        shard: What FSDP2 takes: `(dp_shard,)` or, for HSDP, `(dp_replicate, dp_shard)`.
        tp: What a layer's matrices are cut over, or None.
        experts: What FSDP2 takes for stacked experts, `(dp_replicate, ep)` or `(ep,)`, or None: as everything else.
        data_rank: Which share of the data this rank reads; ranks of one `tp` axis read the same.
        data_size: Number of such shares.
    """

    shard: DeviceMesh
    tp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    data_rank: int = 0
    data_size: int = 1

    def same_on_tp(self, value: _T) -> _T:
        """All ranks of a `tp` axis, collective: the first one's value."""
        if self.tp is None:
            return value
        box: list[Any] = [value]
        group = self.tp.get_group()
        dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
        result: _T = box[0]
        return result


def layout_of(config: MeshConfig, device_type: str) -> Layout:
    """All ranks, collective: make the meshes.

    Args:
        config: Sizes of the axes.
        device_type: `"cuda"` or `"cpu"`.

    Raises:
        ValueError: The axes do not multiply to the number of ranks.
    """
    world_size = dist.get_world_size()
    replicate, shard, tp, ep = resolve(config, world_size)
    sizes = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data_axes = tuple(name for name in sizes if name != "tp")
    dense = mesh if len(data_axes) == len(sizes) else mesh[data_axes]
    tp_mesh = mesh["tp"] if tp > 1 else None
    experts = None
    if ep > 1:
        names, shape = ("dp_replicate", "ep"), (world_size // ep, ep)
        experts = (
            init_device_mesh(device_type, shape, mesh_dim_names=names)
            if world_size > ep
            else init_device_mesh(device_type, (ep,), mesh_dim_names=("ep",))
        )
    return Layout(dense, tp_mesh, experts, dist.get_rank() // tp, world_size // tp)


def resolve(config: MeshConfig, world_size: int) -> tuple[int, int, int, int]:
    """Sizes of `dp_replicate`, `dp_shard`, `tp` and `ep`, with -1 replaced. Pure.

    Raises:
        ValueError: They do not multiply to the number of ranks, or `ep` does not divide `dp_shard`.
    """
    sizes = {"dp_replicate": config.dp_replicate, "dp_shard": config.dp_shard, "tp": config.tp}
    known = 1
    for size in sizes.values():
        known *= max(1, size)
    told = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
    open_axis = next((name for name, size in sizes.items() if size == -1), None)
    if open_axis is not None and world_size % known == 0:
        sizes[open_axis] = world_size // known
    elif open_axis is not None or known != world_size:
        raise ValueError(f"{told}: does not go into the {world_size} ranks that torchrun has started")
    ep = sizes["dp_shard"] if config.ep == -1 else config.ep
    if sizes["dp_shard"] % ep:
        raise ValueError(f"mesh.ep={ep} must divide mesh.dp_shard={sizes['dp_shard']}")
    return sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"], ep
