"""Everything that one GPU can show, against real servers: speed, right weights, faults.

    python3 -m tests.gpu.single --part bench --out DIR [--models qwen3_8b,moe12] [--reps 10]

Each part prints its results as they come and writes them as JSON lines; the exit code says whether all was good.
With `--device cpu` the same runs at toy size against a CPU server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.bench import server_args
from recipes.bench_config import EXTENSION, BenchConfig
from recipes.shapes import write_checkpoint, write_server_dir
from recipes.sizes import shape_of
from tests.gpu.fleet import Clock, Fleet, Results, ServerSpec, missing_gpu, run_tasks, torchrun

MODELS: dict[str, tuple[str, int | None, list[str]]] = {
    "toy": ("toy", None, ["dtypes=[bfloat16,float32]", "bucket_mb=0.1"]),
    "toy_moe": ("toy_moe", None, ["shape.experts=[each,unfused]"]),
    "small": ("small", None, ["dtypes=[bfloat16,float32]"]),
    "small_100m": ("small_100m", None, ["dtypes=[bfloat16]"]),
    "qwen3_0_6b": ("qwen3_0_6b", None, ["dtypes=[bfloat16,float32]"]),
    "qwen3_8b": ("qwen3_8b", None, ["dtypes=[bfloat16,float32]"]),
    "moe12": ("qwen3_30b_a3b", 12, ["shape.experts=[each,fused]"]),
    "moe2": ("qwen3_30b_a3b", 2, ["shape.experts=[each,fused]"]),
}
"""By short name: shape, layers, and the benchmark's settings."""

VARIANTS = "vllm_packed,vllm_unpacked,stock_packed,stock_unpacked,ours"


def bench(options: argparse.Namespace, out: Path, clock: Clock, results: Results) -> None:
    """Measure each model, all servers started at once."""
    import torch

    on_gpu = options.device == "cuda"
    variants = options.variants.split(",") if on_gpu else ["ours", "file"]
    config = BenchConfig(variants=variants, device=options.device)
    backends = ["fsdp_ipc", "ipc"] if on_gpu else ["fsdp_ipc"]
    models = options.models.split(",")
    with Fleet(out, clock, on_gpu=on_gpu, common=options.server_args) as fleet:
        for model in models:
            name, layers, _ = MODELS[model]
            shape = shape_of(name, layers)
            folder = write_server_dir(shape, out / "models" / model)
            for backend in backends:
                args = server_args(shape, config, torch.device(options.device))
                fleet.start(
                    ServerSpec(name=f"{model}-{backend}", model_dir=folder, backend=backend, args=args)
                )
        urls = fleet.wait(clock.left(options.start_timeout))
        for model in models:
            name, layers, settings = MODELS[model]
            given = {
                backend: urls[f"{model}-{backend}"] for backend in backends if f"{model}-{backend}" in urls
            }
            if not given:
                results.add(f"bench {model}", False, "no server")
                continue
            chosen = [
                v for v in variants if ("fsdp_ipc" if v.startswith(("ours", "file")) else "ipc") in given
            ]
            folder = out / f"bench-{model}"
            args = [f"shape.name={name}", f"shape.num_layers={layers or 'null'}", *settings, *options.set]
            args += [f"variants=[{','.join(chosen)}]", f"reps={options.reps}", f"device={options.device}"]
            args += [f"++urls.{backend}='{url}'" for backend, url in given.items()]
            args += [
                f"hydra.run.dir={folder}",
                f"soak={options.soak if shape_of(name).vocab_size < 10000 else 0}",
            ]
            code = torchrun(
                1,
                "recipes.bench",
                args,
                log=out / f"bench-{model}.log",
                timeout_s=clock.left(options.child_timeout),
            )
            results.add(f"bench {model}", code == 0, f"exit code {code}, results in {folder}")
            if code != 0:
                for backend in given:
                    clock.say(
                        f"the end of the log of {model}-{backend}: {fleet.tail(f'{model}-{backend}', 15)}"
                    )
            fleet.stop(*(f"{model}-{backend}" for backend in given))  # the next model needs the memory


GRAPHS = [
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode":0,"cudagraph_mode":"FULL","cudagraph_capture_sizes":[1,2,4,8]}',
]
"""A server that captures CUDA graphs; without compiling, which takes minutes."""


