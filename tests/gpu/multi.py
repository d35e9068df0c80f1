"""The colocated job on however many GPUs there are: a trainer rank and a vLLM replica on each.

    python3 -m tests.gpu.multi --part moe,mesh,kill,sleep,dense --out DIR [--ranks N]

The servers of all chosen parts start at once; those of a part stop when no later one needs them. Results are printed as they come and written as JSON lines; the exit code
says whether all was good. With `--device cpu` the same runs at toy size over gloo, without the parts that vLLM's CPU
build cannot do (experts over replicas, sleep).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.bench_config import EXTENSION
from recipes.shapes import write_server_dir
from recipes.sizes import shape_of
from tests.gpu.fleet import Clock, Fleet, Results, ServerSpec, launch, missing_gpu, run_tasks, torchrun
from tests.gpu.single import MODELS, VARIANTS, checkpoints

EXPERT_PARALLEL = ["--enable-expert-parallel"]


@dataclass
class Run:
    """What the parts share."""

    options: argparse.Namespace
    out: Path
    clock: Clock
    results: Results
    fleet: Fleet
    ranks: int
    urls: dict[str, str]
    started: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return bool(self.options.device == "cuda")

    @property
    def small(self) -> str:
        """Shape of the dense model of the parts that are not about speed."""
        return "small" if self.on_gpu else "toy"

    def server(self, name: str, folder: Path, backend: str, args: Sequence[str] = ()) -> None:
        """Start a server with a replica a rank."""
        self.started.append(name)
        self.fleet.start(
            ServerSpec(name=name, model_dir=folder, backend=backend, replicas=self.ranks, args=args)
        )

    def measure(
        self, label: str, model: str, urls: dict[str, str], variants: list[str], settings: list[str]
    ) -> None:
        """Run the benchmark on all ranks."""
        name, layers, own = MODELS[model]
        if not urls:
            self.results.add(label, False, "no server")
            return
        folder = self.out / label.replace(" ", "-")
        args = [
            f"shape.name={name}",
            f"shape.num_layers={layers or 'null'}",
            *own,
            *settings,
            *self.options.set,
        ]
        args += [
            f"variants=[{','.join(variants)}]",
            f"reps={self.options.reps}",
            f"device={self.options.device}",
        ]
        args += [f"++urls.{backend}='{url}'" for backend, url in urls.items()]
        args += [f"hydra.run.dir={folder}", "timeout_s=120"]
        timeout_s = self.clock.left(self.options.child_timeout)
        code = torchrun(
            self.ranks, "recipes.bench", args, log=folder.with_suffix(".log"), timeout_s=timeout_s
        )
        self.results.add(label, code == 0, f"exit code {code}, results in {folder}")

    def tasks(self, name: str, tasks: list[dict[str, Any]], *, outsider: bool = False) -> None:
        """Run tasks of `tests.gpu.trainer` on all ranks."""
        run_tasks(
            name,
            tasks,
            self.options,
            self.out,
            self.clock,
            self.results,
            ranks=self.ranks,
            replicas=self.ranks,
            outsider=outsider,
        )


def start_dense(run: Run) -> None:
    name, layers, _ = MODELS[run.options.model]
    folder = write_server_dir(shape_of(name, layers), run.out / "models" / "dense")
    for backend in ("fsdp_ipc", "ipc") if run.on_gpu else ("fsdp_ipc",):
        run.server(f"dense-{backend}", folder, backend)


def dense(run: Run) -> None:
    """Every way to push, alternating; every replica checked against the trainer's full tensors."""
    urls = {b: run.urls[f"dense-{b}"] for b in ("fsdp_ipc", "ipc") if f"dense-{b}" in run.urls}
    variants = run.options.variants.split(",") if run.on_gpu else ["ours", "file"]
    run.measure("bench dense", run.options.model, urls, variants, [])


