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

from recipes.bench import BenchConfig, server_args
from recipes.shapes import shape_of, write_server_dir
from tests.gpu.fleet import Clock, Fleet, Results, ServerSpec, torchrun

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


PARTS = {"bench": bench}


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
