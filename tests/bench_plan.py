"""Plans for a DeepSeek-V3-sized MoE on 1,024 ranks, from metadata alone: `python -m tests.bench_plan`.

Nothing is allocated but names, shapes and layouts: no process group, no tensors.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import tracemalloc
from collections.abc import Callable

import torch

from fsdp_ipc.delivery import HeldExperts
from fsdp_ipc.experts import HALVES, unfuse
from fsdp_ipc.metadata import WHOLE, Layout, StreamItem, TensorSpec
from fsdp_ipc.plan import PlanLimits, TransferPlan, build_plan
from fsdp_ipc.recipe import Emit, ParamRecipe

HIDDEN, EXPERTS, INNER = 7168, 256, 2048
DENSE_LAYERS = 3


def flat(num_ranks: int) -> Layout:
    """Dim 0 over all ranks."""
    return Layout("shard", tuple(range(num_ranks)), (num_ranks,), ("S(0)",), axis=0)


def expert_parallel(num_ranks: int, ep: int) -> Layout:
    """Replicated × `ep`."""
    ranks = tuple(range(num_ranks))
    return Layout("shard", ranks, (num_ranks // ep, ep), ("R", "S(0)"), axis=1)


def deepseek(num_ranks: int, *, layers: int = 61, fused: bool, ep: int = 64) -> list[StreamItem]:
    """The stream of a 671B model, with checkpoint names; experts fused over `ep`, or as modules over all ranks."""
    dense, sparse = flat(num_ranks), expert_parallel(num_ranks, ep)
    items: list[StreamItem] = []

    def add(fqn: str, shape: tuple[int, ...], layout: Layout, recipe: ParamRecipe | None = None) -> None:
        spec = TensorSpec(fqn, shape, torch.float32, torch.bfloat16, layout)
        items.append(StreamItem((spec,), recipe or ParamRecipe((fqn,), (Emit(fqn, shape),)), len(items)))

    add("model.embed_tokens.weight", (129280, HIDDEN), dense)
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_a_proj": (1536, HIDDEN),
            "self_attn.q_a_layernorm": (1536,),
            "self_attn.q_b_proj": (24576, 1536),
            "self_attn.kv_a_proj_with_mqa": (576, HIDDEN),
            "self_attn.kv_a_layernorm": (512,),
            "self_attn.kv_b_proj": (32768, 512),
            "self_attn.o_proj": (HIDDEN, 16384),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            add(f"{at}.{name}.weight", shape, dense)
        if n < DENSE_LAYERS:
            for name, shape in (
                ("gate_proj", (18432, HIDDEN)),
                ("up_proj", (18432, HIDDEN)),
                ("down_proj", (HIDDEN, 18432)),
            ):
                add(f"{at}.mlp.{name}.weight", shape, dense)
            continue
        add(f"{at}.mlp.gate.weight", (EXPERTS, HIDDEN), dense)
        add(f"{at}.mlp.gate.e_score_correction_bias", (EXPERTS,), WHOLE)
        for name, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        ):
            add(f"{at}.mlp.shared_experts.{name}.weight", shape, dense)
        if fused:
            for kind, shape3 in (
                ("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN)),
                ("down_proj", (EXPERTS, HIDDEN, INNER)),
            ):
                fqn = f"{at}.mlp.experts.{kind}"
                add(fqn, shape3, sparse, unfuse(fqn, shape3, HALVES))
        else:
            for e in range(EXPERTS):
                for name, shape in (
                    ("gate_proj", (INNER, HIDDEN)),
                    ("up_proj", (INNER, HIDDEN)),
                    ("down_proj", (HIDDEN, INNER)),
                ):
                    add(f"{at}.mlp.experts.{e}.{name}.weight", shape, dense)
    add("model.norm.weight", (HIDDEN,), dense)
    add("lm_head.weight", (129280, HIDDEN), dense)
    return items


def held_by(num_ranks: int, ep: int, layers: int = 61) -> HeldExperts:
    """Workers that hold what the trainer rank beside them holds."""
    own = EXPERTS // ep
    prefixes = [f"model.layers.{n}.mlp.experts" for n in range(DENSE_LAYERS, layers)]
    return HeldExperts(
        [{key: list(range(r % ep * own, (r % ep + 1) * own)) for key in prefixes} for r in range(num_ranks)]
    )


def cases(num_ranks: int, layers: int = 61) -> dict[str, Callable[[], TransferPlan]]:
    """Functions that make a plan, by what they show; the metadata is ready before they are called."""
    ranks = range(num_ranks)
    modules, fused = (deepseek(num_ranks, layers=layers, fused=f) for f in (False, True))
    wanted = held_by(num_ranks, 64, layers)
    limits = PlanLimits()
    return {
        "per-expert modules, FSDP over all ranks": lambda: build_plan(modules, limits, group_ranks=ranks),
        "per-expert modules, stock wire": lambda: build_plan(
            modules, PlanLimits(back_to_back=True), group_ranks=ranks
        ),
        "fused experts, EP 64, everything everywhere": lambda: build_plan(fused, limits, group_ranks=ranks),
        "fused experts, EP 64, rank-local": lambda: build_plan(
            fused, limits, group_ranks=ranks, wanted=wanted
        ),
    }


def timed(make: Callable[[], TransferPlan]) -> tuple[TransferPlan, float]:
    """The plan, and the seconds of this process that it took."""
    start = time.process_time()
    plan = make()
    return plan, time.process_time() - start


def peak_bytes(make: Callable[[], TransferPlan]) -> int:
    """Peak of Python's memory meanwhile, what was there before left out. Tracing makes it several times slower."""
    tracemalloc.start()
    make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    num_ranks = parser.parse_args().ranks
    total = sum(math.prod(item.inputs[0].shape) for item in deepseek(num_ranks, fused=True))
    print(f"{total / 1e9:.0f}B parameters, {num_ranks} ranks, Python {sys.version.split()[0]}")
    for name, make in cases(num_ranks).items():
        (plan, seconds), peak = timed(make), peak_bytes(make)
        names = {row.name for row in plan.rows}.union(
            *({row.name for row in rows} for rows in plan.local_rows)
        )
        print(
            f"{name}: {len(names)} names, {plan.num_buckets} buckets, slot {plan.slot_bytes / 2**30:.2f} GiB: "
            f"{seconds:.2f} s, {peak / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
