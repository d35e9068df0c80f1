"""The engine on a real vLLM model in this process: bytes, refusals, and that a failure leaves a whole model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_ipc.control import PeerError
from fsdp_ipc.digest_file import DigestFile
from fsdp_ipc.vllm_plugin import experts as experts_module
from fsdp_ipc.vllm_plugin.experts import held_experts
from tests.hand_trainer import HandTrainer, Layout, packed_layout, unpacked_layout
from tests.tiny_models import qwen3_config, qwen3_weights, write_checkpoint
from tests.vllm_inprocess import InProcess, computed_weights, inprocess_vllm

pytestmark = pytest.mark.vllm


class EngineRoutes:
    """vLLM's worker around an engine: the session flag that decides which calls reach it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.active = False

    def init(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.engine.start_weight_update()
        self.active = True

    def update(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.active = False
            raise

    def finish(self, version: str | None) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.engine.finish_weight_update()
        self.active = False


@pytest.fixture(scope="module")
def vllm() -> Iterator[InProcess]:
    with inprocess_vllm() as environment:
        yield environment


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(
    request: pytest.FixtureRequest, vllm: InProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One model to update, and what vLLM makes of the new weights when it loads them from a checkpoint."""
    config = qwen3_config(tied=request.param)
    folder = tmp_path_factory.mktemp("models")
    model, vllm_config = vllm.build(write_checkpoint(folder / "old", config, qwen3_weights(config, seed=1)))
    fresh = {}
    for seed in (2, 3):
        other, _ = vllm.build(
            write_checkpoint(folder / f"new{seed}", config, qwen3_weights(config, seed=seed))
        )
        fresh[seed] = computed_weights(other)
    return {"config": config, "model": model, "vllm_config": vllm_config, "fresh": fresh}


@pytest.fixture
def engine(served: dict[str, Any], vllm: InProcess) -> Iterator[Any]:
    engine = vllm.engine(served["model"], served["vllm_config"])
    yield engine
    engine.shutdown()


def _named(served: dict[str, Any], seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(qwen3_weights(served["config"], seed=seed).items())


def _assert_serves(served: dict[str, Any], seed: int) -> None:
    found, expected = computed_weights(served["model"]), served["fresh"][seed]
    assert found.keys() == expected.keys()
    assert any(name.endswith(":computed") for name in found)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong


@pytest.mark.parametrize("num_buckets", [1, 4, 7])
def test_packed_gives_what_a_fresh_load_gives(
    served: dict[str, Any], engine: Any, num_buckets: int, clean_shm: None
) -> None:
    with HandTrainer(EngineRoutes(engine)) as trainer:
        (hello,) = trainer.connect()
        assert hello is not None
        assert (hello["kind"], hello["worker_index"]) == ("hello", 0)
        for seed in (2, 3, 2):
            named = _named(served, seed)
            (report,) = trainer.send(packed_layout(named, num_buckets=num_buckets))
            _assert_serves(served, seed)
            assert report is not None
            assert (report["kind"], report["sync"], report["num_tensors"]) == (
                "sync",
                trainer.sync,
                len(named),
            )
            assert report["loader_params"] + report["replayed_params"] > 0
        engine.shutdown()


@contextmanager
def _after_a_sync(served: dict[str, Any], engine: Any) -> Iterator[tuple[HandTrainer, EngineRoutes]]:
    """A trainer that has sent the weights of seed 2 in five buckets."""
    routes = EngineRoutes(engine)
    with HandTrainer(routes) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=5))
        yield trainer, routes


def test_a_sync_like_the_last_one_is_loaded_in_start(served: dict[str, Any], engine: Any) -> None:
    with _after_a_sync(served, engine) as (trainer, routes):
        routes.update = None  # type: ignore[method-assign, assignment]
        for seed in (3, 2, 3):
            (report,) = trainer.send(packed_layout(_named(served, seed), num_buckets=5), offered=True)
            _assert_serves(served, seed)
            assert report is not None
            assert (report["sync"], report["num_tensors"]) == (trainer.sync, len(_named(served, seed)))
        del routes.update
        # Another plan, then the first one again: each is told by a request, and may be repeated after it.
        for seed, num_buckets, offered in ((2, 4, False), (3, 4, True), (2, 5, False), (3, 5, True)):
            trainer.send(packed_layout(_named(served, seed), num_buckets=num_buckets), offered=offered)
            _assert_serves(served, seed)


def test_a_verified_sync_can_be_repeated_and_is_verified_again(served: dict[str, Any], engine: Any) -> None:
    verified: list[tuple[int, bool]] = []
    engine._verify = lambda session, update: verified.append(
        (update.sync, update.verified_buckets is not None)
    )
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        digests = DigestFile.create(len(_named(served, 2)), 0)
        trainer.update_overrides = {"digests": {trainer.keys[0]: digests.name}}
        for seed, offered in ((2, False), (3, True), (2, True)):
            trainer.send(packed_layout(_named(served, seed), num_buckets=3), offered=offered)
            _assert_serves(served, seed)
        digests.close()
    assert verified == [(1, True), (2, True), (3, True)]


@pytest.mark.parametrize("case", ["first", "unpacked", "failed", "unfinished"])
def test_no_offer_is_taken_without_a_good_sync_before(served: dict[str, Any], engine: Any, case: str) -> None:
    routes = EngineRoutes(engine)
    with HandTrainer(routes) as trainer:
        trainer.connect()
        layout = unpacked_layout if case == "unpacked" else partial(packed_layout, num_buckets=3)
        if case != "first":
            trainer.send(layout(_named(served, 2)))
        if case in ("failed", "unfinished"):
            with pytest.raises(RuntimeError):
                trainer.send(layout(_named(served, 3)), before_bucket=_lose_a_rank)
        if case == "unfinished":
            trainer.send(layout(_named(served, 3)), finish=False)
            routes.active = False
        with pytest.raises(RuntimeError, match="was not taken"):
            trainer.send(layout(_named(served, 3)), offered=True)
        assert routes.active, "the start went well"


def _lose_a_rank(bucket: int) -> None:
    if bucket == 2:
        raise RuntimeError("lost a rank")


def test_an_offer_that_is_withdrawn_or_late_leaves_it_to_the_request(
    served: dict[str, Any], engine: Any
) -> None:
    with _after_a_sync(served, engine) as (trainer, routes):
        (control,) = trainer.controls
        for number, seed in enumerate((3, 2)):
            sync = trainer.sync + 1
            if number:
                control.offer(sync)
                thread = threading.Thread(target=trainer.routes.start)
                thread.start()
                assert control.wait_taken(sync, 20)
                control.withdraw(sync)
                thread.join()
            else:
                trainer.routes.start()
                control.offer(sync)
                assert control.wait_taken(sync, 0) is False
                control.withdraw(sync)
            routes.start = lambda: None  # type: ignore[method-assign]
            trainer.send(packed_layout(_named(served, seed), num_buckets=5))
            del routes.start
            _assert_serves(served, seed)


def test_a_failure_while_loading_in_start_is_told_and_leaves_a_whole_model(
    served: dict[str, Any], engine: Any
) -> None:
    with _after_a_sync(served, engine) as (trainer, routes):
        with pytest.raises(PeerError, match="lost a rank"):
            trainer.send(
                packed_layout(_named(served, 3), num_buckets=5), before_bucket=_lose_a_rank, offered=True
            )
        assert not routes.active
        with pytest.raises(PeerError, match="lost a rank"):
            trainer.controls[0].wait_consumed(trainer.sync, 5, 1)
        with pytest.raises(RuntimeError, match="was not taken"):
            trainer.send(packed_layout(_named(served, 3), num_buckets=5), offered=True)
        routes.active = False
        trainer.connect()
        trainer.send(packed_layout(_named(served, 3), num_buckets=5))
        _assert_serves(served, 3)


@pytest.mark.parametrize("offered", [False, True])
def test_what_a_trainer_gave_up_during_the_last_read_does_not_count(
    served: dict[str, Any], engine: Any, offered: bool
) -> None:
    """It may write to its memory again, and the finish of a sync that was offered may be at the server already."""
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=1))
        engine._synchronize = lambda: trainer.controls[0].fail(trainer.sync, "gave up")
        with pytest.raises(PeerError, match="gave up"):
            trainer.send(packed_layout(_named(served, 3), num_buckets=1), offered=offered)
        with pytest.raises(RuntimeError, match="without a matching start"):
            trainer.routes.finish("late")
        del engine._synchronize
        trainer.connect()
        trainer.send(packed_layout(_named(served, 3), num_buckets=1))
        _assert_serves(served, 3)


def test_unpacked_gives_what_a_fresh_load_gives(served: dict[str, Any], engine: Any) -> None:
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        for seed in (2, 3):
            trainer.send(unpacked_layout(_named(served, seed)))
            _assert_serves(served, seed)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_masters_in_the_trainers_memory_are_cast_on_the_way(
    served: dict[str, Any], engine: Any, packed: bool
) -> None:
    def masters(seed: int) -> Layout:
        # A quarter of a unit in the last place away, in both directions: neither cut off nor copied they come out right.
        named = [
            (name, tensor.float() * (1 + (-1) ** number * 2.0**-10))
            for number, (name, tensor) in enumerate(_named(served, seed))
        ]
        layout = packed_layout(named, num_buckets=3) if packed else unpacked_layout(named)
        for row in layout.plan["tensors"]:
            row += ["float32"]
            row[1] = "bfloat16"
        return layout

    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        for seed in (2, 3, 2):
            (report,) = trainer.send(masters(seed))
            _assert_serves(served, seed)
        assert report is not None
        assert report["replayed_params"] > 0
        trainer.send(packed_layout(_named(served, 3), num_buckets=2))
        _assert_serves(served, 3)


def test_plans_and_memory_can_change_between_syncs(served: dict[str, Any], engine: Any) -> None:
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        trainer.send(unpacked_layout(_named(served, 3)))
        _assert_serves(served, 3)
        trainer.send(packed_layout(_named(served, 2), num_buckets=5))
        _assert_serves(served, 2)


def test_names_in_any_order_and_portion(served: dict[str, Any], engine: Any) -> None:
    named = _named(served, 2)
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(0)).tolist()
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout([named[index] for index in order], num_buckets=len(named)))
        _assert_serves(served, 2)


def test_a_tie_may_be_sent_under_both_names(served: dict[str, Any], engine: Any) -> None:
    named = _named(served, 3)
    if not served["config"]["tie_word_embeddings"]:
        pytest.skip("only a tied model has two names for one tensor")
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout([*named, ("lm_head.weight", named[0][1])], num_buckets=4))
        _assert_serves(served, 3)


def _without(name: str) -> Any:
    return lambda named: [(n, t) for n, t in named if n != name]


def _with(name: str, change: Any) -> Any:
    return lambda named: [(n, change(t) if n == name else t) for n, t in named]


def _also(name: str) -> Any:
    return lambda named: [*named, (name, torch.zeros(3, dtype=torch.bfloat16))]


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
REFUSED = {
    "missing piece": (_without(K_PROJ), ["model.layers.1.self_attn.qkv_proj.weight", "q_proj"]),
    "missing parameter": (_without(NORM), [NORM, "nothing was sent"]),
    "unknown": (
        _also("model.layers.0.mlp.extra.weight"),
        ["does not know", "model.layers.0.mlp.extra.weight"],
    ),
    "two unknown": (
        lambda named: _also("model.layers.9.x")(_also("nonsense")(named)),
        ["model.layers.9.x", "nonsense"],
    ),
    "duplicate": (
        lambda named: [*named, named[3]],
        ["more than once", "model.layers.0.self_attn.k_proj.weight"],
    ),
    "long": (_with(DOWN, lambda t: torch.cat([t, t], 1)), ["wrong shapes", DOWN, "[64, 192]"]),
    "short": (_with(DOWN, lambda t: t[:, :-1]), ["wrong shapes", DOWN]),
    "broadcast": (_with(NORM, lambda t: t[:1]), ["wrong shapes", NORM]),
    "transposed": (_with(DOWN, lambda t: t.t()), ["wrong shapes", DOWN]),
    "wide dtype": (_with(K_PROJ, lambda t: t.float()), ["round", K_PROJ, "float32", "bfloat16"]),
    "other dtype": (_with(K_PROJ, lambda t: t.half()), ["round", K_PROJ]),
    "integers": (_with(NORM, lambda t: t.to(torch.int32)), ["round", NORM]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_field_a_half_sent_model_is_refused_by_name_before_data_moves(
    served: dict[str, Any], engine: Any, case: str
) -> None:
    bend, words = REFUSED[case]
    produced: list[int] = []
    with HandTrainer(EngineRoutes(engine), timeout_s=10) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        before = dict(served["model"].named_parameters(remove_duplicate=False))
        with pytest.raises(ValueError) as caught:
            # More buckets than slots, so that the trainer has to wait for a worker that never reads.
            trainer.send(packed_layout(bend(_named(served, 3)), num_buckets=6), before_bucket=produced.append)
        for word in words:
            assert word in str(caught.value)
        assert max(produced) <= 2
        _assert_serves(served, 2)
        after = dict(served["model"].named_parameters(remove_duplicate=False))
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        trainer.connect()
        trainer.send(packed_layout(_named(served, 3), num_buckets=4))
        _assert_serves(served, 3)


def test_allow_missing_lets_named_parameters_keep_their_weights(
    served: dict[str, Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_IPC_ALLOW_MISSING", "model.layers.*.bogus, model.norm.weight")
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=2))
        norm = served["model"].model.norm.weight.clone()
        trainer.send(packed_layout(_without(NORM)(_named(served, 3)), num_buckets=2))
        assert torch.equal(served["model"].model.norm.weight, norm)


def test_a_failed_update_leaves_the_model_whole_and_the_next_one_works(
    served: dict[str, Any], engine: Any
) -> None:
    def fail_at_three(bucket: int) -> None:
        if bucket == 3:
            raise OSError("gather failed")

    routes = EngineRoutes(engine)
    with HandTrainer(routes) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        identities = {
            name: id(param) for name, param in served["model"].named_parameters(remove_duplicate=False)
        }
        with pytest.raises(Exception, match="gather failed"):
            trainer.send(packed_layout(_named(served, 3), num_buckets=4), before_bucket=fail_at_three)
        assert not routes.active
        assert identities == {
            name: id(param) for name, param in served["model"].named_parameters(remove_duplicate=False)
        }
        assert all(not param.is_meta for param in served["model"].parameters())
        trainer.connect()
        trainer.send(packed_layout(_named(served, 3), num_buckets=4))
        _assert_serves(served, 3)


def test_a_half_open_reload_of_somebody_else_is_healed(served: dict[str, Any], engine: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        initialize_layerwise_reload(served["model"])
        served["model"].load_weights(_named(served, 3)[:7])
        assert any(param.is_meta for param in served["model"].parameters())
        trainer.send(packed_layout(_named(served, 3), num_buckets=4))
        _assert_serves(served, 3)


def test_abort_closes_the_update_and_vllm_session(served: dict[str, Any], engine: Any) -> None:
    routes = EngineRoutes(engine)
    with HandTrainer(routes) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        trainer.send(packed_layout(_named(served, 3), num_buckets=4), finish=False)
        with pytest.raises(RuntimeError, match="aborted: changed my mind"):
            routes.update({"session": trainer.session, "abort": "changed my mind"})
        assert not routes.active
        assert all(not param.is_meta for param in served["model"].parameters())
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        _assert_serves(served, 2)


def test_without_a_dry_run_the_end_check_names_what_is_missing(
    served: dict[str, Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp_ipc.vllm_plugin import completeness

    def unusable(*args: object, **kwargs: object) -> None:
        raise completeness.UnusableError("loaders look at values")

    monkeypatch.setattr(completeness, "examine", unusable)
    routes = EngineRoutes(engine)
    for bend, words in (
        (_without(K_PROJ), "model.layers.1.self_attn.qkv_proj"),
        (_without(NORM), "model.norm"),
    ):
        with HandTrainer(routes) as trainer:
            trainer.connect()
            with pytest.raises(RuntimeError, match=words):
                trainer.send(packed_layout(bend(_named(served, 3)), num_buckets=4))
            assert all(not param.is_meta for param in served["model"].parameters())
            with pytest.raises(RuntimeError, match="aborted"):
                routes.update({"session": trainer.session, "abort": "after a failed finish"})
            trainer.connect()
            trainer.send(packed_layout(_named(served, 2), num_buckets=4))
            _assert_serves(served, 2)


def test_worker_gives_up_when_the_trainer_stalls(served: dict[str, Any], engine: Any) -> None:
    routes = EngineRoutes(engine)
    stop = threading.Event()
    with HandTrainer(routes, timeout_s=1.0) as trainer:
        trainer.connect()
        with pytest.raises(TimeoutError):
            trainer.send(
                packed_layout(_named(served, 3), num_buckets=4),
                before_bucket=lambda bucket: bucket == 2 and stop.wait(3.0),
            )
        assert not routes.active
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        _assert_serves(served, 2)


def _send_with(engine: Any, layout: Layout, **overrides: Any) -> None:
    with HandTrainer(EngineRoutes(engine), timeout_s=5) as trainer:
        trainer.connect()
        trainer.update_overrides = overrides
        trainer.send(layout)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"session": "0" * 32}, "unknown session"),
        ({"plan": None}, "unknown plan"),
        ({"allocations": None}, "not open here"),
        ({"allocations": {"cpu:elsewhere:0": []}}, "no allocation for device"),
        ({"sync": 0}, "update_info.sync"),
        ({"surprise": 1}, "unknown field"),
    ],
)
def test_bad_updates_are_refused(
    served: dict[str, Any], engine: Any, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _send_with(engine, packed_layout(_named(served, 2), num_buckets=4), **overrides)


def test_rows_outside_their_allocation_are_refused(served: dict[str, Any], engine: Any) -> None:
    for column, value in ((5, 1 << 40), (4, 99)):
        layout = packed_layout(_named(served, 2), num_buckets=4)
        with HandTrainer(EngineRoutes(engine), timeout_s=5) as trainer:
            trainer.connect()
            bent = [list(row) for row in layout.plan["tensors"]]
            bent[-1][column] = value
            trainer.update_overrides = {"plan": {**layout.plan, "tensors": bent}}
            with pytest.raises(ValueError, match=r"allocation"):
                trainer.send(layout)


def test_stale_sync_numbers_and_missing_starts_are_refused(served: dict[str, Any], engine: Any) -> None:
    routes = EngineRoutes(engine)
    with pytest.raises(ValueError, match="no session"):
        routes.start()
    with HandTrainer(routes) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        trainer.sync -= 1
        with pytest.raises(ValueError, match="expected a higher number"):
            trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        with pytest.raises(ValueError, match="nothing to finish"):
            engine.finish_weight_update()


def test_tokens_must_agree(served: dict[str, Any], engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_IPC_TOKEN", "right")
    for token in (None, "wrong", "righ", "right "):
        with (
            HandTrainer(EngineRoutes(engine), init_overrides={"token": token}) as trainer,
            pytest.raises(ValueError, match="FSDP_IPC_TOKEN"),
        ):
            trainer.connect()
    with HandTrainer(EngineRoutes(engine), init_overrides={"token": "right"}) as trainer:
        assert trainer.connect()[0] is not None


def test_a_worker_finds_its_trainer_rank(served: dict[str, Any], engine: Any) -> None:
    with HandTrainer(EngineRoutes(engine), num_ranks=3) as trainer:
        for index, expected in ((0, 0), (1, 1), (2, 2), (4, 1)):
            engine.parallel_config.rank = index
            reports = trainer.connect()
            assert [report is not None for report in reports] == [rank == expected for rank in range(3)]
        engine.parallel_config.rank = 0
        trainer.init_overrides = {"endpoints": [{"device": "cpu:elsewhere:0", "control": "fsdp_ipc-1-a.ctl"}]}
        with pytest.raises(ValueError, match="no trainer rank on this worker's host"):
            trainer.connect()


def test_a_trainer_rank_serves_one_worker_at_a_time(
    served: dict[str, Any], engine: Any, vllm: InProcess
) -> None:
    other = vllm.engine(served["model"], served["vllm_config"])
    with HandTrainer(EngineRoutes(engine), num_ranks=2) as trainer:
        reports = trainer.connect()
        assert [report is not None for report in reports] == [True, False]
        endpoints = [
            {"device": key, "control": control.name}
            for key, control in zip(trainer.keys, trainer.controls, strict=True)
        ]
        info = {"protocol": 3, "session": "e" * 32, "token": None, "endpoints": endpoints, "timeout_s": 1}
        # A worker of another server has the same index; it takes the rank that is left.
        other.init_transfer_engine(other.parse_init_info(info))
        assert trainer.controls[1].read_report() is not None
        third = vllm.engine(served["model"], served["vllm_config"])
        with pytest.raises(ValueError, match="has a worker already"):
            third.init_transfer_engine(third.parse_init_info(info))
        other.shutdown()
        third.init_transfer_engine(third.parse_init_info(info))
        third.shutdown()
        # The first worker's session went on undisturbed.
        trainer.num_ranks = 1
        del trainer.keys[1:]
        trainer.controls.pop().close()
        trainer.send(packed_layout(_named(served, 2), num_buckets=6))
        _assert_serves(served, 2)


def test_syncs_leave_no_mappings_or_descriptors_behind(served: dict[str, Any], engine: Any) -> None:
    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return maps.count("fsdp_ipc-"), len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    with HandTrainer(EngineRoutes(engine)) as trainer:
        trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        open_ = count()
        for _ in range(20):
            trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        assert count() == open_
        for num_buckets in (3, 5, 4):
            trainer.send(packed_layout(_named(served, 2), num_buckets=num_buckets))
        assert count() == open_
        for _ in range(3):
            trainer.connect()
        trainer.send(packed_layout(_named(served, 2), num_buckets=4))
        assert count() == open_
    engine.shutdown()
    assert count() == before


def test_held_experts_are_read_from_the_layers_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(experts_module.logger, "info", lambda text, *args: said.append(text % args))
    layer: Any = torch.nn.Module()
    layer.register_buffer("_expert_map", torch.tensor([-1, 1, -1, 0]))
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({})})})
    experts: Any = model["mlp"]
    experts["experts"].add_module("routed_experts", layer)
    assert held_experts(model) == {"mlp.experts": [3, 1]}
    layer.expert_map_manager = SimpleNamespace(num_redundant_experts=2, num_fused_shared_experts=0)
    assert held_experts(model) is None
    layer.expert_map_manager = None
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=True))
    assert held_experts(model) is None
    assert len(said) == 2
    assert all("sent to every worker: vLLM moves or repeats experts" in text for text in said)
    layer.moe_config = None
    layer._expert_map = None
    assert held_experts(model) is None


def test_registering_twice_is_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from fsdp_ipc.vllm_plugin import BACKEND, register

    register()
    register()
    assert WeightTransferEngineFactory._registry[BACKEND]().__name__ == "FSDPIPCWeightTransferEngine"


def test_field_D24_a_draft_model_is_no_target() -> None:
    """https://github.com/radixark/miles/pull/1926: an update of a frozen draft spoiled it; ours never reaches one."""
    from vllm.v1.worker.gpu_worker import Worker

    from fsdp_ipc.vllm_plugin.engine import FSDPIPCWeightTransferEngine

    worker = Worker.__new__(Worker)
    worker.weight_transfer_engine = FSDPIPCWeightTransferEngine.__new__(FSDPIPCWeightTransferEngine)
    if not hasattr(worker, "_start_weight_update"):
        pytest.skip("this vLLM release has no updates of draft models")
    with pytest.raises(RuntimeError, match="does not support draft model weight updates"):
        worker._start_weight_update(is_draft=True)
