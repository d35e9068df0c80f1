"""The Ray client against actors of a real local Ray."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_ipc.clients import ServerRequestError

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install ray", allow_module_level=True)


class Engine:
    """The methods of vLLM's engine, remembering what they got."""

    def __init__(self, fails_at: str = "") -> None:
        self.seen: list[Any] = []
        self.fails_at = fails_at

    def note(self, verb: str, value: Any = None) -> None:
        if verb == self.fails_at:
            raise RuntimeError(
                f"{verb} went wrong: Please set weight_transfer_config to enable weight transfer."
            )
        self.seen.append((verb, value))

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.note("init", request.init_info)

    def start_weight_update(self) -> None:
        self.note("start")

    def update_weights(self, request: Any) -> None:
        self.note("update", request.update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.note("finish", weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self.note("version", new_version)

    def get(self) -> list[Any]:
        return self.seen


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


def test_one_actor_and_several_get_the_four_verbs_with_raw_handles(ray: Any) -> None:
    from fsdp_ipc.clients.ray import RayWeightSyncClient

    actor = ray.remote(Engine)
    handles = {"uuid": (torch.Tensor, torch.Size([3]), b"\x00\xff")}
    for actors in ([actor.remote()], [actor.remote(), actor.remote()]):
        client = RayWeightSyncClient(actors if len(actors) > 1 else actors[0], call_timeout_s=60)
        client.init_weight_transfer_engine({"packed": True})
        client.start_weight_update()
        client.update_weights({"ipc_handles": handles})
        client.finish_weight_update("v1")
        for engine in actors:
            assert ray.get(engine.get.remote()) == [
                ("init", {"packed": True}),
                ("start", None),
                ("update", {"ipc_handles": handles}),
                ("finish", None),
                ("version", "v1"),
            ]


def test_field_E4_no_actor_publishes_what_another_failed_to_take(ray: Any) -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/issues/1158: several engines, all or none."""
    from fsdp_ipc.clients.ray import RayWeightSyncClient

    good, bad = ray.remote(Engine).remote(), ray.remote(Engine).remote("finish")
    client = RayWeightSyncClient([good, bad], call_timeout_s=60)
    client.start_weight_update()
    with pytest.raises(ServerRequestError, match="finish went wrong") as caught:
        client.finish_weight_update("v1")
    assert "Ray actor 1 of 2" in str(caught.value)
    assert "--weight-transfer-config" in (caught.value.hint or "")
    assert ("version", "v1") not in ray.get(good.get.remote())


def test_missing_methods_and_dead_actors_are_errors(ray: Any) -> None:
    from fsdp_ipc.clients.ray import RayWeightSyncClient

    engine = ray.remote(Engine).remote()
    client = RayWeightSyncClient(engine, call_timeout_s=60)
    with pytest.raises(ServerRequestError, match="no such method"):
        client.reset_prefix_cache()
    ray.get(engine.get.remote())
    ray.kill(engine)
    with pytest.raises(ServerRequestError, match=r"ActorDied|RayActor"):
        client.start_weight_update()


def test_no_actor_and_one_twice_are_refused(ray: Any) -> None:
    from fsdp_ipc.clients.ray import RayWeightSyncClient

    with pytest.raises(ValueError, match="no Ray actor"):
        RayWeightSyncClient([])
    engine = ray.remote(Engine).remote()
    with pytest.raises(ValueError, match="twice"):
        RayWeightSyncClient([engine, engine])
