"""One run of the benchmark on this rank: variants alternate, are proved on the workers, and are timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes.bench_config import BenchConfig
from recipes.bench_report import Log, chrome_trace, spread, timeline_png
from recipes.floors import copy_floor, floors_text, foreach_floor, gather_floor, synchronize
from recipes.probe import WorkerProbe
from recipes.ranks import on_rank0
from recipes.shapes import build, checkpoint_tensors, negate
from recipes.sizes import shape_of
from recipes.traffic import counted_traffic
from recipes.variants import Unavailable, Variant, counted_requests, make_variant
from recipes.weight_digest import Verdict, expected_digests
from recipes.worker_extension import memory_figures

FLAT_BYTES = 2 << 20
"""Growth over many pushes that still counts as flat: an allocator rounds."""


@dataclass
class _Run:
    """One variant of one case while it is measured."""

    name: str
    variant: Variant | None = None
    verdict: Verdict = field(default_factory=Verdict)
    error: str = ""
    trainer_extra: int | None = None
    worker_extra: int | None = None
    allocations: int | None = None
    traffic: int = 0
    first_s: float = 0.0
    second_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.variant is not None and not self.error


class Bench:
    """One run on this rank; every method is called on all ranks, in step.

    Args:
        config: The settings.
        out: Directory for results, the same on all ranks; rank 0 writes to it.
        device: This rank's device.
        urls: Servers by backend.
    """

    def __init__(self, config: BenchConfig, out: Path, device: torch.device, urls: dict[str, str]) -> None:
        self._config, self._out, self._device, self._urls = config, out, device, urls
        self.log = Log(out / "bench.jsonl" if dist.get_rank() == 0 else None)
        self._num_workers = dist.get_world_size()
        self._shape = shape_of(config.shape.name, config.shape.num_layers)

    def run(self) -> bool:
        """Measure every case; whether all variants that could run came out right."""
        self.log.write(
            "machine",
            **_machine(self._device),
            config=OmegaConf.to_container(OmegaConf.structured(self._config)),
        )
        good = True
        for dtype in self._config.dtypes:
            for experts in self._config.shape.experts if self._shape.is_moe else ["each"]:
                case = f"{self._shape.name} {dtype}" + (f" experts {experts}" if self._shape.is_moe else "")
                try:
                    good = self._case(case, getattr(torch, dtype), experts) and good
                except Exception as error:  # noqa: BLE001 - the other cases still count
                    good = False
                    self.log.say(f"{case}: FAILED: {type(error).__name__}: {error}")
                    self.log.write("failed", case=case, error=f"{type(error).__name__}: {error}")
                _free(self._device)
        return good

    def _case(self, case: str, dtype: torch.dtype, experts: str) -> bool:
        mesh = _mesh(self._config, self._device)
        model = build(
            self._shape,
            mesh,
            device=self._device,
            dtype=dtype,
            experts=experts,
            tp_axis="tp" if self._config.tp else None,
        )
        wire = torch.bfloat16
        nbytes = sum(p.numel() for p in model.parameters()) * wire.itemsize
        floors = {
            "copy": copy_floor(nbytes, self._device),
            "foreach": foreach_floor(model, wire, self._device),
            "all_gather": gather_floor(nbytes, self._device, None),
        }
        self.log.write("floors", case=case, bytes=nbytes, **floors)
        self.log.say(f"{case}: {nbytes / 1e9:.2f} GB on the wire; floors: {floors_text(floors)}")
        expected = self._expected(model, experts)
        negated = self._negated(model, experts)
        good, reported = True, []
        for names in _rounds(self._config.variants):
            runs = [_Run(name) for name in names]
            try:
                for run in runs:
                    self._attempt(case, run, partial(self._begin, run, model, mesh, experts, expected))
                for rep in range(self._config.reps):
                    for run in runs[rep % len(runs) :] + runs[: rep % len(runs)]:
                        if run.alive:
                            self._attempt(case, run, partial(self._rep, run))
                for run in runs:
                    if run.alive:
                        self._attempt(case, run, partial(self._end, run, model, negated))
                    reported.append(run)
                    self._report(case, run, [*reported, *runs], floors)
                if self._config.soak and "ours" in names:
                    self._soak(case, runs[names.index("ours")], model, negated)
            finally:
                for run in runs:
                    if run.variant is not None:
                        run.variant.close()
            good = good and all(run.alive or run.error.startswith("not run") for run in runs)
        return good

    def _rep(self, run: _Run) -> None:
        run.seconds.append(self._timed(run))

    def _attempt(self, case: str, run: _Run, step: Callable[[], object]) -> None:
        try:
            step()
        except Unavailable as reason:
            run.error = f"not run: {reason}"
        except Exception as error:  # noqa: BLE001 - the other variants still count
            run.error = f"{type(error).__name__}: {error}"
        if run.error:
            self.log.say(f"{case}: {run.name}: {run.error}")

    def _begin(
        self,
        run: _Run,
        model: nn.Module,
        mesh: DeviceMesh,
        experts: str,
        expected: dict[str, tuple[str, ...]],
    ) -> None:
        config = self._config
        _free(self._device)
        before = self._own_memory(reset=True)
        run.variant = make_variant(
            run.name,
            model,
            urls=self._urls,
            probe=self._probe,
            experts=experts,
            dtype=torch.bfloat16,
            bucket_bytes=None if config.bucket_mb is None else int(config.bucket_mb * 2**20),
            stock_bucket_bytes=int(config.stock_bucket_mb * 2**20),
            num_slots=config.num_slots,
            group=mesh,
            folder=self._out,
        )
        self._scramble(run)
        run.first_s = self._timed(run)
        self._verify(run, expected, "the first push")
        run.second_s = self._timed(run)
        after = self._own_memory()
        if "peak" in after:
            run.trainer_extra = after["peak"] - before["allocated"]
        self.log.say(
            f"  {run.name}: first {run.first_s * 1e3:.0f} ms, second {run.second_s * 1e3:.0f} ms, {run.verdict.text()}"
        )

    def _end(self, run: _Run, model: nn.Module, expected: dict[str, tuple[str, ...]]) -> None:
        """One more push, of other weights, for the memory figures and the proof."""
        negate(model)
        try:
            self._scramble(run)
            probe = self._probe(run.variant.server) if run.variant is not None else None
            assert probe is not None
            worker_before = on_rank0(lambda: probe.memory(reset=True))
            before = self._own_memory(reset=True)
            with counted_traffic() as traffic:
                self._timed(run)
            after = self._own_memory()
            worker_after = on_rank0(probe.memory)
            self._verify(run, expected, "the last push")
        finally:
            negate(model)
        run.traffic = traffic["bytes"]
        if "allocations" in after:
            run.allocations = after["allocations"] - before["allocations"]
        if "peak" in worker_after[0]:
            pairs = zip(worker_before, worker_after, strict=True)
            run.worker_extra = max(end["peak"] - begin["allocated"] for begin, end in pairs)
        self.log.write(
            "memory",
            variant=run.name,
            trainer={"before": before, "after": after},
            worker={"before": worker_before, "after": worker_after},
        )

    def _timed(self, run: _Run) -> float:
        """Seconds of one push, until every worker has the weights."""
        assert run.variant is not None
        synchronize(self._device)
        dist.barrier()
        with counted_requests() as requests:
            began = time.perf_counter()
            facts = run.variant.send()
            synchronize(self._device)
            seconds = time.perf_counter() - began
        facts["requests"] = dict(requests)
        run.syncs.append({"seconds": seconds, **facts})
        self.log.write("sync", variant=run.name, number=len(run.syncs), seconds=seconds, **facts)
        return seconds

    def _scramble(self, run: _Run) -> None:
        assert run.variant is not None
        on_rank0(self._probe(run.variant.server).scramble)

    def _verify(self, run: _Run, expected: dict[str, tuple[str, ...]], when: str) -> None:
        assert run.variant is not None
        probe, sharded = self._probe(run.variant.server), self._config.expert_parallel
        run.verdict = on_rank0(lambda: probe.verify(expected, sharded_experts=sharded))
        if not run.verdict.good:
            raise RuntimeError(f"after {when}: {run.verdict.text()}")

    def _soak(
        self, case: str, run: _Run | None, model: nn.Module, expected: dict[str, tuple[str, ...]]
    ) -> None:
        """Many pushes with memory read at a tenth of the way and at the end; the weights checked at the end."""
        if run is None or not run.alive:
            self.log.say(f"{case}: no soak without the variant 'ours'")
            return
        probe, count = self._probe("fsdp_ipc"), self._config.soak
        early: list[Any] = []
        began = time.perf_counter()
        for number in range(count):
            if number == count // 10:
                early = [self._own_memory(), on_rank0(probe.memory)]
            assert run.variant is not None
            negate(model)
            run.variant.send()
        seconds = time.perf_counter() - began
        late: list[Any] = [self._own_memory(), on_rank0(probe.memory)]
        if count % 2 == 0:
            negate(model)
            run.variant.send()  # type: ignore[union-attr]
        try:
            self._verify(run, expected, f"{count} pushes")
        finally:
            negate(model)
        self.log.write(
            "soak",
            case=case,
            syncs=count,
            seconds=seconds,
            early=early,
            late=late,
            verdict=run.verdict.text(),
        )
        self.log.say(
            f"{case}: {count} pushes in {seconds:.1f} s ({seconds / count * 1e3:.2f} ms each), {run.verdict.text()}; "
            f"trainer {_growth(early[0], late[0])}; workers {[_growth(a, b) for a, b in zip(early[1], late[1], strict=True)]}"
        )
        grown = [_growth(early[0], late[0]), *(_growth(a, b) for a, b in zip(early[1], late[1], strict=True))]
        if any(growth.get(key, 0) > FLAT_BYTES for growth in grown for key in ("allocated", "reserved")):
            raise RuntimeError(f"memory grew over {count} pushes (trainer, then workers): {grown}")

    def _report(self, case: str, run: _Run, runs: list[_Run], floors: dict[str, Any]) -> None:
        if not run.alive or not run.seconds:
            self.log.write("result", case=case, variant=run.name, error=run.error or "no timed push")
            return
        timed = run.syncs[2 : 2 + len(run.seconds)]
        seconds = spread(run.seconds)
        stages = {name: median(s["stage_s"][name] for s in timed) for name in timed[-1].get("stage_s", {})}
        stock = next(
            (r for r in runs if r.name in ("vllm_packed", "stock_packed") and r.alive and r.seconds), None
        )
        worker = timed[-1].get("worker") or {}
        sent = timed[-1]["bytes"]
        # A worker that gets its own experts only has less to copy than the model's size.
        copy_s = 2 * sent / floors["copy"]["bytes_per_s"]
        for name in ("open_s", "load_s", "wait_s"):
            if name in worker:
                stages[f"worker {name.removesuffix('_s')}"] = median(s["worker"][name] for s in timed)
        self.log.write(
            "result",
            case=case,
            variant=run.name,
            first_s=run.first_s,
            second_s=run.second_s,
            seconds=seconds,
            all_seconds=run.seconds,
            bytes=sent,
            tensors=timed[-1]["tensors"],
            gb_per_s=sent / seconds["median"] / 1e9,
            copy_percent=100 * copy_s / seconds["median"],
            times_copy=seconds["median"] / copy_s,
            times_foreach=_ratio(seconds["median"], floors["foreach"]),
            times_all_gather=_ratio(seconds["median"], floors["all_gather"]),
            stage_s=stages,
            worker=worker,
            num_requests=sum(timed[-1]["requests"].values()),
            requests=timed[-1]["requests"],
            trainer_extra=run.trainer_extra,
            worker_extra=run.worker_extra,
            allocations=run.allocations,
            received_from_ranks=run.traffic,
            read_from_ranks=timed[-1].get("peer_bytes", 0),
            versus=stock.name if stock is not None else None,
            speed_up=median(stock.seconds) / seconds["median"] if stock is not None else None,
            verdict=run.verdict.text(),
        )
        # Only collectives that this package starts are counted.
        if dist.get_world_size() > 1 and not run.name.startswith(("vllm", "file")):
            read = timed[-1].get("peer_bytes", 0)
            self.log.say(
                f"  {run.name}: {run.traffic / 1e6:,.3f} MB a push came from other ranks by collectives, "
                f"{read / 1e6:,.3f} MB were read by the worker where they lie"
            )
        if run.name == "ours" and dist.get_rank() == 0 and run.variant is not None:
            stem = case.replace(" ", "-")
            spans = run.variant.spans()
            chrome_trace(spans, worker, self._out / f"trace-{stem}.json")
            if spans and not timeline_png(spans, f"{case}: one sync", self._out / f"timeline-{stem}.png"):
                self.log.say("no timeline picture: matplotlib is not installed")

    def _expected(self, model: nn.Module, experts: str) -> dict[str, tuple[str, ...]]:
        return expected_digests(checkpoint_tensors(model, experts, torch.bfloat16), self._device)

    def _negated(self, model: nn.Module, experts: str) -> dict[str, tuple[str, ...]]:
        negate(model)
        found = self._expected(model, experts)
        negate(model)
        return found

    def _probe(self, server: str) -> WorkerProbe:
        return WorkerProbe(self._urls[server], self._num_workers)

    def _own_memory(self, *, reset: bool = False) -> dict[str, Any]:
        if reset and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return memory_figures(self._device)


def _rounds(variants: Sequence[str]) -> list[list[str]]:
    """Variants that may alternate: a worker listens to one trainer at a time, so only one sender of ours a round."""
    exclusive = [name for name in variants if name.startswith("ours")]
    first = [name for name in variants if name not in exclusive[1:]]
    return [first, *([name] for name in exclusive[1:])]


def _mesh(config: BenchConfig, device: torch.device) -> DeviceMesh:
    sizes = tuple(config.mesh) or (dist.get_world_size(),)
    names = {1: ("dp_shard",), 2: ("dp_shard", "tp") if config.tp else ("dp_replicate", "dp_shard")}[
        len(sizes)
    ]
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def _ratio(seconds: float, floor: dict[str, float] | None) -> float | None:
    return None if floor is None else seconds / floor["seconds"]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # what the stock wire exported, and its workers have closed since
        torch.cuda.empty_cache()


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "device": device.type,
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def _growth(early: dict[str, Any], late: dict[str, Any]) -> dict[str, int]:
    keys = ("allocated", "reserved", "device_used", "resident")
    return {key: late[key] - early[key] for key in keys if key in early}
