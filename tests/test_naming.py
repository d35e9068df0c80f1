"""Checkpoint names: prefixes, rules, ties, dtypes to keep, fused experts, conversions; and the reported faults of each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp_ipc.conversion import chained, trace
from fsdp_ipc.experts import HALVES, INTERLEAVED, ExpertLayout, unfuse
from fsdp_ipc.naming import (
    KEEP_DTYPE,
    Naming,
    Patterns,
    Rename,
    Renamer,
    clean_fqn,
    clean_fqns,
    naming_for,
    wire_dtype,
)
from fsdp_ipc.recipe import Emit, EntryInfo, ParamRecipe
from tests.runner import run_ranks


def info(*shape: int, dtype: torch.dtype = torch.float32) -> EntryInfo:
    return EntryInfo(shape=shape, dtype=dtype)


def names_of(recipes: list[ParamRecipe]) -> list[str]:
    return [emit.name for recipe in recipes for emit in recipe.emits]


def made_by(recipe: ParamRecipe, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip([e.name for e in recipe.emits], recipe.apply(tensors), strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 5)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("gone", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.my_orig_model = Block()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 7, bias=False)


# --- wrapper prefixes


def test_field_D12_wrapper_segments_are_stripped() -> None:
    """https://github.com/meta-pytorch/torchtune/pull/1077: names of wrapped modules reach the server."""
    assert clean_fqn("layers.0._checkpoint_wrapped_module.lin.weight") == "layers.0.lin.weight"
    assert clean_fqn("_orig_mod.layers.0._orig_mod.lin.weight") == "layers.0.lin.weight"
    assert clean_fqn("_fsdp_wrapped_module.a._fsdp_wrapped_module.b") == "a.b"
    assert clean_fqn("my_orig_model.lin.weight") == "my_orig_model.lin.weight"
    assert clean_fqn("my_orig_mod.x_fsdp_wrapped_module.w") == "my_orig_mod.x_fsdp_wrapped_module.w"
    assert clean_fqn("a.module.b") == "a.module.b"


def test_leading_module_goes_only_where_all_names_have_it() -> None:
    assert clean_fqns(["module.a", "module.b.module.c"]) == {
        "module.a": "a",
        "module.b.module.c": "b.module.c",
    }
    assert clean_fqns(["module.module.a"]) == {"module.module.a": "a"}
    assert clean_fqns(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}


def test_names_that_become_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.w .*a\._orig_mod\.w"):
        clean_fqns(["a.w", "a._orig_mod.w"])


def test_field_D12_wrapped_modules_are_named_as_torch_names_them() -> None:
    """https://github.com/huggingface/accelerate/pull/4172: torch's own resolution of names is the reference."""
    plain = set(Net().state_dict())
    net = Net()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    net.layers[1] = torch.compile(net.layers[1])  # type: ignore[call-overload]
    for module in (net, torch.compile(net)):
        assert set(get_model_state_dict(module)) == plain
        entries = {name: info(*t.shape) for name, t in module.state_dict().items()}
        recipes = naming_for(module).recipes(entries)
        assert names_of(recipes) == list(Net().state_dict())
        assert [recipe.fqn for recipe in recipes] == list(entries)


# --- a user's rules


def test_field_D11_rules_are_applied_once_longest_first() -> None:
    """https://github.com/huggingface/trl/issues/6028: mappers of vision models ran in both directions."""
    rules = [
        Rename("model", "language_model.model"),
        Rename("model.visual", "visual"),
        Rename("lm_head.weight", "language_model.lm_head.weight", "exact"),
        Rename(r"\.blocks\.(\d+)\.", r".layers.\1.", "regex"),
    ]
    names = [
        "model.embed.weight",
        "model.visual.patch.weight",
        "lm_head.weight",
        "x.blocks.3.w",
        "modelled.w",
    ]
    wanted = [
        "language_model.model.embed.weight",
        "visual.patch.weight",
        "language_model.lm_head.weight",
        "x.layers.3.w",
        "modelled.w",
    ]
    for order in (rules, rules[::-1]):
        assert list(Renamer(order)(names).values()) == wanted


