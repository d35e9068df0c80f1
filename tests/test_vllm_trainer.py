"""Code written against vLLM's trainer API: sources that can only be iterated, and the static call of vLLM <= 0.26."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_ipc import vllm_static
from fsdp_ipc.clients import HTTPWeightSyncClient
from fsdp_ipc.metadata import ParamMeta
from fsdp_ipc.source import WeightSource
from fsdp_ipc.streamed_source import IteratedSource, PairsSource
from fsdp_ipc.vllm_source import ParamMetas, VLLMSource
from tests.fake_server import FakeServer

PAIRS = [("a", torch.arange(3.0)), ("b", torch.ones(2, 2, dtype=torch.bfloat16)), ("c", torch.tensor(4))]
METAS = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in PAIRS]


def read(source: WeightSource, order: list[int]) -> list[torch.Tensor]:
    held = source.tensors()
    result = []
    for index in order:
        entry = held[index]
        result.append(entry if isinstance(entry, torch.Tensor) else entry())
    return result


def names_of(source: WeightSource) -> list[str]:
    return [meta.name for item in source.items() for meta in item.metas()]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 2, 0]])
def test_an_iterated_source_can_be_read_in_any_order_within_a_pass(order: list[int]) -> None:
    source = IteratedSource(METAS, lambda: iter(PAIRS))
    assert isinstance(source, WeightSource)
    assert names_of(source) == ["a", "b", "c"]
    for _ in range(2):
        for index, tensor in zip(order, read(source, order), strict=True):
            assert torch.equal(tensor, PAIRS[index][1])


def test_an_iterated_source_holds_one_tensor_at_a_time_in_order() -> None:
    import gc
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal peak
        for index in range(5):
            gc.collect()
            peak = max(peak, sum(ref() is not None for ref in alive))
            tensor = torch.full((4,), float(index))
            alive.append(weakref.ref(tensor))
            pair = (f"t{index}", tensor)
            del tensor
            yield pair
            del pair

    source = IteratedSource([ParamMeta(f"t{i}", torch.float32, (4,)) for i in range(5)], make)
    held = source.tensors()
    for index, pull in enumerate(held):
        assert callable(pull)
        value = pull()
        assert value[0].item() == index
        del value
    assert peak <= 1


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (PAIRS[:2], "ended before c"),
        ([PAIRS[0], PAIRS[2], PAIRS[1]], "yielded .*'c'"),
        ([PAIRS[0], ("b", torch.ones(2, 2)), PAIRS[2]], "float32"),
    ],
)
def test_a_pass_that_differs_from_its_metadata_is_refused(pairs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(IteratedSource(METAS, lambda: iter(pairs)), [0, 1, 2])


def test_a_tensor_that_is_gone_cannot_be_read_again() -> None:
    with pytest.raises(RuntimeError, match="read before"):
        read(IteratedSource(METAS, lambda: iter(PAIRS)), [0, 1, 0])


def test_pairs_are_a_source() -> None:
    source = PairsSource(iter([*PAIRS[:2], ("p", torch.nn.Parameter(torch.ones(3)))]))
    assert isinstance(source, WeightSource)
    assert names_of(source) == ["a", "b", "p"]
    tensors = read(source, [0, 1, 2])
    assert torch.equal(tensors[0], PAIRS[0][1])
    assert not tensors[2].requires_grad
    assert source.mesh() is None


@pytest.mark.parametrize("pairs", [[], [PAIRS[0], PAIRS[0]]])
def test_nothing_and_a_name_twice_are_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match=r"nothing to send|twice"):
        PairsSource(pairs)


def test_a_source_in_vllms_words() -> None:
    class Source:
        def metadata(self) -> list[ParamMeta]:
            return METAS

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(PAIRS)

    source = VLLMSource(Source())
    assert len(source.metadata) == len(source.metadata()) == 3
    assert isinstance(source.metadata, ParamMetas)
    assert source.owned_names(1) == ["a", "b", "c"]
    assert [name for name, _ in source.iter_full()] == [name for name, _ in source] == ["a", "b", "c"]
    assert [names for names, _ in source.iter_groups()] == source.groups()
    assert source.held_names() is None
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    with pytest.raises(NotImplementedError, match="full tensors"):
        source.iter_local()


# The static call.


class Sender:
    """Stands in for WeightSender: drives the client as a sync over the stock wire does."""

    def __init__(self, source: Any, client: Any, **settings: Any) -> None:
        self.source, self.client, self.settings = source, client, settings
        made.append(self)

    def send(self, version: str | None) -> None:
        self.info = self.client.server_info()
        self.client.init_weight_transfer_engine({})
        self.client.start_weight_update()
        self.client.update_weights({"names": names_of(self.source)})
        self.client.finish_weight_update(version)

    def close(self) -> None:
        self.closed = True


made: list[Sender] = []


@pytest.fixture(autouse=True)
def _fake_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(vllm_static, "WeightSender", Sender)
    monkeypatch.setattr(vllm_static, "_warned", True)


def test_the_static_call_sends_inside_the_callers_own_update() -> None:
    with FakeServer(version="0.26.0", backend="fsdp_ipc") as server:
        outer = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        outer.init_weight_transfer_engine({})
        outer.start_weight_update()
        vllm_static.trainer_send_weights(
            iter(PAIRS),
            {"send_mode": "http", "url": server.url, "packed": False, "packed_buffer_size_bytes": 64},
        )
        outer.finish_weight_update()
        assert server.violations == []
        assert server.routes.count("/start_weight_update") == 1
        assert server.routes.count("/finish_weight_update") == 1
        assert ("update", {"names": ["a", "b", "c"]}) in server.workers[0].seen
    (sender,) = made
    assert sender.settings["bucket_bytes"] == 64
    assert sender.settings["backend"] == "ipc"
    assert sender.info.version == "0.26.0"
    assert sender.closed


def test_the_static_call_with_a_function_needs_the_release() -> None:
    seen: list[Any] = []
    args = SimpleNamespace(send_mode=seen.append, llm_handle=None, url=None, packed=True)
    with pytest.raises(ValueError, match="server_version="):
        vllm_static.trainer_send_weights(PAIRS, args)
    assert made[0].closed


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"send_mode": "carrier pigeon"}, "send_mode must be"),
        ({"send_mode": "http"}, "needs url"),
        ({"send_mode": "ray"}, "needs llm_handle"),
    ],
)
def test_the_static_call_checks_its_arguments(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        vllm_static.trainer_send_weights(PAIRS, args)


def test_the_static_call_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_static, "_warned", False)
    with pytest.warns(FutureWarning, match="WeightSender"), pytest.raises(ValueError, match="send_mode"):
        vllm_static.trainer_send_weights(PAIRS, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="send_mode"):
            vllm_static.trainer_send_weights(PAIRS, {})
