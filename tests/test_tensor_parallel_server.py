"""A real CPU server with tensor parallelism, which must serve what such a server serves that loaded the checkpoint.

The model is a DeepSeek-V3 in little, because it has every kind of layer that tensor parallelism treats in its own way: linear
layers split by rows and by columns, a merged one that every rank holds whole (`fused_qkv_a_proj` of its latent
attention), a replicated router gate with a bias that vLLM's reload leaves in place, routed and shared experts, and a
split embedding and head. The latent sizes are those of the one decode kernel that CPU vLLM has.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient, WeightSender
from fsdp_ipc.naming import naming_for
from tests.runner import run_ranks
from tests.served import Served, served
from tests.tiny_models import VOCAB, write_checkpoint
from tests.vllm_server import vllm_server

transformers = pytest.importorskip(
    "transformers", reason="needs transformers: the model is its own DeepSeek-V3"
)
pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(900)]

BUCKET_BYTES = (
    270_000  # the largest tensor has 262,144; of it each rank has a half, where workers read from both
)
TENSOR_PARALLEL = ["--tensor-parallel-size", "2"]
# The first push teaches the workers where weights go, the others repeat it; then once more by a sender that verifies.
PUSHES = ("A", "B", "A again")
VERIFIED = ("B verified", "A verified")
FAMILY = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "dtype": "bfloat16",
}


def build() -> Any:
    """The trainer's model in float32, the same in every process, no tensor constant."""
    torch.manual_seed(5)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**FAMILY)).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([0.25, -0.125, 0.0, 0.5]))  # exact in bfloat16, as which it is saved
    return model


@dataclass(frozen=True)
class Pushed:
    """What was served after each push, and what each rank's sender said of it."""

    served: dict[str, Served]
    stats: list[dict[str, Any]]


def push(rank: int, world: int, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every rank: the weights A and noise B in turn; rank 0 notes what is served."""
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in model.parameters()]
    weights = [tensor.clone() for tensor in held]
    found: dict[str, Any] = {}
    said: dict[str, Any] = {}
    for verify, versions in (("off", PUSHES), ("full", VERIFIED)):
        source = DTensorSource(model, dtype=torch.bfloat16, naming=naming_for(model, experts="checkpoint"))
        client = HTTPWeightSyncClient(url)
        bucket_bytes = BUCKET_BYTES if verify != "off" else BUCKET_BYTES // 2
        with WeightSender(source, client, bucket_bytes=bucket_bytes, verify=verify) as sender:
            for version in versions:
                for tensor, kept in zip(held, weights, strict=True):
                    tensor.copy_(kept if version[0] == "A" else torch.randn_like(kept) * 0.3 + 0.2)
                said[version] = sender.send(version).to_json()
                found[version] = asdict(served(url, 0)) if rank == 0 else {}
                dist.barrier()
    return found, said


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pushed, Served]:
    """What the server under test served after each push, and what a server serves that loaded the saved weights."""
    folder = tmp_path_factory.mktemp("tp")
    build().to(torch.bfloat16).save_pretrained(folder / "saved")
    model = write_checkpoint(folder / "model", transformers.DeepseekV3Config(**FAMILY).to_dict())
    with vllm_server(
        model,
        log=folder / "server.log",
        weight_transfer_config={"backend": "fsdp_ipc"},
        extra_args=TENSOR_PARALLEL,
    ) as server:
        served(server, 0)  # slow the first time
        ranks = run_ranks(push, 2, server.url, timeout_s=240)
        assert server.get("/weight_info").json()["weight_version"] == VERIFIED[-1]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, folder / "saved" / file)
    with vllm_server(
        folder / "saved", log=folder / "saved.log", load_format="auto", extra_args=TENSOR_PARALLEL
    ) as server:
        loaded = served(server, 0)
    found = {version: Served(**values) for version, values in ranks[0][0].items()}
    return Pushed(found, [said for _, said in ranks]), loaded


def test_field_E16_every_layer_of_a_tensor_parallel_server_takes_its_own_part(
    outcome: tuple[Pushed, Served],
) -> None:
    """https://github.com/vllm-project/vllm/pull/48025.

    The merged layer that every rank holds whole was cut on rank 1 as if it were split, past its end.
    """
    pushed, loaded = outcome
    for version in (*PUSHES, *VERIFIED):
        if version.startswith("A"):
            assert pushed.served[version] == loaded, version
        else:
            assert pushed.served[version].logprobs != loaded.logprobs, version
            assert pushed.served[version].checksums != loaded.checksums, version
    assert pushed.served["B"].logprobs != pushed.served["B verified"].logprobs


def test_the_two_workers_hold_different_parts(outcome: tuple[Pushed, Served]) -> None:
    _, loaded = outcome
    first, second = (
        {key.rpartition(":")[2]: value for key, value in loaded.checksums.items() if f"tp{rank}:" in key}
        for rank in range(2)
    )
    assert first.keys() == second.keys()
    split = {name for name in first if first[name] != second[name]}
    for suffix in ("w13_weight", "w2_weight", "kv_b_proj.weight", "lm_head.weight", "embed_tokens.weight"):
        assert any(name.endswith(suffix) for name in split), (suffix, sorted(split))
    whole = ("norm.weight", "e_score_correction_bias", "gate.weight", "fused_qkv_a_proj.weight")
    assert not [name for name in split if name.endswith(whole)]


def test_each_worker_read_from_a_rank_of_its_own_and_verified_what_cpu_leaves_in_parameters(
    outcome: tuple[Pushed, Served],
) -> None:
    pushed, _ = outcome
    for said in pushed.stats:
        for version in (*PUSHES, *VERIFIED):
            stats = said[version]
            assert stats["num_buckets"] >= 4
            assert stats["worker"]["num_tensors"] == stats["num_tensors"] == 41
        # The first sync of a sender is the one that the loaders do.
        assert said["A"]["worker"]["replayed_params"] == 0
        assert said["B"]["worker"]["replayed_params"] == said["A again"]["worker"]["replayed_params"] >= 9
        for version in VERIFIED:
            report = said[version]["worker"]
            assert report["verified"] >= 9, (
                report
            )  # the norms: CPU kernels keep linear layers in memory of their own
            assert report["verified"] + sum(report["unverified"].values()) == 41, report
