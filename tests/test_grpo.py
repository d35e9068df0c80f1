"""GRPO's parts without a real server: rewards, advantages, loss, layouts, and the order around a push."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: install the extra 'recipes'")
pytest.importorskip("rich", reason="needs rich: install the extra 'recipes'")

from torch.nn import functional as F

from fsdp_ipc import DTensorSource, HTTPWeightSyncClient
from recipes.config import (
    DataConfig,
    GrpoConfig,
    GrpoJobConfig,
    HookConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
)
from recipes.grpo_loss import group_advantages, policy_loss
from recipes.inference import Inference
from recipes.job import Stages, stage_medians
from recipes.mesh import layout_of, resolve
from recipes.models import build_model, byte_tokenizer, write_model_dir
from recipes.optim import Optimization
from recipes.pushing import Rhythm
from recipes.rollouts import Rollout, collate
from recipes.tasks import Problem, answer_reward, number_reward, read_problems, share_of_letters, task_of
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks


@pytest.mark.parametrize(("text", "reward"), [("", 0.0), ("abc", 1.0), ("aB", 0.5), ("é1 Z", 0.0)])
def test_letters_reward_their_share(text: str, reward: float) -> None:
    assert share_of_letters(text) == reward


@pytest.mark.parametrize(
    ("text", "reward"), [("12", 1.0), (" 12 of", 1.0), ("13", 0.1), ("120", 0.1), ("x12", 0.0)]
)
def test_sums_reward_the_right_number_most(text: str, reward: float) -> None:
    assert number_reward("12", text) == reward


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", "6 times 7 is 42.", 1.0),
        ("1200", "so 1,200", 1.0),
        ("Paris", " Paris\n", 1.0),
        ("42", "41", 0.0),
    ],
)
def test_answers_are_the_last_number_or_the_text(answer: str, text: str, reward: float) -> None:
    assert answer_reward(answer, text) == reward


def test_problems_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    lines = [{"prompt": "6*7=", "answer": 42}, {"prompt": "capital?", "answer": "Paris"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_problems(path) == [Problem("6*7=", "42"), Problem("capital?", "Paris")]
    task = task_of(DataConfig(kind="jsonl", path=str(path)))
    drawn = {task.draw(random.Random(seed)).prompt for seed in range(20)}
    assert drawn == {"6*7=", "capital?"}


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "x"}', '{"prompt": 3, "answer": 4}'])
def test_a_line_that_is_no_problem_is_told_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "p").write_text('{"prompt": "x", "answer": "y"}\n' + line)
    with pytest.raises(ValueError, match=r"line 2: expected an object with 'prompt' and 'answer'"):
        read_problems(tmp_path / "p")


def test_a_file_without_problems_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="no problems"):
        read_problems(tmp_path / "empty")
    with pytest.raises(ValueError, match="no such file"):
        read_problems(tmp_path / "gone")


def _rollout(group: int, reward: float, tokens: int = 3) -> Rollout:
    return Rollout(group, [5, 6], list(range(7, 7 + tokens)), [-1.0] * tokens, "", reward, 0)


def test_advantages_compare_the_completions_of_one_prompt() -> None:
    rollouts = [_rollout(0, 1.0), _rollout(0, 0.0), _rollout(1, 0.3), _rollout(1, 0.3)]
    assert group_advantages(rollouts, normalize=False) == [0.5, -0.5, 0.0, 0.0]
    normalized = group_advantages(rollouts, normalize=True)
    assert normalized == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-3)


def test_the_loss_is_that_of_the_formula() -> None:
    """Against a plain loop over tokens, with ratios on both sides of both bounds."""
    torch.manual_seed(0)
    config = GrpoConfig(clip_low=0.2, clip_high=0.28, temperature=0.7)
    rollouts = [_rollout(0, 1.0, 4), _rollout(0, 0.0, 2), _rollout(1, 1.0, 3)]
    advantages = [1.0, -1.5, 0.5]
    batch = collate(rollouts, advantages, torch.device("cpu"))
    assert batch.tokens.shape == (3, 6)
    assert batch.is_completion.sum() == 9
    logits = (torch.randn(3, 5, 12) * 2).requires_grad_()
    loss = policy_loss(logits, batch, config)
    total, clipped, divergence = 0.0, 0, 0.0
    for row, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        for place, token in enumerate(rollout.token_ids):
            logp = F.log_softmax(logits[row, 1 + place] / 0.7, -1)[token].item()
            ratio = torch.tensor(logp - rollout.logprobs[place]).exp().item()
            bounded = min(max(ratio, 0.8), 1.28)
            total -= min(ratio * advantage, bounded * advantage)
            clipped += bounded * advantage < ratio * advantage
            divergence += ratio - 1 - (logp - rollout.logprobs[place])
    assert loss.total.item() == pytest.approx(total, rel=1e-5)
    assert loss.clipped == clipped > 0
    assert loss.divergence == pytest.approx(divergence, rel=1e-4)
    parts = [
        policy_loss(logits[i : i + 2], part, config) for i, part in zip((0, 2), batch.parts(2), strict=True)
    ]
    assert sum(part.total.item() for part in parts) == pytest.approx(total, rel=1e-5)
    loss.total.backward()
    assert logits.grad[1, 3:].abs().sum() == 0, "padding teaches nothing"
    assert logits.grad[:, 0].abs().sum() == 0, "neither does the prompt"


def test_field_E8_a_server_is_paused_before_it_sleeps_and_resumed_after_its_cache_is_awake() -> None:
    """https://github.com/vllm-project/vllm/issues/44395: a forward between the wakings reads memory that is not there."""
    with FakeServer(backend="fsdp_ipc") as server:
        rhythm = Rhythm(Inference([server.url]), HookConfig(every=1, sleep_level=1))
        assert rhythm.sleeps
        states = []

        def look(_: Any = None) -> None:
            states.append((server.paused, frozenset(server.asleep)))

        for _ in range(2):
            rhythm.before_training()
            look()
            rhythm.before_push()
            look()
            assert HTTPWeightSyncClient(server.url).is_paused()
            rhythm.after_push()
            look()
        assert (
            states
            == [
                (True, frozenset({"weights", "kv_cache"})),
                (True, frozenset({"kv_cache"})),
                (False, frozenset()),
            ]
            * 2
        )
        steps = ("/pause", "/sleep", "/wake_up", "/wake_up", "/reset_prefix_cache", "/resume")
        assert [route for route in server.routes if route in steps] == list(steps) * 2
        assert server.violations == []


