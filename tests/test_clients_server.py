"""The HTTP client against a real vLLM server with the stock backend, on CPU: routes, facts, and real error texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdp_ipc.clients import HTTPWeightSyncClient, ServerRequestError
from fsdp_ipc.metadata import ParamMeta
from fsdp_ipc.wire.stock import StockWire, dialect_for
from tests.fake_server import UUIDS, fake_rebuild_args
from tests.tiny_models import qwen3_config, write_checkpoint
from tests.vllm_server import Server, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stock_server")
    model = write_checkpoint(folder / "model", qwen3_config())
    # The variable that allows pickled handles is left off on purpose.
    with vllm_server(model, log=folder / "log", weight_transfer_config={"backend": "ipc"}) as running:
        yield running


@pytest.fixture
def client(server: Server) -> HTTPWeightSyncClient:
    return HTTPWeightSyncClient(server.url, request_timeout_s=120)


def test_the_server_tells_release_backend_workers_and_sleep_mode(client: HTTPWeightSyncClient) -> None:
    info = client.server_info()
    assert dialect_for(info.version).checksums
    assert (info.backend, info.backend_known, info.dev_mode) == ("ipc", True, True)
    assert info.sleep_mode is False
    assert info.world_size == 1
    client.health()


def test_pause_resume_cache_and_version_routes(client: HTTPWeightSyncClient) -> None:
    client.pause()
    assert client.is_paused()
    assert client.is_sleeping(), "a paused server says that it sleeps"
    assert not client.weights_asleep()
    client.resume()
    assert not client.is_paused()
    assert client.reset_prefix_cache() is True
    assert client.weight_version() == "default"
    (checksums,) = client.weight_checksums()
    assert checksums


def test_field_E1_a_real_refusal_of_pickled_handles_names_the_cure(client: HTTPWeightSyncClient) -> None:
    """https://github.com/vllm-project/vllm/pull/35928: VLLM_ALLOW_INSECURE_SERIALIZATION missing."""
    wire = StockWire(dialect_for(client.server_info().version))
    client.init_weight_transfer_engine(wire.init_info())
    client.start_weight_update()
    with pytest.raises(ServerRequestError, match="Refusing to deserialize") as caught:
        client.update_weights(
            wire.update_info([ParamMeta("a", torch.float32, (1,))], {UUIDS[0]: fake_rebuild_args(b"", 4)})
        )
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=1" in (caught.value.hint or "")
    with pytest.raises(ServerRequestError, match="without a matching"):
        client.finish_weight_update()


def test_real_errors_of_order_and_handshake_are_told(client: HTTPWeightSyncClient) -> None:
    with pytest.raises(ServerRequestError, match="Invalid init_info"):
        client.init_weight_transfer_engine({"session": "x"})
    client.init_weight_transfer_engine({"packed": True})
    with pytest.raises(ServerRequestError, match="start_weight_update must be called"):
        client.update_weights({})
    client.start_weight_update()
    with pytest.raises(ServerRequestError, match="already active") as caught:
        client.start_weight_update()
    assert "one trainer at a time" in (caught.value.hint or "")
    client.finish_weight_update("after-nothing")
    assert client.weight_version() == "after-nothing"


def test_field_E2_a_route_that_is_not_there_is_a_404_with_the_cure(
    client: HTTPWeightSyncClient, tmp_path: Path
) -> None:
    """https://github.com/vllm-project/vllm-project.github.io/pull/207: development routes absent."""
    with pytest.raises(ServerRequestError, match="VLLM_SERVER_DEV_MODE"):
        client.post("/no_such_route")
