"""The sender behind vLLM's own trainer API (0.27 to 0.33), for code that is already written against it.

    register()
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=FSDPIPCTrainerInitInfo(rank=rank, group=mesh), client=client, source=source
    )
    engine.send_weights()

Needs vLLM in the trainer's environment; without it, use `fsdp_ipc.WeightSender`, which this wraps.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import nn

try:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    raise ImportError(
        "fsdp_ipc.vllm_trainer needs vLLM 0.27 or later in the trainer's environment (its stateful trainer API). "
        "fsdp_ipc.WeightSender needs no vLLM; code written for vLLM <= 0.26 finds fsdp_ipc.vllm_static"
    ) from error

from fsdp_ipc.plan import DEFAULT_BUCKET_BYTES
from fsdp_ipc.sender import Backend, WeightSender
from fsdp_ipc.source import DTensorSource, WeightSource
from fsdp_ipc.streamed_source import IteratedSource

if "config" in inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters:
    raise ImportError(
        "fsdp_ipc.vllm_trainer needs vLLM 0.27 or later: the trainer factory of this release takes a config and no "
        "backend of others. Use fsdp_ipc.WeightSender, or fsdp_ipc.vllm_static for the static call"
    )

BACKEND = "fsdp_ipc"


@dataclass
class FSDPIPCTrainerInitInfo(TrainerInitInfo):
    """What a trainer rank tells the factory; `backend` selects this package there.

    Attributes:
        rank: This process's rank in the trainer group (keyword only, as vLLM has it). Rank 0 sends.
        group: The trainer ranks, a `ProcessGroup` or a `DeviceMesh`; None takes the mesh of the source.
        packed: Send chunks of staging memory; the handshake tells the server.
        packed_buffer_size_bytes: Bytes of a staging slot. None sizes it to the largest tensor.
        server_backend: The server's weight-transfer backend; `"auto"` asks the server.
        options: Further arguments of `WeightSender`, by name.
    """

    backend: ClassVar[str] = BACKEND
    group: Any = None
    packed: bool = True
    packed_buffer_size_bytes: int | None = DEFAULT_BUCKET_BYTES
    server_backend: Backend = "auto"
    options: dict[str, Any] = field(default_factory=dict)


class FSDPIPCTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """vLLM's trainer engine over `WeightSender`. Built and called on every trainer rank, collective on the group."""

    init_info_cls = FSDPIPCTrainerInitInfo

    def __init__(self, sender: WeightSender, *, client: Any, source: WeightSource, rank: int) -> None:
        # The base's constructor takes other arguments from release to release, and only stores them.
        self.client = client
        self.source = source
        self.rank = rank
        self.is_sender = rank == 0
        self.sender = sender

    @classmethod
    def trainer_init(cls, init_info: FSDPIPCTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Make the sender (all ranks, collective).

        Args:
            init_info: See `FSDPIPCTrainerInitInfo`.
            client: This package's client, vLLM's, or any object with the four methods.
            source: `DTensorSource`, a module, or any weight source of vLLM's.

        Raises:
            ValueError: No source, or `rank` is not this process's rank in the group.
            TypeError: The source is none of these.
        """
        if source is None:
            raise ValueError("a source is needed: fsdp_ipc.DTensorSource(module)")
        source = as_source(source)
        sender = WeightSender(
            source,
            client,
            group=init_info.group,
            sender_rank=0,
            backend=init_info.server_backend,
            packed=init_info.packed,
            bucket_bytes=init_info.packed_buffer_size_bytes,
            **init_info.options,
        )
        own = getattr(getattr(sender, "group", None), "rank", init_info.rank)
        if own != init_info.rank:
            sender.close()
            raise ValueError(
                f"rank={init_info.rank} was given, but this process is rank {own} of the trainer group: pass the rank "
                "in the group, not the global one"
            )
        return cls(sender, client=client, source=source, rank=init_info.rank)

    def send_weights(self, weight_version: str | None = None) -> Any:
        """Send the current weights and wait until every worker holds them (all ranks, collective).

        Args:
            weight_version: Name to publish them under, where the server can.

        Returns:
            The sender's statistics.
        """
        return self.sender.send(weight_version)

    def shutdown(self) -> None:
        """Release the staging memory and the server's connection (all ranks)."""
        self.sender.close()


def as_source(source: Any) -> WeightSource:
    """Make a weight source of what vLLM's API takes.

    Args:
        source: One of ours, a module, vLLM's `ModuleSource`, or any other source of vLLM's: these are only iterated,
            in step on all ranks, and must yield what their metadata says.

    Returns:
        A source for `WeightSender`.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(source, WeightSource):
        return source
    module = source if isinstance(source, nn.Module) else getattr(source, "_module", None)
    if isinstance(module, nn.Module):
        # vLLM's own source reads named_parameters(), which FSDP2 leaves stale after a forward.
        return DTensorSource(module)
    metadata = getattr(source, "metadata", None)
    passes = getattr(source, "iter_full", None) or getattr(source, "__iter__", None)
    if metadata is None or passes is None:
        raise TypeError(
            f"expected a weight source (metadata, and iter_full or iteration) or a module, got {type(source).__name__}"
        )
    return IteratedSource(metadata() if callable(metadata) else metadata, passes)


def register() -> None:
    """Make the factory know this package's backend; a second call does nothing."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, FSDPIPCTrainerWeightTransferEngine)


register()
