"""`trainer_send_weights` as vLLM had it up to 0.26, for code that is already written against it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fsdp_ipc.clients.base import WeightSyncClient
from fsdp_ipc.clients.http import HTTPWeightSyncClient
from fsdp_ipc.sender import WeightSender
from fsdp_ipc.streamed_source import PairsSource

_warned = False


def trainer_send_weights(
    iterator: Iterable[tuple[str, torch.Tensor]],
    trainer_args: Mapping[str, Any] | Any,
    *,
    group: Any = None,
    server_version: str | None = None,
) -> None:
    """Send weights between the caller's own start and finish (all trainer ranks, collective).

    As in vLLM's static call, the caller opens the update before and closes it after. Chunks are always packed,
    whatever `packed` says: unpacked tensors would have to outlive the caller's own finish.

    Args:
        iterator: Names and tensors. They are all held until the call returns, so give DTensor parameters as they
            are, without `full_tensor()`; they are gathered here, a chunk at a time.
        trainer_args: `send_mode` (`"http"`, `"ray"`, or a function that is called with every update's dict), `url`
            or `llm_handle`, `packed`, `packed_buffer_size_bytes`; a mapping or an object.
        group: The trainer ranks, see `WeightSender`.
        server_version: vLLM's release, where the server cannot be asked (a function as `send_mode`).

    Raises:
        ValueError: `send_mode` is unknown or what it needs is missing.
        WeightSyncError: The sync failed, on every rank.
    """
    global _warned  # noqa: PLW0603 - once a process is what a user can bear
    if not _warned:
        _warned = True
        warnings.warn(
            "trainer_send_weights is a bridge for code of vLLM <= 0.26: fsdp_ipc.WeightSender(source, client).send() "
            "does start, transfer and finish, checks what arrives, and reads sharded parameters itself",
            FutureWarning,
            stacklevel=2,
        )
    args = dict(trainer_args) if isinstance(trainer_args, Mapping) else vars(trainer_args)
    sender = WeightSender(
        PairsSource(iterator),
        _InsideUpdate(_client(args), server_version),
        group=group,
        backend="ipc",
        packed=True,
        bucket_bytes=args.get("packed_buffer_size_bytes"),
    )
    try:
        sender.send(None)
    finally:
        sender.close()


def _client(args: Mapping[str, Any]) -> WeightSyncClient:
    mode = args.get("send_mode")
    if callable(mode):
        return _Callback(mode)
    if mode == "http":
        if not args.get("url"):
            raise ValueError("send_mode='http' needs url, the base URL of the server")
        return HTTPWeightSyncClient(args["url"])
    if mode == "ray":
        if args.get("llm_handle") is None:
            raise ValueError("send_mode='ray' needs llm_handle, an actor handle or a list of them")
        from fsdp_ipc.clients.ray import RayWeightSyncClient

        return RayWeightSyncClient(args["llm_handle"])
    raise ValueError(f"send_mode must be 'http', 'ray' or a function, got {mode!r}")


class _InsideUpdate:
    """A client whose update the caller opens and closes."""

    def __init__(self, client: WeightSyncClient, version: str | None) -> None:
        self._client = client
        self._version = version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def server_info(self) -> Any:
        from fsdp_ipc.clients.base import ServerInfo

        if self._version is not None:
            return ServerInfo(version=self._version, backend="ipc", backend_known=True)
        ask = getattr(self._client, "server_info", None)
        if ask is None:
            raise ValueError("pass server_version=, the release of vLLM: this client cannot ask the server")
        return ask()


class _Callback:
    """A client that gives each update to a function, as the object that vLLM <= 0.26 would give it."""

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        try:
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
        except ImportError:
            self._send(update_info)
        else:
            self._send(
                IPCWeightTransferUpdateInfo(**update_info) if isinstance(update_info, dict) else update_info
            )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
