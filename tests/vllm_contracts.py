"""What runs in the side process of `tests.vllm_side`: vLLM's own engines, sources, factory and clients, on CPU.

Everything of vLLM is imported inside the functions, because which release it is depends on the process.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions

from tests.fake_worker import UUIDS, fake_rebuild_args

_state = SimpleNamespace()
opens: list[tuple[Any, ...]] = []
closes: list[tuple[Any, ...]] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 13, dtype=torch.bfloat16)
        self.norm = nn.RMSNorm(7)
        self.gate = nn.Parameter(torch.zeros(()))


class Model(nn.Module):
    """bf16 beside fp32, odd widths, a bias and a scalar; loads as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 7, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([Block(), Block()])

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        params = dict(self.named_parameters())
        for name, tensor in weights:
            param = params[name]
            getattr(param, "weight_loader", default_weight_loader)(param, tensor)
        return set(params)


def seeded(seed: int) -> dict[str, torch.Tensor]:
    """Weights of `Model`, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in Model().named_parameters()
    }


def _rebuild(*args: Any) -> torch.Tensor:
    """Maps the file that the handle names; the exporter's device index must have been replaced by the worker's."""
    assert args[6] == 0, f"device index {args[6]}"
    path, nbytes = args[7].decode(), args[8]
    tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    if args[5] is not torch.uint8:
        tensor = tensor.view(args[5]).as_strided(args[1], args[2], args[3])
    key = (path, args[12])
    opens.append(key)
    weakref.finalize(tensor, closes.append, key)
    return tensor


def _without_cuda() -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    real_empty = torch.empty

    def nothing(device: Any = None) -> None:
        return None

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return real_empty(*args, **kwargs)

    reductions.rebuild_cuda_tensor = _rebuild
    vars(torch)["empty"] = empty
    vars(torch.cuda).update(
        get_device_properties=lambda device: SimpleNamespace(uuid=UUIDS[0]),
        synchronize=nothing,
        ipc_collect=nothing,
        current_stream=lambda device=None: stream,
    )
    vars(torch.accelerator).update(
        synchronize=nothing, current_device_index=lambda: 0, current_stream=lambda device=None: stream
    )


# The worker side.


def new_engine() -> None:
    """A model with weights of seed 0 and the stock engine around it."""
    _without_cuda()
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    ipc_engine.rebuild_cuda_tensor = _rebuild
    model = Model()
    record_metadata_for_reloading(model)
    model.load_state_dict(seeded(0))
    engine_cls = ipc_engine.IPCWeightTransferEngine
    given: dict[str, Any] = {
        "config": SimpleNamespace(backend="ipc"),
        "vllm_config": SimpleNamespace(parallel_config=SimpleNamespace(), model_config=SimpleNamespace()),
        "parallel_config": SimpleNamespace(),
        "device": torch.device("cuda", 0),
        "model": model,
    }
    wanted = [name for name in inspect.signature(engine_cls.__init__).parameters if name != "self"]
    _state.engine = engine_cls(**{name: given[name] for name in wanted})
    _state.model = model
    opens.clear()
    closes.clear()


def init(init_info: dict[str, Any]) -> None:
    engine = _state.engine
    engine.init_transfer_engine(engine.parse_init_info(init_info))


def start() -> None:
    if hasattr(_state.engine, "start_weight_update"):
        _state.engine.start_weight_update()
    else:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(_state.model)


def update(update_info: dict[str, Any], insecure: bool = True) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1" if insecure else "0"
    engine = _state.engine
    typed = engine.parse_update_info(dict(update_info))
    if "load_weights" in inspect.signature(engine.receive_weights).parameters:
        engine.receive_weights(typed, load_weights=_state.model.load_weights)
    else:
        engine.receive_weights(typed)


def finish() -> None:
    if hasattr(_state.engine, "finish_weight_update"):
        _state.engine.finish_weight_update()
    else:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(_state.model, SimpleNamespace(dtype=torch.bfloat16))


def weights() -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in _state.model.named_parameters()}


def opened_and_closed() -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    return list(opens), list(closes)


def unpack(buffer: torch.Tensor, metas: list[tuple[str, list[int], torch.dtype, int]]) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    names, shapes, dtypes, sizes = (list(column) for column in zip(*metas, strict=True))
    return {
        name: (tensor.clone().reshape(-1).view(torch.uint8).tolist(), list(tensor.shape), str(tensor.dtype))
        for name, tensor in unpack_tensor(buffer, names, shapes, dtypes, sizes)
    }


# The trainer side.


class RecordingClient:
    """vLLM's four methods; reads at once what an update's handles point at."""

    def __init__(self) -> None:
        self.verbs: list[str] = []
        self.init_info: dict[str, Any] = {}
        self.got: dict[str, torch.Tensor] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.verbs.append("init")
        self.init_info = init_info

    def start_weight_update(self) -> None:
        self.verbs.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.verbs.append("update")
        handles = update_info["ipc_handles"]
        offset = 0
        for index, (name, dtype, shape) in enumerate(
            zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
        ):
            if isinstance(handles, list):
                value = _exported[handles[index][UUIDS[0]][7]]
            else:
                size = update_info["tensor_sizes"][index]
                value = _exported[handles[UUIDS[0]][7]][offset : offset + size]
                offset += size
            self.got[name] = value.clone().view(getattr(torch, dtype)).view(shape)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.verbs.append("finish")


_exported: dict[bytes, torch.Tensor] = {}


def _reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    key = str(len(_exported)).encode()
    _exported[key] = tensor
    return None, fake_rebuild_args(key, tensor.nbytes, serial=len(_exported))


def _source(seed: int, wrapped: bool, scalars: bool = True) -> tuple[Any, dict[str, torch.Tensor]]:
    from fsdp_ipc.source import DTensorSource
    from fsdp_ipc.vllm_source import VLLMSource

    model = Model()
    model.load_state_dict(seeded(seed))
    if not scalars:
        for block in model.layers:
            del block.gate
    source = DTensorSource(model)
    expected = {name: value for name, value in seeded(seed).items() if value.ndim or scalars}
    return VLLMSource(source) if wrapped else source, expected


def stock_trainer(packed: bool, wrapped: bool, scalars: bool) -> dict[str, Any]:
    """vLLM's own trainer engine with our source: what it delivers."""
    _without_cuda()
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    ipc_engine.reduce_tensor = packed_tensor.reduce_tensor = _reduce
    source, expected = _source(3, wrapped, scalars)
    client = RecordingClient()
    info = ipc_engine.IPCTrainerInitInfo(rank=0, packed=packed, packed_buffer_size_bytes=512)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    engine.send_weights()
    return {"verbs": client.verbs, "init": client.init_info, "got": client.got, "expected": expected}