def correct(options: argparse.Namespace, out: Path, clock: Clock, results: Results) -> None:
    """Weights and words after a push are those of a server that was started from the checkpoint."""
    on_gpu = options.device == "cuda"
    shapes = {"dense": "small", "moe": "small_moe"} if on_gpu else {"dense": "toy"}
    folders = checkpoints(shapes, out)
    backends = ("fsdp_ipc", "ipc") if on_gpu else ("fsdp_ipc",)
    extension = ["--worker-extension-cls", EXTENSION]
    with Fleet(out, clock, on_gpu=on_gpu, common=[*extension, *options.server_args]) as fleet:
        for kind in shapes:
            for backend in backends:
                fleet.start(
                    ServerSpec(name=f"{kind}-{backend}", model_dir=folders[f"{kind}-a"], backend=backend)
                )
            loaded = ["--load-format", "auto"]
            fleet.start(
                ServerSpec(name=f"{kind}-loaded", model_dir=folders[f"{kind}-a"], backend="ipc", args=loaded)
            )
            if on_gpu and options.fp8:
                fp8 = ["--quantization", "fp8"]
                # The server that is pushed into has loaded other weights: a fresh load is what it must come to equal.
                for name, letter, backend in (("fp8", "b", "fsdp_ipc"), ("fp8-loaded", "a", "ipc")):
                    model, args = folders[f"{kind}-{letter}"], [*fp8, *loaded]
                    fleet.start(
                        ServerSpec(name=f"{kind}-{name}", model_dir=model, backend=backend, args=args)
                    )
        if on_gpu:
            # Field case E9, https://github.com/vllm-project/vllm/issues/48941: captured graphs keep addresses.
            for name, backend, args in (
                ("dense-graphs", "fsdp_ipc", []),
                ("dense-graphs-loaded", "ipc", loaded),
            ):
                fleet.start(
                    ServerSpec(
                        name=name, model_dir=folders["dense-a"], backend=backend, args=[*GRAPHS, *args]
                    )
                )
        urls = fleet.wait(clock.left(options.start_timeout))
        tasks: list[dict[str, Any]] = []
        if on_gpu:
            task: dict[str, Any] = {"kind": "push_equals_load", "name": "field E9, with graphs"}
            task["shape"] = shapes["dense"]
            task |= {
                letter: str(folders[f"dense-{letter[-1]}"]) for letter in ("checkpoint_a", "checkpoint_b")
            }
            task |= {"url": urls.get("dense-graphs"), "reference": urls.get("dense-graphs-loaded")}
            tasks.append(task)
        for kind, shape in shapes.items():
            base: dict[str, Any] = {
                "shape": shape,
                "checkpoint_a": str(folders[f"{kind}-a"]),
                "checkpoint_b": str(folders[f"{kind}-b"]),
            }
            for backend in backends:
                for packed in (True, False):
                    for experts in ("each", "fused", "unfused") if kind == "moe" else ("each",):
                        name = f"{kind}{' ' + experts if kind == 'moe' else ''} {backend} {'packed' if packed else 'unpacked'}"
                        task = {
                            **base,
                            "kind": "push_equals_load",
                            "name": name,
                            "url": urls.get(f"{kind}-{backend}"),
                        }
                        task |= {"reference": urls.get(f"{kind}-loaded"), "pushes": 30, "experts": experts}
                        tasks.append({**task, "backend": backend, "packed": packed})
            master = {**base, "kind": "push_equals_load", "name": f"{kind} fp32 masters", "dtype": "float32"}
            tasks.append(
                {**master, "url": urls.get(f"{kind}-fsdp_ipc"), "reference": urls.get(f"{kind}-loaded")}
            )
            if on_gpu and options.fp8:
                task = {**base, "kind": "quantised", "name": f"{kind} fp8", "url": urls.get(f"{kind}-fp8")}
                tasks.append({**task, "reference": urls.get(f"{kind}-fp8-loaded")})
        run_tasks("correct", tasks, options, out, clock, results, ranks=1)


