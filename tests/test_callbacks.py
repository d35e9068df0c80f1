"""Callbacks are told of every sync in order, and nothing that they do can stop one or part the ranks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ipc import TrainerGroup, WeightSyncError
from fsdp_ipc.callbacks import (
    CallbackError,
    CheckVersion,
    MetricsFile,
    MLflow,
    OpenTelemetry,
    PauseServer,
    ResetPrefixCache,
    SyncCallback,
    SyncProgress,
    TensorBoard,
    WandB,
)
from fsdp_ipc.callbacks.base import CallbackRunner, Sync
from fsdp_ipc.stats import StageTimer
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import run_ranks
from tests.toy import build, full, make_sender, shard

BUCKET = 800


def serve(num_workers: int = 1) -> tuple[FakeServer, list[NativeWorker]]:
    workers = [NativeWorker(index) for index in range(num_workers)]
    return FakeServer(backend="fsdp_ipc", workers=workers), workers


class Recorder(SyncCallback):
    """Remembers what it was told."""

    def __init__(self, name: str = "", log: list[Any] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log

    def on_sync_start(self, sync: Any) -> None:
        self.log.append((self.name + "start", sync.number, sync.version, sync.rank, sync.is_sender))

    def on_bucket(self, sync: Any, bucket: int, num_buckets: int) -> None:
        self.log.append((self.name + "bucket", bucket, num_buckets))

    def on_sync_end(self, sync: Any, stats: Any) -> None:
        assert sync.spans
        assert stats.seconds <= sync.seconds
        self.log.append((self.name + "end", stats.sync, stats.num_buckets))

    def on_sync_error(self, sync: Any, error: BaseException) -> None:
        self.log.append((self.name + "error", sync.number, type(error).__name__))

    def close(self) -> None:
        self.log.append((self.name + "close",))


class Broken(SyncCallback):
    """Raises wherever it can, on one rank."""

    def __init__(self, rank: int, *, required: bool = False) -> None:
        self._rank, self.required = rank, required

    def _raise(self, sync: Any) -> None:
        if sync.rank == self._rank:
            raise KeyError("callback")

    def on_sync_start(self, sync: Any) -> None:
        self._raise(sync)

    def on_bucket(self, sync: Any, bucket: int, num_buckets: int) -> None:
        self._raise(sync)

    def on_sync_end(self, sync: Any, stats: Any) -> None:
        self._raise(sync)

    def on_sync_error(self, sync: Any, error: BaseException) -> None:
        self._raise(sync)

    def close(self) -> None:
        raise KeyError("close")


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def syncs(url: str, callbacks: list[SyncCallback], versions: list[Any]) -> list[str]:
    """Push on every rank of the job that there is; returns what each sync raised."""
    model = shard(build(), init_device_mesh("cpu", (dist.get_world_size(),)))
    raised = []
    with make_sender(model, url, bucket_bytes=BUCKET, callbacks=callbacks) as sender:
        for version in versions:
            try:
                sender.send(version)
                raised.append("")
            except WeightSyncError as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised


def _recorded(rank: int, world: int, url: str) -> Any:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    log: list[Any] = []
    # Only rank 1 has any: lists may differ.
    given = [Recorder("a ", log), Recorder("b ", log)] if rank == 1 else []
    with make_sender(model, url, bucket_bytes=BUCKET, callbacks=given) as sender:
        buckets = sender.send(7).num_buckets
    return log, buckets


def test_order_of_events_on_the_rank_that_has_callbacks() -> None:
    server, _ = serve(2)
    with server:
        (first, _), (log, buckets) = run_ranks(_recorded, 2, server.url)
    assert first == []
    assert buckets > 2
    wanted: list[Any] = [("a start", 1, "7", 1, False), ("b start", 1, "7", 1, False)]
    wanted += [(f"{name} bucket", n, buckets) for n in range(buckets) for name in "ab"]
    wanted += [("b end", 1, buckets), ("a end", 1, buckets), ("b close",), ("a close",)]
    assert log == wanted


def _broken(rank: int, world: int, url: str) -> Any:
    logging.getLogger("fsdp_ipc").setLevel(logging.ERROR)
    model = shard(build(), init_device_mesh("cpu", (world,)))
    beside, raised = Recorder(), []
    for required in (False, True):
        given = [Broken(1, required=required), beside]
        with make_sender(model, url, bucket_bytes=BUCKET, callbacks=given) as sender:
            for version in (1, 2):
                try:
                    sender.send(f"{version} {required}")
                except CallbackError as error:
                    raised.append((str(error), error.stats and error.stats.version))
    return raised, beside.log, full(model, torch.bfloat16)


def test_a_callback_that_raises_everywhere_on_one_rank_neither_stops_a_sync_nor_parts_the_ranks() -> None:
    server, workers = serve(2)
    with server:
        (raised, log, wanted), (raised_1, log_1, _) = run_ranks(_broken, 2, server.url)
        assert server.published == ["1 False", "2 False", "1 True", "2 True"]
        assert server.violations == []
    assert raised == raised_1
    assert [version for _, version in raised] == ["1 True", "2 True"], (
        "only a required one reaches the caller"
    )
    for text, _ in raised:
        assert "rank 1: Broken.on_sync_start: KeyError: 'callback'; Broken.on_sync_end: KeyError" in text
    for events in (log, log_1):
        whole = ["start", "end", "start", "end", "close"]
        assert [event[0] for event in events if event[0] != "bucket"] == whole * 2
    for worker in workers:
        assert all(torch.equal(worker.weights[name], value) for name, value in wanted.items())


def test_a_sync_that_fails_is_told_once_and_the_next_one_is_whole(alone: None) -> None:
    server, _ = serve()
    with server:
        server.fail("/update_weights", "boom")
        recorder = Recorder()
        raised = syncs(server.url, [recorder], [1, 2])
    assert "boom" in raised[0]
    assert raised[1] == ""
    told = [event[:3] for event in recorder.log if event[0] != "bucket"]
    assert told == [
        ("start", 1, "1"), ("error", 1, "WeightSyncError"), ("start", 2, "2"),
        ("end", 2, told[3][2]), ("close",),
    ]  # fmt: skip


def test_a_bucket_whose_gather_has_two_spans_is_told_once(alone: None) -> None:
    """As on a GPU, where the wait for the device comes after the last bucket was queued."""
    recorder, timer = Recorder(), StageTimer()
    group = TrainerGroup(dist.group.WORLD)
    runner = CallbackRunner([recorder], group, None)
    runner.begin(1, None, timer, lambda: 2)
    for bucket in (0, 1, 1):
        with timer.stage("gather", bucket):
            pass
    assert recorder.log[1:] == [("bucket", 0, 2), ("bucket", 1, 2)]
    group.close()


def test_what_is_no_callback_is_refused(alone: None) -> None:
    server, _ = serve()
    with server, pytest.raises(WeightSyncError, match="callbacks must be SyncCallback objects, got 3"):
        syncs(server.url, [3], [])  # type: ignore[list-item]


# What acts on the server.


def test_field_E5_the_prefix_cache_is_reset_once_after_finish(alone: None) -> None:
    """https://github.com/NVIDIA-NeMo/RL/pull/4018, https://github.com/vllm-project/vllm/issues/9744"""
    server, _ = serve()
    with server:
        raised = syncs(server.url, [ResetPrefixCache()], [1])
        assert raised == [""]
        assert server.routes[-2:] == ["/finish_weight_update", "/reset_prefix_cache"]
        assert server.num_cache_resets == 1
        server.calls.clear()
        syncs(server.url, [], [2])
        assert "/reset_prefix_cache" not in server.routes


