"""`verify="full"` on vLLM's own models on CPU: what can be compared there, what can't and why, and that damage is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_ipc import HTTPWeightSyncClient, WeightSender, WeightSyncError
from fsdp_ipc.streamed_source import PairsSource
from tests.fake_server import FakeServer
from tests.fake_worker import EngineWorker
from tests.tiny_models import qwen3_config, qwen3_weights, write_checkpoint
from tests.vllm_inprocess import InProcess, inprocess_vllm

pytestmark = pytest.mark.vllm

CONFIG = qwen3_config(tied=False)
CANNOT = {"packed outside the parameters": 14, "state outside the parameters": 2}


@pytest.fixture(scope="module")
def vllm() -> Iterator[InProcess]:
    with inprocess_vllm() as environment:
        yield environment


class Damaged(EngineWorker):
    """The engine, with something that happens to the model's memory between the loader and the digests."""

    damage: Any = None

    def finish(self) -> None:
        finish = self.engine._update.loader.finish

        def finish_and_damage() -> Any:
            counts = finish()
            if self.damage is not None:
                self.damage(self.engine.model)
            return counts

        self.engine._update.loader.finish = finish_and_damage
        try:
            super().finish()
        finally:
            if self.engine._loader is not None:
                self.engine._loader.__dict__.pop("finish", None)


def test_what_can_be_compared_on_cpu_and_what_not(vllm: InProcess, tmp_path: Path, clean_shm: None) -> None:
    model, config = vllm.build(write_checkpoint(tmp_path / "old", CONFIG, qwen3_weights(CONFIG, seed=1)))
    worker = Damaged(vllm.engine(model, config))
    pairs = list(qwen3_weights(CONFIG, seed=2).items())
    with FakeServer(backend="fsdp_ipc", workers=[worker]) as server:
        client = HTTPWeightSyncClient(server.url)
        with WeightSender(
            PairsSource(pairs), client, group=dist.group.WORLD, bucket_bytes=30_000, verify="full"
        ) as sender:
            for version in (1, 2):
                report = sender.send(version).worker
                assert report is not None
                # vLLM's CPU kernels keep linear layers, the embedding and the output layer in memory of their own.
                assert report["unverified"] == CANNOT, report
                assert report["verified"] == len(pairs) - 16
            for number, name in enumerate(
                ("model.norm", "model.layers.1.self_attn.q_norm", "model.layers.0.input_layernorm")
            ):

                def damage(model: Any, name: str = name) -> None:
                    model.get_submodule(name).weight.data.view(-1).view(torch.int16)[-1] ^= 1

                worker.damage = damage
                with pytest.raises(WeightSyncError) as caught:
                    sender.send(f"bad {number}")
                assert f"'{name}.weight' (sent " in str(caught.value)
                assert "1 of " in str(caught.value)
                worker.damage = None
                sender.send(f"good {number}")
        assert server.published == ["1", "2", "good 0", "good 1", "good 2"]
    worker.engine.shutdown()
