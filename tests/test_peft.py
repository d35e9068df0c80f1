"""LoRA: what is sent is what `merge_and_unload` leaves, merged shard by shard, and never an adapter."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ipc.naming import naming_for
from fsdp_ipc.peft import LowRankMerge, LowRankTerm
from fsdp_ipc.source import DTensorSource
from tests import models
from tests.runner import run_ranks
from tests.test_models import assert_same, entries_of, stream

pytest.importorskip("peft", reason="needs peft: its module tree is the subject")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "rslora": ("llama", {"target_modules": ["q_proj"], "use_rslora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    "modules_to_save": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "k_proj"]}),
    "experts": (
        "qwen3_moe",
        {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "experts_transposed": (
        "gpt_oss",
        {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}


def adapted(case: str, dtype: torch.dtype = torch.float32, *, autocast: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    name, options = CASES[case]
    config = LoraConfig(r=3, lora_alpha=5, **options)
    model = get_peft_model(models.build(name).to(dtype), config, autocast_adapter_dtype=autocast)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def merged_files(model: nn.Module) -> dict[str, torch.Tensor]:
    return models.saved(copy.deepcopy(model).merge_and_unload())  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_field_D13_merged_weights_under_clean_names(case: str, dtype: torch.dtype) -> None:
    """https://github.com/verl-project/verl/pull/7070: `base_layer`, `modules_to_save` and adapters reached the server."""
    model = adapted(case, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = stream(naming_for(model), model)
    assert not any(
        part in name for name in made for part in ("lora_", "base_layer", "modules_to_save", "original_")
    )
    assert_same(made, merged_files(model))
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("case", ["linear", "embedding", "experts"])
def test_fp32_adapters_on_bf16_weights(case: str) -> None:
    model = adapted(case, torch.bfloat16, autocast=True)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert_same(stream(naming_for(model), model), merged_files(model))


def test_field_D13_trained_copies_are_sent_not_the_originals() -> None:
    """https://github.com/huggingface/trl/pull/5766: trained copies were skipped."""
    model = adapted("modules_to_save")
    state = model.state_dict()
    made = stream(naming_for(model), model)
    assert torch.equal(
        made["lm_head.weight"], state["base_model.model.lm_head.modules_to_save.default.weight"]
    )
    assert not torch.equal(made["lm_head.weight"], state["base_model.model.lm_head.original_module.weight"])
    naming = naming_for(model)
    read = {fqn for recipe in naming.recipes(entries_of(state)) for fqn in recipe.reads}
    assert not any("original_module" in fqn for fqn in read)


def test_adapters_injected_without_a_wrapper() -> None:
    from peft import LoraConfig

    model = models.build("llama")
    reference = copy.deepcopy(model)
    model.add_adapter(LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"]))  # type: ignore[operator]
    made = stream(naming_for(model), model)  # B starts as zeros
    assert_same(made, models.saved(reference))


def test_adapters_in_compiled_layers() -> None:
    model = adapted("linear")
    wanted = merged_files(model)
    layers = model.base_model.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer)
    compiled = torch.compile(model)
    assert any("_orig_mod" in name for name in compiled.state_dict())
    assert_same(stream(naming_for(compiled), compiled), wanted)


def test_field_D14_each_sync_sends_the_adapters_of_that_moment() -> None:
    """https://github.com/verl-project/verl/pull/7014: a lazy reader ran after the merge had been undone."""
    model = adapted("linear")
    naming = naming_for(model)
    assert_same(stream(naming, model), merged_files(model))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.mul_(0.5)
    assert_same(stream(naming, model), merged_files(model))
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 3.0)
    assert_same(stream(naming, model), merged_files(model))


def test_field_D15_an_adapter_that_is_merged_already_is_not_added_again() -> None:
    """https://github.com/radixark/miles/pull/1087: base synced merged and the adapter applied again."""
    model = adapted("linear")
    wanted = merged_files(model)
    naming = naming_for(model)
    model.merge_adapter()
    assert_same(stream(naming, model), wanted)
    model.unmerge_adapter()
    assert sorted(stream(naming, model)) == sorted(wanted)


def test_several_adapters_and_changes_between_syncs() -> None:
    from peft import LoraConfig

    model = adapted("linear")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    naming = naming_for(model)
    only_default = merged_files(model)
    assert_same(stream(naming, model), only_default)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="make a new source after changing adapters"):
        stream(naming, model)
    both = stream(naming_for(model), model)
    assert_same(
        both, models.saved(copy.deepcopy(model).merge_and_unload(adapter_names=["default", "second"]))
    )
    assert not torch.equal(
        both["model.layers.0.self_attn.q_proj.weight"], only_default["model.layers.0.self_attn.q_proj.weight"]
    )
    with model.disable_adapter():
        plain = stream(naming_for(model), model)
        with pytest.raises(ValueError, match="active when the source was made"):
            stream(naming, model)
    assert_same(plain, models.saved(models.build("llama")))