def _whole_job(rank: int, world_size: int, url: str, folder: str) -> list[dict[str, Any]]:
    """`recipes.grpo` against a server that sleeps, which none on a CPU does; its rollouts are made up."""
    from recipes import grpo

    def roll_out(
        inference: Any, task: Any, problems: Any, *, samples: int, version: int, **_: Any
    ) -> list[Rollout]:
        client = inference.client
        assert not client.is_sleeping() and not client.is_paused(), (
            "rollouts are asked of a server that is awake"
        )
        return [
            replace(_rollout(group, float(sample), 3), version=version)
            for group in range(len(problems))
            for sample in range(samples)
        ]

    grpo.roll_out = roll_out
    job = GrpoJobConfig(model=_sizes(experts=False))
    job.inference.url, job.data.kind, job.transfer.bucket_mb = url, "letters", 8
    job.hook = HookConfig(every=2)
    job.train.steps, job.train.batch_size, job.grpo.prompts, job.grpo.samples = 3, 4, 2, 4
    job.logger.report = False
    grpo.run(job, torch.device("cpu"), Path(folder))
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_field_E8_a_whole_job_with_a_server_that_sleeps(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/44395, https://github.com/vllm-project/vllm/issues/57853."""
    with FakeServer(backend="fsdp_ipc", workers=[NativeWorker(0)]) as server:
        (rows,) = run_ranks(_whole_job, 1, server.url, str(tmp_path), timeout_s=60)
        assert server.violations == []
        steps = ("/pause", "/sleep", "/wake_up", "/start_weight_update", "/finish_weight_update", "/resume")
        order = [route for route in server.routes if route in (*steps, "/reset_prefix_cache")]
    push = ["/pause", "/sleep", "/wake_up", *steps[3:5], "/wake_up", "/reset_prefix_cache", "/resume"]
    quiet = [route for route in push if "weight_update" not in route]
    assert order == push + quiet + push + push
    assert server.published == ["0", "2", "3"]
    assert [row["staleness"] for row in rows] == [0, 1, 0]
    assert [bool(row["sync"]) for row in rows] == [False, True, True]


@pytest.mark.parametrize("pause", [False, True])
def test_field_E5_a_server_that_stays_awake_forgets_the_old_weights_once_a_push(pause: bool) -> None:
    """https://github.com/NVIDIA-NeMo/RL/pull/4018: keys and values of 17 steps before."""
    with FakeServer(backend="fsdp_ipc", sleep_mode=False) as server:
        rhythm = Rhythm(Inference([server.url]), HookConfig(pause=pause))
        assert not rhythm.sleeps
        rhythm.before_training()
        assert server.routes == []
        rhythm.before_push()
        assert server.paused == pause
        assert rhythm.after_push() is None
        assert server.num_cache_resets == 1
        assert not server.paused
        server.cache_reset_answer = {"success": False}
        assert "did not reset" in str(rhythm.after_push())
        quiet = Rhythm(Inference([server.url]), HookConfig(reset_prefix_cache=False))
        quiet.after_push()
        assert server.num_cache_resets == 2


def test_the_version_is_asked_of_releases_that_tell_it() -> None:
    with FakeServer(backend="fsdp_ipc") as new, FakeServer(backend="fsdp_ipc", version="0.26.0") as old:
        assert Inference([new.url]).version() == "default"
        assert Inference([old.url]).version() is None


@pytest.mark.parametrize(
    ("mesh", "ranks", "sizes"),
    [
        (MeshConfig(), 8, (1, 8, 1, 1)),
        (MeshConfig(dp_replicate=2), 8, (2, 4, 1, 1)),
        (MeshConfig(dp_replicate=-1, dp_shard=2, tp=2), 8, (2, 2, 2, 1)),
        (MeshConfig(ep=-1), 8, (1, 8, 1, 8)),
        (MeshConfig(ep=4), 8, (1, 8, 1, 4)),
    ],
)
def test_the_axes_of_a_mesh(mesh: MeshConfig, ranks: int, sizes: tuple[int, ...]) -> None:
    assert resolve(mesh, ranks) == sizes


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(tp=3), r"mesh\.tp=3: does not go into the 8 ranks"),
        (MeshConfig(dp_shard=4), "does not go into the 8 ranks"),
        (MeshConfig(ep=3), r"mesh\.ep=3 must divide"),
    ],
)
def test_a_mesh_that_the_ranks_do_not_fill(mesh: MeshConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(mesh, 8)


def _sizes(*, experts: bool) -> ModelConfig:
    return ModelConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=256, tie_word_embeddings=not experts, num_experts=4 if experts else 0, num_experts_per_tok=2,
        moe_intermediate_size=32,
    )  # fmt: skip