def test_field_D11_rules_are_idempotent_on_renamed_names() -> None:
    """https://github.com/huggingface/trl/issues/5269: a second pass doubled the prefix."""
    rules = [Rename("model", "language_model.model"), Rename("model.visual", "visual")]
    once = Renamer(rules)(["model.a", "model.visual.b"])
    with pytest.warns(UserWarning, match="decided no name"):
        assert list(Renamer(rules)(once.values()).values()) == list(once.values())


def test_field_D11_unmatched_rule_warns() -> None:
    """https://github.com/alibaba/ROLL/pull/500: a rule that matches nothing is a mistake, seen too late."""
    with pytest.warns(UserWarning, match=r"prefix 'vision\.' -> 'visual\.' decided no name"):
        Renamer([Rename("vision.", "visual.")])(["model.a"])


def test_field_D26_two_names_on_one_target_are_refused() -> None:
    """https://github.com/vllm-project/vllm/pull/44814: a name that comes twice finishes a layer early."""
    naming = Naming(rename=(Rename("a", "c"), Rename("b", "c")))
    with pytest.raises(ValueError, match=r"c\.w \(from a\.w.* and from b\.w"):
        naming.recipes({"a.w": info(2), "b.w": info(2)})


def test_two_names_of_one_conversion_on_one_target_are_refused() -> None:
    def convert(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"x.a": state["w"] + 1, "y.a": state["w"] + 2}

    with pytest.raises(ValueError, match=r"a \(from w \[0\] and from w \[1\]\)"):
        Naming(convert=convert, rename=(Rename("x", ""), Rename("y", ""))).recipes({"w": info(2)})


def test_prefix_can_be_added_and_removed() -> None:
    assert Rename("", "model").apply("a.w") == "model.a.w"
    assert Rename("model.", "").apply("model.a.w") == "a.w"
    assert Rename("model", "").apply("models.a.w") is None
    assert Rename("a.w", "b").apply("a.w") == "b"


@pytest.mark.parametrize("kind", ["glob", ""])
def test_wrong_rules_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="expected exact, prefix or regex"):
        Rename("a", "b", kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no regular expression"):
        Rename("(", "b", "regex")
    with pytest.raises(ValueError, match="no regular expression"):
        Patterns(["/(/"])


# --- ties


def tied_net() -> tuple[Net, list[list[str]]]:
    net = Net()
    net.head.weight = net.embed.weight
    return net, [["embed.weight", "head.weight"]]


@pytest.mark.parametrize("policy", ["once", "both"])
def test_field_D16_ties_are_explicit(policy: str) -> None:
    """https://github.com/vllm-project/vllm/pull/56689: a tied head was never sent, by accident."""
    net, ties = tied_net()
    entries = {name: info(*t.shape) for name, t in net.state_dict().items()}
    names = names_of(naming_for(net, ties=policy).recipes(entries, ties))  # type: ignore[arg-type]
    assert "embed.weight" in names
    assert ("head.weight" in names) == (policy == "both")
    assert len(names) == len(set(names))


def test_ties_keep_the_name_that_the_checkpoint_keeps() -> None:
    naming = Naming(tied_names=frozenset({"a.head"}))
    entries = {"a.head": info(2), "b.embed": info(2)}
    assert names_of(naming.recipes(entries, [["a.head", "b.embed"]])) == ["b.embed"]
    assert names_of(replace(naming, tied_names=frozenset()).recipes(entries, [["b.embed", "a.head"]])) == [
        "a.head"
    ]
    assert names_of(naming.recipes(entries)) == ["a.head", "b.embed"]


def test_field_D19_untied_parameters_are_sent_whatever_the_config_says() -> None:
    """https://github.com/huggingface/accelerate/issues/3870: config says tied, the parameters are two."""
    naming = Naming(tied_names=frozenset({"head.weight"}))
    assert names_of(naming.recipes({"embed.weight": info(2), "head.weight": info(2)})) == [
        "embed.weight",
        "head.weight",
    ]


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="'once' or 'both'"):
        naming_for(Net(), ties="twice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'checkpoint', 'fused'"):
        naming_for(Net(), experts="unfused")  # type: ignore[arg-type]