def start_moe(run: Run) -> None:
    name, layers, _ = MODELS[run.options.moe_model]
    folder = write_server_dir(shape_of(name, layers), run.out / "models" / "moe")
    run.server("moe-fsdp_ipc", folder, "fsdp_ipc", EXPERT_PARALLEL)
    run.server("moe-ipc", folder, "ipc", EXPERT_PARALLEL)
    folders = checkpoints({"experts": "small_moe"}, run.out)
    run.server("experts", folders["experts-a"], "fsdp_ipc", EXPERT_PARALLEL)
    run.server("experts-loaded", folders["experts-a"], "ipc", [*EXPERT_PARALLEL, "--load-format", "auto"])


def moe(run: Run) -> None:
    """Experts to the worker beside them against everything to everybody; and words equal to a fresh load's."""
    folders = {letter: str(run.out / "models" / f"experts-{letter}") for letter in "ab"}
    tasks = []
    for packed in (True, False):
        task = {
            "kind": "push_equals_load",
            "name": f"experts {'packed' if packed else 'unpacked'}",
            "pushes": 30,
        }
        task |= {"shape": "small_moe", "experts": "unfused", "expert_parallel": True, "packed": packed}
        task |= {"checkpoint_a": folders["a"], "checkpoint_b": folders["b"]}
        tasks.append({**task, "url": run.urls.get("experts"), "reference": run.urls.get("experts-loaded")})
    run.tasks("experts", tasks)
    urls = {b: run.urls[f"moe-{b}"] for b in ("fsdp_ipc", "ipc") if f"moe-{b}" in run.urls}
    settings = ["shape.experts=[unfused]", "expert_parallel=true"]
    run.measure(
        "bench moe",
        run.options.moe_model,
        urls,
        ["vllm_packed", "stock_packed", "ours", "ours_everywhere"],
        settings,
    )


def start_mesh(run: Run) -> None:
    folder = write_server_dir(shape_of(run.small), run.out / "models" / "small")
    run.server("small-fsdp_ipc", folder, "fsdp_ipc")
    if run.on_gpu:
        run.server("small-ipc", folder, "ipc")