@pytest.mark.parametrize(
    ("more", "cause"), [({"use_dora": True}, "DoraLinear|lora_variant"), ({"lora_bias": True}, "lora_bias")]
)
def test_what_can_not_be_merged_is_refused_by_name(more: dict[str, Any], cause: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(models.build("llama"), LoraConfig(target_modules=["q_proj"], **more))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.q_proj .*({cause})"):
        naming_for(model)


def test_an_adapter_on_one_end_of_a_tie_is_refused_or_sent_apart() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about the tie
        model = get_peft_model(models.build("llama_tied"), config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"an adapter changes lm_head\.weight alone"):
        stream(naming_for(model), model)
    made = stream(naming_for(model, ties="both"), model)
    assert not torch.equal(made["lm_head.weight"], made["model.embed_tokens.weight"])


def test_other_methods_are_refused_by_name() -> None:
    from peft import IA3Config, PromptTuningConfig, get_peft_model

    ia3 = get_peft_model(
        models.build("llama"),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj .*only LoRA"):
        naming_for(ia3)
    prompt = get_peft_model(
        models.build("llama"),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match=r"the root .*prompt_encoder"):
        naming_for(prompt)


def _sharded(model: nn.Module, world_size: int) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    for path, module in model.named_modules():
        if path.rpartition(".")[2].isdigit() and ".layers." in path:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dict(model.state_dict())


def _merged_from_shards(rank: int, world_size: int) -> dict[str, tuple[dict[str, torch.Tensor], set[int]]]:
    from torch.distributed.tensor.debug import CommDebugMode

    result = {}
    for case in CASES:
        model = adapted(case)
        state = _sharded(model, world_size)
        collectives = set()
        for recipe in naming_for(model).recipes(entries_of(state)):
            for merge in recipe.merges:
                with CommDebugMode() as mode:
                    merge.apply(state)
                if case in ("linear", "rslora"):
                    collectives.add(mode.get_total_counts())
        result[case] = (dict(DTensorSource(model)), collectives)
    return result


def test_merge_from_shards() -> None:
    wanted = {case: merged_files(adapted(case)) for case in CASES}
    for cases in run_ranks(_merged_from_shards, 2, timeout_s=180):
        for case, (made, collectives) in cases.items():
            assert sorted(made) == sorted(wanted[case])
            for name, tensor in wanted[case].items():
                torch.testing.assert_close(made[name], tensor, msg=f"{case}: {name}")
            # Only the thin input factor is gathered; the output factor's rows are where the weight's are.
            assert collectives <= {1}


class _Layer:
    """What a merge asks of an adapter layer."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False
        self.lora_A = {"default": None}
        self.lora_embedding_A: dict[str, None] = {}


def _layouts(rank: int, world_size: int) -> None:
    """Every way of sharding the weight, its factors sharded in some other way or not at all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, other = [Replicate(), Replicate()], [Replicate(), Shard(1)]

    def check(base: DTensor, kind: Any, a: torch.Tensor, b: torch.Tensor, delta: torch.Tensor) -> None:
        merge = LowRankMerge("w", (LowRankTerm("default", "a", "b"),), kind, _Layer(3))
        for held in (other, None):
            factors = (
                {"a": a, "b": b}
                if held is None
                else {"a": distribute_tensor(a, mesh, held), "b": distribute_tensor(b, mesh, held)}
            )
            before = base.full_tensor()
            merged = merge.apply({"w": base, **factors})
            assert isinstance(merged, DTensor)
            assert merged.placements == base.placements
            assert merged.shape == base.shape
            torch.testing.assert_close(merged.full_tensor(), before + 0.5 * delta)
            assert torch.equal(base.full_tensor(), before)

    a, b = torch.randn(2, 5), torch.randn(7, 2)
    for placements in (
        whole,
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
    ):
        check(distribute_tensor(torch.randn(7, 5), mesh, placements), "linear", a, b, b @ a)
        check(distribute_tensor(torch.randn(5, 7), mesh, placements), "transposed", a, b, (b @ a).T)
    a, b = torch.randn(6, 5), torch.randn(7, 6)  # 3 experts of rank 2
    delta = torch.einsum("ore,eri->eoi", b.reshape(7, 2, 3), a.reshape(3, 2, 5))
    for placements in ([Shard(0), Shard(1)], [Shard(2), Shard(0)], [Replicate(), Shard(0)]):
        check(distribute_tensor(torch.randn(3, 7, 5), mesh, placements), "experts", a, b, delta)
        check(distribute_tensor(torch.randn(3, 5, 7), mesh, placements), "experts_transposed", a, b, delta.mT)

    a, b = torch.randn(2, 4), torch.randn(6, 2)
    for style in (ColwiseParallel(), RowwiseParallel()):  # FSDP over TP: rows are sharded in strides
        linear = parallelize_module(nn.Linear(4, 6, bias=False), mesh["tp"], style)
        fully_shard(linear, mesh=mesh["dp"])
        check(linear.weight, "linear", a, b, b @ a)  # type: ignore[arg-type]


def test_merge_in_every_layout() -> None:
    run_ranks(_layouts, 4, timeout_s=180)