# --- dtypes


def test_field_D20_router_tensors_keep_their_dtype() -> None:
    """https://github.com/NVIDIA-NeMo/RL/pull/3540: 238 values of a router bias became 8 in bf16."""
    bias = torch.linspace(6.817, 7.063, 238)
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert bias.to(torch.bfloat16).unique().numel() <= 9
    kept = wire_dtype(name, bias.dtype, torch.bfloat16)
    assert kept is torch.float32
    assert bias.to(kept).unique().numel() == 238
    for router in (
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.router.weight",
        "model.layers.0.mlp.router.bias",
        "model.layers.0.block_sparse_moe.gate.weight",
    ):
        assert wire_dtype(router, torch.float32, torch.bfloat16) is torch.float32
    for other in (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "lm_head.weight",
    ):
        assert wire_dtype(other, torch.float32, torch.bfloat16) is torch.bfloat16


def test_wire_dtype_casts_nothing_that_has_no_meaning_without_its_scale() -> None:
    bf16 = torch.bfloat16
    assert wire_dtype("w", torch.float8_e4m3fn, bf16) is torch.float8_e4m3fn
    assert wire_dtype("w", torch.int64, bf16) is torch.int64
    assert wire_dtype("w", torch.bool, bf16) is torch.bool
    assert wire_dtype("w", torch.float64, bf16) is bf16
    assert wire_dtype("w", torch.float32, None) is torch.float32
    assert (
        wire_dtype("a.norm.weight", torch.float32, bf16, Patterns([r"/norm\.(weight|bias)$/"]))
        is torch.float32
    )
    assert wire_dtype("model.mlp.gate.weight", torch.float32, bf16, Patterns()) is bf16
    assert "x.mlp.gate.weight" in Patterns(KEEP_DTYPE)


def test_field_D21_persistent_buffers_are_sent_or_dropped_by_pattern() -> None:
    """https://github.com/huggingface/accelerate/issues/3898: buffers broke the sync or were left out."""
    net = Net()
    entries = {name: info(*t.shape) for name, t in net.state_dict().items()}
    assert "layers.0.kept" in names_of(naming_for(net).recipes(entries))
    assert "layers.0.gone" not in names_of(naming_for(net).recipes(entries))
    names = names_of(naming_for(net, drop=["*.kept"]).recipes(entries))
    assert names == [name for name in entries if not name.endswith("kept")]


# --- fused experts