@pytest.mark.parametrize("fault", ["says no", "answers 500"])
def test_field_E5_a_reset_that_was_not_done_is_a_warning(
    fault: str, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/vllm-project/vllm-omni/issues/6739: the reset was a stub that said so to nobody."""
    server, _ = serve()
    with server:
        if fault == "says no":
            server.cache_reset_answer = {"success": False}
        else:
            server.fail("/reset_prefix_cache", "boom")
        assert syncs(server.url, [ResetPrefixCache(reset_running_requests=True)], [1]) == [""]
    (warned,) = [record for record in caplog.records if record.name.startswith("fsdp_ipc.callbacks")]
    assert warned.levelname == "WARNING"
    assert ("did not drop its prefix cache" if fault == "says no" else "boom") in warned.getMessage()


def test_the_server_is_paused_for_the_sync_and_resumed_whatever_happens(alone: None) -> None:
    server, _ = serve()
    with server:
        server.fail("/start_weight_update", "boom", after=1)
        callbacks = [PauseServer(), ResetPrefixCache()]
        raised = syncs(server.url, callbacks, [1, 2])
        assert raised[0] == ""
        assert "boom" in raised[1]
        assert not server.paused
        around = [
            r
            for r in server.routes
            if r in ("/pause", "/resume", "/start_weight_update", "/reset_prefix_cache")
        ]
        assert around == [
            "/pause", "/start_weight_update", "/reset_prefix_cache", "/resume", "/pause", "/start_weight_update", "/resume",
        ]  # fmt: skip
        assert [body for route, body in server.calls if route == "/finish_weight_update"]


def test_a_server_that_was_paused_stays_paused(alone: None) -> None:
    server, _ = serve()
    with server:
        server.paused = True
        raised = syncs(server.url, [PauseServer()], [1])
        assert raised == [""]
        assert server.paused
        assert "/pause" not in server.routes


def test_a_pause_that_fails_reaches_the_caller_after_the_sync(alone: None) -> None:
    server, _ = serve()
    with server:
        server.fail("/pause", "no pause today")
        raised = syncs(server.url, [PauseServer("abort")], [1])
        assert server.published == ["1"]
    assert raised[0].startswith("CallbackError")
    assert "no pause today" in raised[0]
    with pytest.raises(ValueError, match="mode='never'"):
        PauseServer("never")  # type: ignore[arg-type]


def test_the_version_is_read_back(alone: None) -> None:
    server, _ = serve()
    with server:
        raised = syncs(server.url, [CheckVersion()], [1, None])
        assert raised == ["", ""]
        server.answer("/weight_info", 200, json.dumps({"weight_version": "other"}))
        raised = syncs(server.url, [CheckVersion()], [2])
        assert "publishes version 'other', expected '2'" in raised[0]


# What records.


def _files(rank: int, world: int, url: str, folder: str) -> None:
    syncs(url, [MetricsFile(f"{folder}/all/{{rank}}.jsonl"), MetricsFile(f"{folder}/one.jsonl")], [3, 4])


def test_metrics_go_into_files_of_json_lines(tmp_path: Path) -> None:
    server, _ = serve(2)
    with server:
        server.fail("/start_weight_update", "boom", after=1)
        run_ranks(_files, 2, server.url, str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == ["0.jsonl", "1.jsonl"]
    for path in (tmp_path / "one.jsonl", tmp_path / "all" / "1.jsonl"):
        good, bad = (json.loads(line) for line in path.read_text().splitlines())
        assert good["version"] == "3"
        assert good["bytes"] > 0
        assert {span[0] for span in good["spans"]} >= {"prepare", "gather", "request", "finish"}
        assert abs(good["time"] - time.time()) < 100
        assert "boom" in bad["error"]
    assert good["rank"] == 1


def test_tensorboard_reads_what_was_written(alone: None, tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard, from the extra 'dev'",
    )
    server, _ = serve()
    with server:
        raised = syncs(server.url, [TensorBoard(tmp_path)], [5, 6])
    assert raised == ["", ""]
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("sync/seconds")] == [5, 6]
    assert events.Scalars("sync/bytes")[0].value > 0
    assert "sync/stage/gather_s" in events.Tags()["scalars"]


def _traced(url: str) -> list[dict[str, Any]]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("job")
    with tracer.start_as_current_span("step"):
        raised = syncs(url, [OpenTelemetry(tracer)], [1, 2])
    assert raised[0] == ""
    assert "boom" in raised[1]
    spans = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
    provider.shutdown()
    return spans


def test_opentelemetry_gets_a_span_a_sync_and_one_a_stage(alone: None) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk, from the extra 'dev'")
    server, _ = serve()
    with server:
        server.fail("/start_weight_update", "boom", after=1)
        spans = _traced(server.url)
    (step,) = [span for span in spans if span["name"] == "step"]
    good, bad = (span for span in spans if span["name"] == "weight_sync")
    assert {good["parent_id"], bad["parent_id"]} == {step["context"]["span_id"]}
    assert good["attributes"]["fsdp_ipc.version"] == "1"
    assert good["attributes"]["fsdp_ipc.num_buckets"] > 1
    assert bad["status"]["status_code"] == "ERROR"
    assert bad["events"][0]["name"] == "exception"
    inside = [span for span in spans if span["parent_id"] == good["context"]["span_id"]]
    buckets = [s["attributes"]["fsdp_ipc.bucket"] for s in inside if s["name"] == "weight_sync.gather"]
    assert buckets == list(range(good["attributes"]["fsdp_ipc.num_buckets"]))
    assert all(
        good["start_time"] <= span["start_time"] <= span["end_time"] <= good["end_time"] for span in inside
    )


def _weights_and_biases(rank: int, world: int, url: str, folder: str) -> dict[str, Any]:
    import wandb

    run = wandb.init(
        project="test", dir=folder, mode="offline", settings=wandb.Settings(silent=True, console="off")
    )
    raised = syncs(url, [WandB()], [11])
    run.log({"loss": 1.0})
    summary = {key: run.summary.get(key) for key in ("sync/seconds", "sync/step", "loss", "_step")}
    run.finish()
    return {**summary, "raised": raised}


def test_wandb_gets_each_sync_beside_the_loops_own_values(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    server, _ = serve()
    with server:
        found = run_ranks(_weights_and_biases, 1, server.url, str(tmp_path), timeout_s=120)[0]
    assert found["raised"] == [""]
    assert found["sync/seconds"] > 0
    assert (found["sync/step"], found["loss"], found["_step"]) == (11, 1.0, 0)


def _mlflow(rank: int, world: int, url: str, folder: str) -> dict[str, Any]:
    import mlflow

    mlflow.set_tracking_uri(f"file:{folder}/runs")
    mlflow.set_experiment("syncs")
    with mlflow.start_run() as run:
        raised = syncs(url, [MLflow()], [11, 12])
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "sync/seconds")
    return {"steps": [metric.step for metric in history], "raised": raised}


def test_mlflow_gets_each_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow or mlflow-skinny: pip install mlflow-skinny")
    server, _ = serve()
    with server:
        env = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
        found = run_ranks(_mlflow, 1, server.url, str(tmp_path), env=env)[0]
    assert found == {"steps": [11, 12], "raised": ["", ""]}


# The bar.


def _sync(seconds: float = 0.0) -> Any:
    return Sync(
        number=1,
        version="5",
        rank=0,
        num_ranks=1,
        is_sender=True,
        client=None,
        began_ns=0,
        timer=StageTimer(),
    )


def test_a_long_sync_shows_a_bar_on_a_terminal_and_only_there() -> None:
    console = pytest.importorskip("rich.console", reason="needs rich, from the extra 'recipes'")
    from io import StringIO

    from rich.progress import Progress

    for terminal in (True, False):
        out = StringIO()
        with Progress(console=console.Console(file=out, force_terminal=terminal), transient=True) as progress:
            bar = SyncProgress(after_s=0.01, progress=progress)
            bar.on_sync_start(_sync())
            bar.on_bucket(_sync(), 0, 4)
            time.sleep(0.3)
            bar.on_bucket(_sync(), 1, 4)
            shown = [(task.description, task.completed, task.total) for task in progress.tasks]
            assert shown == ([("weights 5", 2, 4)] if terminal else [])
            bar.on_sync_error(_sync(), RuntimeError())
            assert not progress.tasks
        assert ("weights 5" in out.getvalue()) == terminal


def test_a_short_sync_shows_nothing_and_leaves_no_thread() -> None:
    import threading

    pytest.importorskip("rich", reason="needs rich, from the extra 'recipes'")
    bar = SyncProgress(after_s=60)
    bar._on_terminal = lambda: True
    before = threading.enumerate()
    bar.on_sync_start(_sync())
    (timer,) = (thread for thread in threading.enumerate() if thread not in before)
    bar.on_sync_end(_sync(), None)
    timer.join(5)
    assert not timer.is_alive()