def our_trainer(packed: bool) -> dict[str, Any]:
    """Our sender through vLLM's factory: what the factory hands to it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    import fsdp_ipc.vllm_trainer as module

    seen: dict[str, Any] = {"sent": [], "closed": []}

    class Sender:
        group = SimpleNamespace(rank=0)

        def __init__(self, source: Any, client: Any, **settings: Any) -> None:
            seen.setdefault("made", []).append((type(source).__name__, settings))

        def send(self, version: str | None) -> str:
            seen["sent"].append(version)
            return "stats"

        def close(self) -> None:
            seen["closed"].append(1)

    vars(module)["WeightSender"] = Sender
    module.register()
    module.register()
    info = module.FSDPIPCTrainerInitInfo(rank=0, group=None, packed=packed, packed_buffer_size_bytes=4096)
    source, _ = _source(3, wrapped=False)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=info, client=RecordingClient(), source=source
    )
    seen["result"] = engine.send_weights()
    engine.shutdown()
    seen["is_sender"] = engine.is_sender
    try:
        module.FSDPIPCTrainerWeightTransferEngine.trainer_init(
            module.FSDPIPCTrainerInitInfo(rank=1), client=None, source=source
        )
    except ValueError as error:
        seen["wrong_rank"] = str(error)
    return seen


def vllm_source_as_ours() -> dict[str, Any]:
    """A module source and an iterated source of vLLM's, as our sender would read them."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    from fsdp_ipc.vllm_trainer import as_source

    model = Model()
    module_source = ModuleSource(model)

    class Iterated:
        def __init__(self) -> None:
            self.metadata = module_source.metadata

        def __iter__(self) -> Any:
            return iter((name, param.detach()) for name, param in model.named_parameters())

    iterated = as_source(Iterated())
    tensors = [held() if callable(held) else held for held in iterated.tensors()]
    names = [meta.name for item in iterated.items() for meta in item.metas()]
    return {
        "module": type(as_source(module_source)).__name__,
        "equal": all(torch.equal(t, p) for t, p in zip(tensors, model.parameters(), strict=True)),
        "names": names == [name for name, _ in model.named_parameters()],
    }


def is_vllm_client() -> bool:
    """Whether our HTTP client passes vLLM's protocol."""
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    from fsdp_ipc.clients import HTTPWeightSyncClient

    client: Any = HTTPWeightSyncClient("http://127.0.0.1:9")
    if getattr(VLLMWeightSyncClient, "_is_runtime_protocol", False):
        return isinstance(client, VLLMWeightSyncClient)
    return all(
        callable(getattr(client, name)) for name in vars(VLLMWeightSyncClient) if not name.startswith("_")
    )


def vllm_http_client(url: str, init_info: dict[str, Any], update_info: dict[str, Any]) -> None:
    """vLLM's own HTTP client sends our payload."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    client = HTTPVLLMWeightSyncClient(url)
    client.init_weight_transfer_engine(init_info)
    client.start_weight_update()
    client.update_weights(update_info)
    client.finish_weight_update()


def quiet() -> None:
    logging.disable(logging.WARNING)