def expert_stack(experts: int, features: int, hidden: int, *, interleaved: bool) -> torch.Tensor:
    """[experts, 2 * features, hidden]: expert, 1 for gate and 2 for up, row and column in the digits."""
    rows = []
    for expert in range(experts):
        gate = [[1000 * expert + 100 + 10 * f + h for h in range(hidden)] for f in range(features)]
        up = [[1000 * expert + 200 + 10 * f + h for h in range(hidden)] for f in range(features)]
        mixed = [row for pair in zip(gate, up, strict=True) for row in pair] if interleaved else gate + up
        rows.append(mixed)
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("experts", [4, 3])
def test_field_D1_fused_experts_become_per_expert_tensors(experts: int) -> None:
    """https://github.com/verl-project/verl/pull/6896: 3-D experts where the server wants one name an expert."""
    prefix = "model.layers.0.mlp.experts"
    stack = expert_stack(experts, 3, 5, interleaved=False)
    down = torch.arange(experts * 5 * 3, dtype=torch.float32).view(experts, 5, 3)
    naming = Naming(experts=HALVES)
    recipes = naming.recipes(
        {f"{prefix}.gate_up_proj": info(*stack.shape), f"{prefix}.down_proj": info(*down.shape)}
    )
    assert [recipe.fqn for recipe in recipes] == [f"{prefix}.gate_up_proj", f"{prefix}.down_proj"]
    assert [len(recipe.emits) for recipe in recipes] == [2 * experts, experts]
    # Contiguous slices in the order of the stack, so that rows can be gathered part by part (C3).
    for recipe in recipes:
        assert recipe.transform is None
        assert all(emit.stride is None for emit in recipe.emits)
        assert [e.start for e in recipe.emits] == sorted(e.start for e in recipe.emits)
    made = made_by(recipes[0], stack) | made_by(recipes[1], down)
    for expert in range(experts):
        assert torch.equal(made[f"{prefix}.{expert}.gate_proj.weight"], stack[expert, :3])
        assert torch.equal(made[f"{prefix}.{expert}.up_proj.weight"], stack[expert, 3:])
        assert torch.equal(made[f"{prefix}.{expert}.down_proj.weight"], down[expert])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_field_D2_gate_and_up_in_every_layout(interleaved: bool, transposed: bool) -> None:
    """https://github.com/thinking-machines-lab/tinker-cookbook/pull/459: gate and up mixed up by layout."""
    stack = expert_stack(3, 4, 5, interleaved=interleaved)
    held = stack.transpose(1, 2).contiguous() if transposed else stack
    recipe = unfuse(
        "experts.gate_up_proj", held.shape, ExpertLayout(interleaved=interleaved, transposed=transposed)
    )
    made = made_by(recipe, held)
    assert len(made) == 6
    for name, tensor in made.items():
        expert, kind = int(name.split(".")[1]), 100 if "gate" in name else 200
        wanted = torch.tensor([[1000 * expert + kind + 10 * f + h for h in range(5)] for f in range(4)])
        assert torch.equal(tensor, wanted.float()), name


def test_expert_biases_are_unfused_too() -> None:
    bias = torch.arange(12.0).view(2, 6)
    halves = made_by(unfuse("experts.gate_up_proj_bias", bias.shape, HALVES), bias)
    mixed = made_by(unfuse("experts.gate_up_proj_bias", bias.shape, INTERLEAVED), bias)
    assert torch.equal(halves["experts.1.up_proj.bias"], bias[1, 3:])
    assert torch.equal(mixed["experts.1.up_proj.bias"], bias[1, 1::2])
    assert torch.equal(mixed["experts.1.gate_proj.bias"], bias[1, ::2])
    down = made_by(unfuse("experts.down_proj_bias", (2, 6), INTERLEAVED), bias)
    assert torch.equal(down["experts.1.down_proj.bias"], bias[1])


def test_field_D3_no_3d_tensor_under_the_name_of_one_expert() -> None:
    """https://github.com/NVIDIA-NeMo/RL/pull/3280: a server takes any 3-D tensor for all experts of a layer."""
    for layout in (HALVES, INTERLEAVED):
        for emit in unfuse("mlp.experts.gate_up_proj", (3, 4, 8), layout).emits:
            assert len(emit.shape) == 2
    with pytest.raises(ValueError, match=r"mlp\.experts\.0\.gate_up_proj has shape \(3, 4, 8\)"):
        Naming().recipes({"mlp.experts.0.gate_up_proj": info(3, 4, 8)})
    assert names_of(Naming().recipes({"mlp.experts.gate_up_proj": info(3, 4, 8)})) == [
        "mlp.experts.gate_up_proj"
    ]


def test_wrong_shapes_of_fused_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 3 dims"):
        unfuse("experts.gate_up_proj", (4, 6), HALVES)
    with pytest.raises(ValueError, match="output size 5 is odd"):
        unfuse("experts.gate_up_proj", (4, 5, 6), HALVES)
    with pytest.raises(ValueError, match="no fused expert tensor"):
        unfuse("experts.0.gate_proj.weight", (4, 6), HALVES)