def faults(options: argparse.Namespace, out: Path, clock: Clock, results: Results) -> None:
    """Memory over many pushes and after close, expandable segments, a broken consumer, a sleeping and a killed server."""
    on_gpu = options.device == "cuda"
    shape = "small" if on_gpu else "toy"
    backends = ("fsdp_ipc", "ipc") if on_gpu else ("fsdp_ipc",)
    folder = write_server_dir(shape_of(shape), out / "models" / shape)
    extension = ["--worker-extension-cls", EXTENSION]
    with Fleet(out, clock, on_gpu=on_gpu, common=[*extension, *options.server_args]) as fleet:
        for backend in backends:
            fleet.start(ServerSpec(name=backend, model_dir=folder, backend=backend))
            if on_gpu:
                sleepy = ["--enable-sleep-mode"]
                fleet.start(
                    ServerSpec(name=f"{backend}-sleepy", model_dir=folder, backend=backend, args=sleepy)
                )
        urls = fleet.wait(clock.left(options.start_timeout))
        plain: list[dict[str, Any]] = []
        expandable: list[dict[str, Any]] = []
        sleepy_tasks: list[dict[str, Any]] = []
        for backend in backends:
            base = {"shape": shape, "backend": backend, "url": urls.get(backend)}
            for packed in (True, False):
                name = f"{backend} {'packed' if packed else 'unpacked'}"
                for dtype in ("bfloat16", "float32"):
                    one = {**base, "packed": packed, "dtype": dtype, "name": f"{name} {dtype}"}
                    plain.append({**one, "kind": "push_exact", "pushes": 200 if dtype == "bfloat16" else 0})
                    plain.append({**one, "kind": "freed"})
                    expandable.append(
                        {**one, "kind": "push_exact", "name": f"expandable segments {one['name']}"}
                    )
                plain.append(
                    {**base, "packed": packed, "kind": "broken_consumer", "name": f"{name} broken consumer"}
                )
            if on_gpu:
                task = {
                    **base,
                    "kind": "asleep",
                    "name": f"{backend} asleep",
                    "url": urls.get(f"{backend}-sleepy"),
                }
                sleepy_tasks.append(task)
        run_tasks("faults", plain, options, out, clock, results, ranks=1)
        if on_gpu:
            conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            run_tasks("expandable", expandable, options, out, clock, results, ranks=1, env=conf)
            for task in sleepy_tasks:
                run_tasks(task["name"].replace(" ", "-"), [task], options, out, clock, results, ranks=1)
        # Last, because it takes the servers along.
        killed = [
            {
                "kind": "server_killed",
                "name": f"{backend} server killed",
                "shape": shape,
                "backend": backend,
                "url": urls.get(backend),
                "dtype": "float32",
                "bucket_bytes": (64 << 20) if on_gpu else 100_000,
                "pids": fleet.processes(backend),
            }
            for backend in backends
        ]
        run_tasks("killed", killed, options, out, clock, results, ranks=1)


def checkpoints(shapes: dict[str, str], out: Path) -> dict[str, Path]:
    """Two checkpoints, a and b, of each shape."""
    return {
        f"{kind}-{letter}": write_checkpoint(shape_of(shape), out / "models" / f"{kind}-{letter}", seed=seed)
        for kind, shape in shapes.items()
        for letter, seed in (("a", 1), ("b", 2))
    }


PARTS = {"bench": bench, "correct": correct, "faults": faults}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="bench", help=f"comma-separated, of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--models", default=None, help=f"of: {', '.join(MODELS)}")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument(
        "--soak", type=int, default=1000, help="pushes of the small model after its measurement"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything")
    parser.add_argument("--start-timeout", type=float, default=330, help="seconds for the servers to answer")
    parser.add_argument("--no-fp8", dest="fp8", action="store_false", help="leave the quantised servers out")
    parser.add_argument("--child-timeout", type=float, default=300, help="seconds for one trainer")
    parser.add_argument(
        "--server-arg",
        dest="server_args",
        action="append",
        default=[],
        help="further server argument; repeat",
    )
    parser.add_argument("--set", action="append", default=[], help="further setting of recipes.bench; repeat")
    options = parser.parse_args(argv)
    if options.models is None:
        options.models = "qwen3_8b,moe12,small" if options.device == "cuda" else "toy"
    if (no_gpu := missing_gpu(options.device)) is not None:
        sys.stdout.write(f"left out: {no_gpu}\n")
        return 0
    out = options.out.resolve()
    clock = Clock(options.budget)
    results = Results(out / "results.jsonl", clock)
    for part in options.part.split(","):
        try:
            PARTS[part](options, out, clock, results)
        except Exception as error:
            results.add(part, False, f"{type(error).__name__}: {error}")
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