def mesh(run: Run) -> None:
    """HSDP and FSDP×TP over all ranks, and a trainer group that is not all of the job."""
    ranks = run.ranks
    replicate = 2 if ranks % 2 == 0 else 1
    meshes: list[tuple[str, list[int], list[str]]] = [
        ("FSDP", [ranks], ["dp_shard"]),
        ("HSDP", [replicate, ranks // replicate], ["dp_replicate", "dp_shard"]),
        ("FSDP x TP", [ranks // replicate, replicate], ["dp_shard", "tp"]),
    ]
    tasks = []
    for backend in ("fsdp_ipc", "ipc") if run.on_gpu else ("fsdp_ipc",):
        for name, sizes, axes in meshes:
            task = {"kind": "push_exact", "name": f"{name} {sizes} {backend}", "mesh": sizes, "axes": axes}
            task |= {"shape": run.small, "dtype": "float32", "backend": backend}
            tasks.append({**task, "url": run.urls.get(f"small-{backend}")})
    run.tasks("mesh", tasks)
    task = {
        "kind": "subgroup",
        "name": "subgroup",
        "shape": run.small,
        "flag": str(run.out / "subgroup.done"),
    }
    run.tasks("subgroup", [{**task, "url": run.urls.get("small-fsdp_ipc")}], outsider=True)


def start_sleep(run: Run) -> None:
    if run.on_gpu:
        folder = write_server_dir(shape_of(run.small), run.out / "models" / "sleepy")
        run.server("sleepy", folder, "fsdp_ipc", ["--enable-sleep-mode"])


def sleep(run: Run) -> None:
    """Sleep, optimizer step, wake the weights, push, wake the cache, generate: five rounds of both levels."""
    if not run.on_gpu:
        run.clock.say("no sleep mode on a CPU: left out")
        return
    task = {
        "kind": "sleep_rounds",
        "name": "sleep and wake",
        "shape": run.small,
        "dtype": "float32",
        "rounds": 5,
    }
    run.tasks("sleep", [{**task, "url": run.urls.get("sleepy")}])


def kill(run: Run) -> None:
    """A rank is killed in the middle of a push: the others raise within the time-out, a new job pushes again."""
    url = run.urls.get("small-fsdp_ipc")
    base = {"shape": run.small, "dtype": "float32", "url": url}
    base["bucket_bytes"] = 64 << 10 if run.small == "toy" else 4 << 20
    for victim, moment in ((0, "announced"), (1, "announced"), (1, "load"))[: 3 if run.ranks > 1 else 1]:
        name = f"rank {victim} of {run.ranks} killed ({moment})"
        if url is None:
            run.results.add(name, False, "its server is not there")
            continue
        reports = run.out / f"killed-{victim}-{moment}"
        task = {**base, "kind": "die_in_sync", "name": name, "victim": victim, "moment": moment}
        task["reports"] = str(reports)
        spec = {"tasks": [task], "results": str(run.out / "killed.jsonl"), "device": run.options.device}
        path = run.out / f"tasks-kill-{victim}-{moment}.json"
        path.write_text(json.dumps({**spec, "replicas": run.ranks}))
        log = reports
        codes = launch(run.ranks, "tests.gpu.trainer", [str(path)], log=log, timeout_s=run.clock.left(120))
        seen = []
        for rank in range(run.ranks):
            report = Path(f"{reports}.{rank}")
            if rank != victim:
                seen.append(
                    json.loads(report.read_text())
                    if report.exists()
                    else {"rank": rank, "outcome": "no report"}
                )
        good = codes[victim] == -9 and all(
            r["outcome"].startswith("WeightSyncError") and r["seconds"] < 85 for r in seen
        )
        run.results.add(name, good, f"exit codes {codes}; survivors {seen}")
        run.tasks(
            f"after-kill-{victim}-{moment}",
            [{**base, "kind": "push_exact", "name": f"a new job after {name}"}],
        )


PARTS: dict[str, tuple[Callable[[Run], None], Callable[[Run], None]]] = {
    "dense": (start_dense, dense),
    "moe": (start_moe, moe),
    "mesh": (start_mesh, mesh),
    "sleep": (start_sleep, sleep),
    "kill": (start_mesh, kill),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", default=None, help=f"comma-separated, of: {', '.join(PARTS)}; default: all that can run"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument(
        "--ranks", type=int, default=None, help="trainer ranks and replicas; default: the GPUs, or 2"
    )
    parser.add_argument("--model", default=None, help="of the part dense")
    parser.add_argument("--moe-model", default="moe12", help="of the part moe")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything")
    parser.add_argument("--start-timeout", type=float, default=360, help="seconds for the servers to answer")
    parser.add_argument("--child-timeout", type=float, default=240, help="seconds for one trainer")
    parser.add_argument(
        "--server-arg",
        dest="server_args",
        action="append",
        default=[],
        help="further server argument; repeat",
    )
    parser.add_argument("--set", action="append", default=[], help="further setting of recipes.bench; repeat")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    options.model = options.model or ("qwen3_8b" if on_gpu else "toy")
    options.part = options.part or ("moe,mesh,kill,sleep,dense" if on_gpu else "mesh,kill,dense")
    import torch

    ranks = options.ranks or (torch.cuda.device_count() if on_gpu else 2)
    if (no_gpu := missing_gpu(options.device)) is not None:
        sys.stdout.write(f"left out: {no_gpu}\n")
        return 0
    out = options.out.resolve()
    clock = Clock(options.budget)
    results = Results(out / "results.jsonl", clock)
    common = ["--worker-extension-cls", EXTENSION, *options.server_args]
    with Fleet(out, clock, on_gpu=on_gpu, common=common) as fleet:
        run = Run(options, out, clock, results, fleet, ranks, {})
        parts = [PARTS[part] for part in options.part.split(",")]
        servers: dict[Callable[[Run], None], list[str]] = {}
        for start in dict.fromkeys(start for start, _ in parts):
            run.started = servers[start] = []
            start(run)
        run.urls = fleet.wait(clock.left(options.start_timeout))
        for index, (start, part) in enumerate(parts):
            try:
                part(run)
            except Exception as error:
                results.add(part.__name__, False, f"{type(error).__name__}: {error}")
            if all(later is not start for later, _ in parts[index + 1 :]):
                fleet.stop(*servers[start])  # what follows needs the memory
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