def _train(
    folder: Path, mesh: MeshConfig, *, experts: bool, same_data: bool = False
) -> dict[str, torch.Tensor]:
    """Three steps; the weights as they would be sent."""
    layout = layout_of(mesh, "cpu")
    folder = folder / ("experts" if experts else "dense")
    model = build_model(folder, layout, has_weights=False, seed=1, compute_dtype=torch.float32)
    optim = OptimConfig(name="sgd", lr=0.5, warmup_steps=0, clip_norm=0.5)
    optimization = Optimization(model.parameters(), optim, 3)
    random = torch.Generator().manual_seed(0 if same_data else layout.data_rank)
    for _ in range(3):
        tokens = torch.randint(257, (2, 16), generator=random)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        assert optimization.step() > 0.5, "the gradient is clipped"
    return {name: tensor.clone() for name, tensor in DTensorSource(model)}


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-5)


def _all_layouts(rank: int, world_size: int, folder: str) -> None:
    path, plain = Path(folder), MeshConfig()
    _same(
        _train(path, MeshConfig(dp_replicate=2), experts=False),
        _train(path, plain, experts=False),
    )
    # Both ranks of a `tp` axis read the same.
    _same(
        _train(path, MeshConfig(tp=2), experts=False),
        _train(path, plain, experts=False, same_data=True),
    )
    with_experts = _train(path, plain, experts=True)
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in with_experts
    _same(_train(path, MeshConfig(ep=-1), experts=True), with_experts)