def test_field_C3_rows_that_an_expert_needs() -> None:
    """https://github.com/verl-project/verl/issues/6691: the whole stack was gathered at once."""
    recipe = unfuse("experts.gate_up_proj", (8, 6, 5), HALVES)
    assert [emit.rows((8, 6, 5)) for emit in recipe.emits[4:6]] == [(2, 3), (2, 3)]
    stack = torch.randn(8, 6, 5)
    for emit in recipe.emits:
        first, end = emit.rows(stack.shape)
        part = stack[first:end].contiguous()
        assert torch.equal(emit.view(part, first * 30), emit.view(stack))


def test_experts_kept_fused_take_the_prefix_of_the_checkpoint() -> None:
    def split(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {
            f"moe.experts.{i}.w1.weight": part.squeeze(0)
            for i, part in enumerate(state["mlp.experts.gate_up_proj"].chunk(3))
        } | {"norm": state["norm"]}

    entries = {"mlp.experts.gate_up_proj": info(3, 4, 8), "norm": info(4)}
    assert len(names_of(Naming(convert=split).recipes(entries))) == 4
    fused = Naming(convert=split, experts="fused").recipes(entries)
    assert names_of(fused) == ["moe.experts.gate_up_proj", "norm"]
    assert fused[0].emits[0].shape == (3, 4, 8)


# --- conversions


def test_trace_tells_slices_from_what_must_be_computed() -> None:
    def convert(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if name == "qkv":
                made |= dict(zip("qkv", (t.contiguous() for t in tensor.chunk(3)), strict=True))
            elif name == "swapped":
                made[name] = tensor.t().contiguous()
            elif name == "rope":
                made[name] = tensor.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3).clone()
            elif name == "shifted":
                made[name] = tensor.clone()
                made[name] += 1
            elif name != "gone":
                made[name] = tensor
        if "left" in state:
            made["joined"] = torch.cat([made.pop("left"), made.pop("right")])
        return made

    state = {
        name: torch.randn(shape)
        for name, shape in {
            "right": (2, 3), "qkv": (6, 4), "swapped": (3, 5), "rope": (8, 3), "shifted": (4,), "left": (1, 3),
            "gone": (3,), "same": (0, 3),
        }.items()
    }  # fmt: skip
    recipes = {recipe.fqn: recipe for recipe in trace(convert, {n: info(*t.shape) for n, t in state.items()})}
    assert list(recipes) == ["right", "qkv", "swapped", "rope", "shifted", "same"]
    assert recipes["qkv"].emits == (Emit("q", (2, 4)), Emit("k", (2, 4), 8), Emit("v", (2, 4), 16))
    assert recipes["swapped"].emits == (Emit("swapped", (5, 3), 0, (1, 5)),)
    assert {name for name, recipe in recipes.items() if recipe.transform} == {"rope", "shifted", "right"}
    assert recipes["right"].inputs == ("right", "left")
    kept = {name: tensor.clone() for name, tensor in state.items()}
    for recipe in recipes.values():
        for name, tensor in made_by(recipe, *(state[fqn] for fqn in recipe.inputs)).items():
            assert torch.equal(tensor, convert(kept)[name]), name
    assert all(torch.equal(state[name], kept[name]) for name in state)


def test_tensors_of_a_conversion_can_be_dropped_one_by_one() -> None:
    def convert(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        even, odd = state["w"][::2] + 0, state["w"][1::2] + 1
        return {"even": even, "odd": odd}

    tensor = torch.arange(6.0)
    (recipe,) = Naming(convert=convert, drop=("even",)).recipes({"w": info(6)})
    assert torch.equal(made_by(recipe, tensor)["odd"], tensor[1::2] + 1)
    assert Naming(convert=convert, drop=("even", "odd")).recipes({"w": info(6)}) == []
    (stack,) = Naming(experts=HALVES, drop=("*.up_proj.weight",)).recipes(
        {"experts.gate_up_proj": info(2, 4, 3)}
    )
    assert [emit.start for emit in stack.emits] == [0, 12]


def test_conversions_that_can_not_be_cut_up_are_refused() -> None:
    entries = {"a": info(2), "b": info(2)}
    with pytest.raises(ValueError, match="treat each group of tensors by itself"):
        trace(lambda state: {f"{name}{len(state)}": t + 1 for name, t in state.items()}, entries)
    with pytest.raises(ValueError, match="made it of no training tensor"):
        trace(lambda state: {**state, "c": torch.zeros(2)}, entries)
    with pytest.raises(TypeError, match=r"changes a from torch\.float32 to torch\.bfloat16"):
        trace(lambda state: {"a": state["a"].bfloat16()}, entries)
    with pytest.raises(TypeError, match="made a int"):
        trace(lambda state: {"a": 3}, entries)  # type: ignore[dict-item]


def test_state_dict_hooks_are_part_of_the_conversion() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 6, bias=False)
            self.register_state_dict_post_hook(self.split)

        @staticmethod
        def split(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
            if (whole := state.pop(f"{prefix}qkv.weight", None)) is not None:
                for name, part in zip("qkv", whole.chunk(3), strict=True):
                    state[f"{prefix}{name}.weight"] = part

    net = nn.Sequential(nn.Linear(4, 4), Fused())
    entries = {name: info(*p.shape) for name, p in net.named_parameters()}
    naming = naming_for(net)
    assert naming.convert is not None
    recipes = naming.recipes(entries)
    assert names_of(recipes) == ["0.weight", "0.bias", "1.q.weight", "1.k.weight", "1.v.weight"]
    made = made_by(recipes[-1], net[1].qkv.weight)
    assert all(torch.equal(made[name], t) for name, t in net.state_dict().items() if name in made)


def test_conversions_chain() -> None:
    assert chained(None, None) is None
    both = chained(
        lambda s: {f"a.{n}": t for n, t in s.items()}, None, lambda s: {f"b.{n}": t for n, t in s.items()}
    )
    assert both is not None
    assert list(both({"w": torch.ones(1)})) == ["b.a.w"]


def test_adapter_may_be_a_function_or_have_to_hf() -> None:
    class Adapter:
        def to_hf(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {f"model.{name}": tensor for name, tensor in state.items()}

    net = nn.Linear(2, 2)
    entries = {name: info(*p.shape) for name, p in net.named_parameters()}
    for adapter in (Adapter(), Adapter().to_hf):
        assert names_of(naming_for(net, adapter=adapter).recipes(entries)) == ["model.weight", "model.bias"]


def test_recipes_of_a_671b_model_are_quick() -> None:
    """58 MoE layers of 256 experts: 45,000 names, unfused from the stacks."""
    import time

    entries = {}
    for layer in range(61):
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            entries[f"model.layers.{layer}.self_attn.{name}.weight"] = info(7168, 1536)
        if layer >= 3:
            entries[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = info(256, 4096, 7168)
            entries[f"model.layers.{layer}.mlp.experts.down_proj"] = info(256, 7168, 2048)
    start = time.process_time()
    recipes = Naming(experts=HALVES).recipes(entries)
    assert len(names_of(recipes)) == 61 * 5 + 58 * 256 * 3
    assert time.process_time() - start < 5


def _stacks_sharded(rank: int, world_size: int) -> dict[int, dict[str, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    result = {}
    for experts in (3, 4):
        stack = distribute_tensor(expert_stack(experts, 3, 5, interleaved=False), mesh, [Shard(0)])
        recipe = unfuse("experts.gate_up_proj", stack.shape, HALVES)
        result[experts] = made_by(recipe, stack.full_tensor())
    return result


def test_field_D1_from_shards() -> None:
    """https://github.com/modelscope/ms-swift/pull/9468: an uneven number of experts over two ranks, too."""
    for result in run_ranks(_stacks_sharded, 2):
        for experts, made in result.items():
            stack = expert_stack(experts, 3, 5, interleaved=False)
            assert len(made) == 2 * experts
            assert all(
                torch.equal(made[f"experts.{e}.gate_proj.weight"], stack[e, :3]) for e in range(experts)
            )
            assert all(torch.equal(made[f"experts.{e}.up_proj.weight"], stack[e, 3:]) for e in range(experts))


def test_nothing_here_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Naming().recipes({"a": info(2)})