def test_all_layouts_train_to_the_same_weights(tmp_path: Path) -> None:
    """HSDP, tensor parallelism and sharded experts, against plain FSDP2: gradients, their norm, and what is sent."""
    write_model_dir(_sizes(experts=False), tmp_path / "dense")
    write_model_dir(_sizes(experts=True), tmp_path / "experts")
    run_ranks(_all_layouts, 2, str(tmp_path), timeout_s=150)


def test_a_vocabulary_of_made_up_words_begins_with_the_bytes() -> None:
    tokenizer = byte_tokenizer(1001)
    assert len(tokenizer) == 1001
    assert tokenizer.decode([257]).islower()
    assert tokenizer.decode([258]).isupper()
    assert len({tokenizer.decode([index]) for index in range(257, 1001)}) == 744
    assert tokenizer("aaa")["input_ids"] == byte_tokenizer()("aaa")["input_ids"]


def test_stages_are_told_by_their_medians_after_the_first_step() -> None:
    stages = Stages()
    with stages("train"):
        pass
    with stages("train"):
        pass
    assert list(stages.seconds) == ["train"]
    rows = [{"time": {"sync": value, "total": 10.0}} for value in (9.0, 1.0, 3.0, 2.0)]
    assert stage_medians(rows) == {"sync": 2.0, "total": 10.0}
    assert stage_medians(rows[:1]) == {"sync": 9.0, "total": 10.0}


def _two_nodes(rank: int, world_size: int, folder: str) -> tuple[list[str], str]:
    """Ranks that believe to be alone on their node: what is started, and two refusals."""
    from contextlib import ExitStack

    from recipes import inference
    from recipes.config import ServerConfig
    from recipes.ranks import check_ranks, on_each_node
    from recipes.report import Report

    started = []

    class Server:
        def __init__(self, model_dir: Path, *, num_replicas: int, log_path: Path, **_: Any) -> None:
            started.append((num_replicas, log_path.name))
            self.url, self.log_path = f"http://node{rank}:1", log_path

        def close(self) -> None: ...

    inference.Server = Server
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told = []

    def start(config: ServerConfig) -> inference.Inference:
        with ExitStack() as stack, Report(steps=1, active=False) as report:
            return inference.start_servers(
                config, Path("/m"), Path(folder), stack, report, torch.device("cpu")
            )

    def fail() -> None:
        raise ValueError(f"node {rank} is full")

    for refused in (
        lambda: start(ServerConfig()),
        lambda: on_each_node(fail),
        lambda: check_ranks(8),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            refused()
        told.append(str(caught.value))
    found = start(ServerConfig(host="0.0.0.0", allow_remote=True))
    assert started == [(1, "server.log" if rank == 0 else "server-rank1.log")]
    assert "inference.allow_remote=true" in told[0]
    assert "--nproc-per-node 8" in told[2]
    return found.urls, told[1]


def test_each_node_starts_a_server_and_all_ranks_know_all_of_them(tmp_path: Path) -> None:
    first, second = run_ranks(_two_nodes, 2, str(tmp_path))
    assert first[0] == second[0] == ["http://node0:1", "http://node1:1"]
    assert first[1] == "node 0 is full"
    assert second[1] == "node 1 is full"
