"""The copy plan on plain modules: it replays what it proved, bit for bit, and leaves the rest to the loader."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ipc.vllm_plugin import copy_lesson, copy_replay
from fsdp_ipc.vllm_plugin.copy_plan import CopyPlanLoader
from fsdp_ipc.vllm_plugin.loader import LoadCounts, NamedTensors
from fsdp_ipc.vllm_plugin.scattered import Scattered
from tests.plain_reload import (
    Layer,
    Model,
    PlainReload,
    QuantMethod,
    columns_loader,
    computing_loader,
    expert_loader,
    fused_loader,
    parameter,
    shard_loader,
    transposing_loader,
    unseen_permutation,
    vocab_loader,
)

Weights = dict[str, torch.Tensor]


class Sender:
    """The trainer's memory: every tensor at an odd place in one buffer a bucket, overwritten once consumed.

    With `ranks` a worker is shown each tensor as chunks of dim 0 that several ranks hold.
    """

    def __init__(
        self, weights: Weights, *, num_buckets: int = 2, packed: bool = True, ranks: int = 1
    ) -> None:
        self.packed = packed
        self.ranks = ranks
        self.epoch = 0
        self.weights = weights
        self.num_buckets = num_buckets
        self.move()

    def move(self) -> None:
        """New memory."""
        self.epoch += 1
        names = list(self.weights)
        self.buckets: list[list[tuple[str, torch.Tensor]]] = []
        for k in range(self.num_buckets):
            own = names[k :: self.num_buckets]
            size = sum(self.weights[n].nbytes + 64 for n in own) + 64
            memory = torch.zeros(size, dtype=torch.uint8)
            at, bucket = 32, []
            for name in own:
                like = self.weights[name]
                view = memory[at : at + like.nbytes].view(like.dtype).view(like.shape)
                at = (at + like.nbytes + 47) // 16 * 16
                bucket.append((name, view))
            self.buckets.append(bucket)
        shown = [[(n, self._shown(v)) for n, v in bucket] for bucket in self.buckets]
        self.shown: Sequence[NamedTensors] = shown if self.ranks > 1 else self.buckets

    def _shown(self, view: torch.Tensor) -> Scattered:
        chunks = view.chunk(self.ranks) if view.dim() else (view,)
        parts = tuple((chunk.view(-1), distance) for distance, chunk in enumerate(chunks))
        return Scattered(tuple(view.shape), view.dtype, view.device, parts)

    def sync(self, loader: CopyPlanLoader, weights: Weights, *, digest: str = "names") -> LoadCounts:
        loader.start(f"{digest}:{self.epoch}")
        for k, bucket in enumerate(self.buckets):
            for name, view in bucket:
                view.copy_(weights[name])
            loader.load(k, self.shown[k], keep_alive=not self.packed)
            if self.packed:
                for _, view in bucket:
                    view.view(torch.uint8).fill_(0xA5)
        return loader.finish()


def planned(model: Model) -> CopyPlanLoader:
    return CopyPlanLoader(model, None, reload=PlainReload)


def draw(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def reference(make: Callable[[], Model], weights: Weights) -> dict[str, torch.Tensor]:
    """What a new model holds after one plain reload."""
    model = make()
    reload = PlainReload(model, None)
    reload.start("")
    reload.load(0, list(weights.items()), keep_alive=False)
    reload.finish()
    return dict(model.named_parameters())


def assert_same(model: Model, expected: dict[str, torch.Tensor]) -> None:
    got = dict(model.named_parameters())
    assert got.keys() == expected.keys()
    wrong = [
        name for name in got if not torch.equal(got[name].view(torch.uint8), expected[name].view(torch.uint8))
    ]
    assert not wrong


# What is proved is replayed.


def norm() -> tuple[Model, dict[str, tuple[int, ...]]]:
    return Model(norm=Layer({"norm": ("weight",)}, weight=parameter(6))), {"norm": (6,)}


def qkv(method: QuantMethod | None = None) -> tuple[Model, dict[str, tuple[int, ...]]]:
    load = shard_loader({"q": (0, 4), "k": (4, 2), "v": (6, 2)})
    names = {f"{s}.{p}": (p, s) for s in "qkv" for p in ("weight", "bias")}
    layer = Layer(names, method, weight=parameter(8, 5, loader=load), bias=parameter(8, loader=load))
    rows = {"q": 4, "k": 2, "v": 2}
    shapes: dict[str, tuple[int, ...]] = {f"{s}.weight": (n, 5) for s, n in rows.items()}
    return Model(qkv=layer), shapes | {f"{s}.bias": (n,) for s, n in rows.items()}


def columns() -> tuple[Model, dict[str, tuple[int, ...]]]:
    layer = Layer({"o": ("weight",)}, QuantMethod(), weight=parameter(4, 3, loader=columns_loader(3, 3)))
    return Model(o=layer), {"o": (4, 9)}


def vocab() -> tuple[Model, dict[str, tuple[int, ...]]]:
    return Model(embed=Layer({"embed": ("weight",)}, weight=parameter(8, 3, loader=vocab_loader))), {
        "embed": (5, 3)
    }


def transposed() -> tuple[Model, dict[str, tuple[int, ...]]]:
    return Model(t=Layer({"t": ("weight",)}, weight=parameter(4, 6, loader=transposing_loader))), {
        "t": (6, 4)
    }


def experts() -> tuple[Model, dict[str, tuple[int, ...]]]:
    names = {
        f"{e}.{s}": ("w2" if s == "down" else "w13", e, s) for e in range(3) for s in ("gate", "up", "down")
    }
    w13, w2 = parameter(3, 8, 5, loader=expert_loader), parameter(3, 5, 4, loader=expert_loader)
    shapes = {name: ((5, 4) if name.endswith("down") else (4, 5)) for name in names}
    return Model(experts=Layer(names, QuantMethod(), w13=w13, w2=w2)), shapes


def fused(transpose: bool = False) -> tuple[Model, dict[str, tuple[int, ...]]]:
    names = {"gate_up": ("w13", True, transpose), "down": ("w2", False, transpose)}
    w13, w2 = parameter(3, 8, 5, loader=fused_loader), parameter(3, 5, 4, loader=fused_loader)
    shapes = (
        {"gate_up": (3, 5, 8), "down": (3, 4, 5)} if transpose else {"gate_up": (3, 8, 5), "down": (3, 5, 4)}
    )
    return Model(experts=Layer(names, QuantMethod(), w13=w13, w2=w2)), shapes


def cast() -> tuple[Model, dict[str, tuple[int, ...]]]:
    return Model(x=Layer({"x": ("weight",)}, weight=parameter(4, 6, dtype=torch.bfloat16))), {"x": (4, 6)}


def cast_in_loader() -> tuple[Model, dict[str, tuple[int, ...]]]:
    def load(param: nn.Parameter, tensor: torch.Tensor) -> None:
        param.data[1:].copy_(tensor.to(torch.bfloat16)[1:])
        param.data[:1].copy_(tensor.t().contiguous()[:, 0])

    return Model(x=Layer({"x": ("weight",)}, weight=parameter(4, 6, dtype=torch.bfloat16, loader=load))), {
        "x": (4, 6)
    }


CASES = [
    norm,
    qkv,
    columns,
    vocab,
    transposed,
    experts,
    fused,
    functools.partial(fused, True),
    cast,
    cast_in_loader,
]


@pytest.mark.parametrize("ranks", [1, 3], ids=["whole", "chunks"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: getattr(case, "__name__", "fused_transposed"))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_replay_gives_what_the_reload_gives(case: Any, packed: bool, mode: Any, ranks: int) -> None:
    model, shapes = case()
    a, b = draw(shapes, 1), draw(shapes, 2)
    for weights in (a, b):
        first = next(iter(weights.values())).view(-1)
        # Casts of NaN differ in their payload between strided and contiguous kernels, so not where a cast is tested.
        first[0], first[1] = (1.0 if case in (cast, cast_in_loader) else float("nan")), -0.0
    loader, sender = planned(model), Sender(a, packed=packed, ranks=ranks)
    with mode():
        counts = sender.sync(loader, a)
        assert counts.replayed_params == 0
        model.loaded.clear()
        for weights in (b, a, b):
            for param in model.parameters():
                param.data.fill_(7)
            counts = sender.sync(loader, weights)
            assert_same(model, reference(lambda: case()[0], weights))
    assert (counts.replayed_params, counts.loader_params) == (len(list(model.parameters())), 0)
    assert counts.num_tensors == len(shapes)
    assert not model.loaded, "a replayed name was loaded as well"


def test_a_replay_is_one_call_a_bucket_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = experts()
    loader, sender = planned(model), Sender(draw(shapes, 1), num_buckets=2)
    sender.sync(loader, draw(shapes, 1))
    sender.sync(loader, draw(shapes, 2))
    calls: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda into, out_of: (calls.append(len(into)), copy(into, out_of))
    )
    monkeypatch.setattr(torch.Tensor, "as_strided", None)
    sender.sync(loader, draw(shapes, 3))
    assert len(calls) == 2
    assert sum(calls) == 9
    monkeypatch.undo()
    assert_same(model, reference(lambda: experts()[0], draw(shapes, 3)))


def test_new_memory_of_the_trainer_binds_the_plan_anew() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    old = sender.buckets
    sender.move()
    for bucket in old:
        for _, view in bucket:
            view.fill_(9)
    counts = sender.sync(loader, draw(shapes, 3))
    assert counts.replayed_params == 2
    assert_same(model, reference(lambda: qkv()[0], draw(shapes, 3)))


# What is not proved stays on the loader, and comes out right.


def both(layer: Layer, shapes: dict[str, tuple[int, ...]]) -> tuple[Model, dict[str, tuple[int, ...]]]:
    """A doubtful layer beside one that is replayed."""
    return Model(plain=Layer({"plain": ("weight",)}, weight=parameter(6)), odd=layer), {
        "plain": (6,)
    } | shapes


def check_on_loader(
    make: Callable[[], tuple[Model, dict[str, tuple[int, ...]]]], reason: str
) -> CopyPlanLoader:
    """The odd layer stays on the loader for this reason, in the same syncs in which the plain one is replayed."""
    model, shapes = make()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    sender.sync(loader, draw(shapes, 1))
    for seed in (2, 3, 1):
        model.loaded.clear()
        counts = sender.sync(loader, draw(shapes, seed))
        assert_same(model, reference(lambda: make()[0], draw(shapes, seed)))
        assert counts.reasons == {reason: len(list(model.odd.parameters()))}
        assert counts.replayed_params == 1
        assert sorted(model.loaded) == sorted(name for name in shapes if name != "plain")
    return loader


def test_computed_weights_stay_on_the_loader() -> None:
    check_on_loader(
        lambda: both(
            Layer({"x": ("weight",)}, weight=parameter(4, 6, loader=computing_loader)), {"x": (4, 6)}
        ),
        "computed, not copied",
    )


def test_weights_changed_by_processing_stay_on_the_loader() -> None:
    def scale(layer: nn.Module) -> None:
        layer.weight.data.mul_(2)

    check_on_loader(
        lambda: both(Layer({"x": ("weight",)}, QuantMethod(scale), weight=parameter(4, 6)), {"x": (4, 6)}),
        "computed, not copied",
    )


def test_weights_permuted_by_a_kernel_that_no_operator_shows_fail_the_proof() -> None:
    method = QuantMethod(unseen_permutation)
    check_on_loader(
        lambda: both(Layer({"x": ("weight",)}, method, weight=parameter(4, 6)), {"x": (4, 6)}),
        "differs from the copies",
    )


def test_a_gap_stays_on_the_loader() -> None:
    def load(param: nn.Parameter, tensor: torch.Tensor) -> None:
        param.data[:2].copy_(tensor[:2])

    def fill(layer: nn.Module) -> None:
        layer.weight.data.numpy()[2:] = 3

    check_on_loader(
        lambda: both(
            Layer({"x": ("weight",)}, QuantMethod(fill), weight=parameter(4, 6, loader=load)), {"x": (4, 6)}
        ),
        "not filled completely",
    )


def test_a_packed_copy_in_a_closure_keeps_the_layer_on_the_loader() -> None:
    def pack(layer: nn.Module) -> None:
        packed = layer.weight.data.clone()
        layer.compute = lambda x: x @ packed.t()

    def make() -> tuple[Model, dict[str, tuple[int, ...]]]:
        return both(Layer({"x": ("weight",)}, QuantMethod(pack), weight=parameter(4, 6)), {"x": (4, 6)})

    model, shapes = make()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2, 3):
        counts = sender.sync(loader, draw(shapes, seed))
        x = torch.eye(6)
        assert torch.equal(model.odd.compute(x), draw(shapes, seed)["x"].t())
    assert counts.replayed_params == 1


def test_a_kernel_object_with_its_own_copy_keeps_the_layer_on_the_loader() -> None:
    class Kernel:
        def __init__(self, weight: torch.Tensor) -> None:
            self.packed = [{"weight": torch.from_numpy(weight.numpy().copy())}]

    def build(layer: nn.Module) -> None:
        layer.quant_method.kernel = Kernel(layer.weight.data)

    check_on_loader(
        lambda: both(Layer({"x": ("weight",)}, QuantMethod(build), weight=parameter(4, 6)), {"x": (4, 6)}),
        "state outside the parameters",
    )


def test_a_kernel_object_that_refers_to_live_parameters_is_replayed() -> None:
    class Kernel:
        def __init__(self, bias: torch.Tensor) -> None:
            self.bias, self.counts = bias, torch.arange(4)

    model, shapes = qkv(QuantMethod())
    model.qkv.quant_method.kernel = Kernel(model.qkv.bias)
    loader, sender = planned(model), Sender(draw(shapes, 1))
    sender.sync(loader, draw(shapes, 1))
    assert sender.sync(loader, draw(shapes, 2)).replayed_params == 2
    assert torch.equal(model.qkv.quant_method.kernel.bias[:4], draw(shapes, 2)["q.bias"])


def test_an_incoming_tensor_that_the_model_keeps_by_reference_is_not_replayed() -> None:
    class Keeper(Layer):
        kept: torch.Tensor

    def load(param: nn.Parameter, tensor: torch.Tensor) -> None:
        param.data.copy_(tensor)
        layer.kept = tensor

    layer = Keeper({"x": ("weight",)}, weight=parameter(4, 6, loader=load))
    model, shapes = both(layer, {"x": (4, 6)})
    loader, sender = planned(model), Sender(draw(shapes, 1), packed=False)
    for seed in (1, 2, 3):
        counts = sender.sync(loader, draw(shapes, seed))
        assert torch.equal(layer.kept, draw(shapes, seed)["x"])
    assert counts.reasons == {"kept by the model": 1}


def test_a_tie_whose_other_owner_keeps_state_is_not_replayed() -> None:
    model, shapes = both(Layer({"x": ("weight",)}, QuantMethod(), weight=parameter(4, 6)), {"x": (4, 6)})
    head = Layer({}, QuantMethod())
    head.register_parameter("weight", model.odd.weight)
    head.compute = functools.partial(torch.matmul, torch.ones(4, 4))
    model.add_module("head", head)
    loader, sender = planned(model), Sender(draw(shapes, 1))
    sender.sync(loader, draw(shapes, 1))
    assert sender.sync(loader, draw(shapes, 2)).reasons == {"state outside the parameters": 1}


def test_two_names_in_one_parameter_stay_on_the_loader() -> None:
    layer = Layer({"x": ("weight",), "y": ("weight",)}, weight=parameter(4, 6))
    model, shapes = both(layer, {"x": (4, 6), "y": (4, 6)})
    loader, sender = planned(model), Sender(draw(shapes, 1), num_buckets=1)
    for seed in (1, 2):
        counts = sender.sync(loader, draw(shapes, seed))
        assert torch.equal(layer.weight, draw(shapes, seed)["y"])
    assert counts.reasons == {"written by several tensors": 1}


def test_a_layer_that_needs_a_tensor_of_a_layer_on_the_loader_stays_too() -> None:
    first = Layer({"x": ("weight",)}, weight=parameter(4, 6, loader=computing_loader))
    second = Layer({}, weight=parameter(4, 6))
    model, shapes = both(first, {"x": (4, 6)})
    model.add_module("second", second)
    plain_load = model.load_weights

    def load_weights(weights: Any) -> None:
        for name, tensor in weights:
            plain_load([(name, tensor)])
            if name == "x":
                second.weight.weight_loader(second.weight, tensor)

    model.load_weights = load_weights
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2, 3):
        counts = sender.sync(loader, draw(shapes, seed))
        assert torch.equal(second.weight, draw(shapes, seed)["x"])
        assert torch.equal(first.weight, draw(shapes, seed)["x"] + 1)
    assert counts.reasons == {"computed, not copied": 1, "used by add": 1}


def test_a_sound_layer_follows_its_tensor_to_the_loader() -> None:
    """Both layers are copies of one tensor, but one of them has a kernel with a copy of its own."""

    def build(layer: nn.Module) -> None:
        layer.kernel = [torch.from_numpy(layer.weight.data.numpy().copy())]

    first: Any = Layer({"x": ("weight",)}, QuantMethod(build), weight=parameter(4, 6))
    second = Layer({}, weight=parameter(4, 6))
    model, shapes = both(first, {"x": (4, 6)})
    model.add_module("second", second)
    plain_load = model.load_weights

    def load_weights(weights: Any) -> None:
        for name, tensor in weights:
            plain_load([(name, tensor)])
            if name == "x":
                second.weight.weight_loader(second.weight, tensor)

    model.load_weights = load_weights
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2, 3):
        counts = sender.sync(loader, draw(shapes, seed))
        assert torch.equal(second.weight, draw(shapes, seed)["x"])
        assert torch.equal(first.kernel[0], draw(shapes, seed)["x"])
    assert counts.reasons == {"state outside the parameters": 1, copy_replay.COMPANION: 1}


def test_state_made_by_an_operator_is_noticed_wherever_it_is_kept() -> None:
    elsewhere: list[torch.Tensor] = []

    def pack(layer: nn.Module) -> None:
        elsewhere[:] = [layer.get_parameter("weight").data * 2]

    model, shapes = both(Layer({"x": ("weight",)}, QuantMethod(pack), weight=parameter(4, 6)), {"x": (4, 6)})
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2, 3):
        counts = sender.sync(loader, draw(shapes, seed))
        assert torch.equal(elsewhere[0], draw(shapes, seed)["x"] * 2)
    assert counts.reasons == {"other state is computed from it": 1}


def test_what_attention_derives_weights_from_stays_on_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(nn.Module):
        def __init__(self, source: nn.Module) -> None:
            super().__init__()
            self.kv_b_proj = source

    layer = Layer({"x": ("weight",)}, weight=parameter(4, 6))
    model, shapes = both(layer, {"x": (4, 6)})
    model.add_module("attention", Attention(layer))
    for module in (copy_lesson, copy_replay):
        monkeypatch.setattr(module, "attention_layers", lambda m: [m.attention])
    loader, sender = planned(model), Sender(draw(shapes, 1))
    sender.sync(loader, draw(shapes, 1))
    assert sender.sync(loader, draw(shapes, 2)).reasons == {copy_lesson.ATTENTION: 1}
    assert model.attention in list(loader._plan.part.modules())


def test_experts_that_may_be_moved_stay_on_the_loader() -> None:
    layer = Layer({"x": ("weight",)}, weight=parameter(4, 6))
    layer.enable_eplb = True
    model, shapes = both(layer, {"x": (4, 6)})
    loader, sender = planned(model), Sender(draw(shapes, 1))
    sender.sync(loader, draw(shapes, 1))
    assert sender.sync(loader, draw(shapes, 2)).reasons == {"expert load balancing moves it": 1}


def test_two_names_for_the_same_memory_are_never_told_apart_by_address() -> None:
    model, _ = both(Layer({"x": ("weight",)}, weight=parameter(4, 6)), {"x": (4, 6)})
    model.add_module("other", Layer({"y": ("weight",)}, weight=parameter(4, 6)))
    model.targets["y"] = (model.other, "weight")
    loader = planned(model)
    memory, plain = torch.zeros(4, 6), torch.zeros(6)
    bucket = [("plain", plain), ("x", memory), ("y", memory)]
    for epoch in (1, 1, 2):
        if epoch == 2:  # the trainer untied them: same names, other memory
            bucket = [("plain", plain), ("x", torch.full((4, 6), 2.0)), ("y", torch.full((4, 6), 3.0))]
        memory.add_(1)
        loader.start(f"names:{epoch}")
        loader.load(0, bucket, keep_alive=True)
        loader.finish()
        assert torch.equal(model.odd.weight, bucket[1][1])
        assert torch.equal(model.other.weight, bucket[2][1])


# Constant data.


def test_constant_data_proves_nothing_where_weights_are_processed() -> None:
    """A zero bias looks the same after a permutation; the first data that differ show it."""
    method = QuantMethod(unseen_permutation)

    def make() -> tuple[Model, dict[str, tuple[int, ...]]]:
        return both(Layer({"b": ("bias",)}, method, bias=parameter(6)), {"b": (6,)})

    model, shapes = make()
    zero = draw(shapes, 1) | {"b": torch.zeros(6)}
    loader, sender = planned(model), Sender(zero)
    sender.sync(loader, zero)
    assert sender.sync(loader, zero).reasons == {copy_replay.CONSTANT: 1}
    for seed in (2, 3):
        counts = sender.sync(loader, draw(shapes, seed))
        assert_same(model, reference(lambda: make()[0], draw(shapes, seed)))
    assert counts.reasons == {"differs from the copies": 1}


def test_constant_data_are_tried_again() -> None:
    model, shapes = qkv(QuantMethod())
    zero = draw(shapes, 1) | {f"{s}.bias": torch.zeros(shapes[f"{s}.bias"]) for s in "qkv"}
    loader, sender = planned(model), Sender(zero)
    for _ in range(3):
        counts = sender.sync(loader, zero)
    assert counts.reasons == {copy_replay.CONSTANT: 2}
    sender.sync(loader, draw(shapes, 2))
    assert sender.sync(loader, draw(shapes, 3)).replayed_params == 2
    assert_same(model, reference(lambda: qkv()[0], draw(shapes, 3)))


def test_constant_data_are_enough_where_nothing_is_processed() -> None:
    model, shapes = norm()
    loader, sender = planned(model), Sender({"norm": torch.ones(6)})
    sender.sync(loader, {"norm": torch.ones(6)})
    assert sender.sync(loader, draw(shapes, 2)).replayed_params == 1


# When the plan ends.


def test_a_moved_parameter_drops_the_plan() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    model.qkv.weight.data = model.qkv.weight.data.clone()
    assert sender.sync(loader, draw(shapes, 3)).replayed_params == 0
    assert_same(model, reference(lambda: qkv()[0], draw(shapes, 3)))
    assert sender.sync(loader, draw(shapes, 4)).replayed_params == 2
    assert_same(model, reference(lambda: qkv()[0], draw(shapes, 4)))


def test_a_replaced_parameter_drops_the_plan() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    old = model.qkv.weight
    model.qkv.weight = parameter(8, 5, loader=old.weight_loader)
    assert sender.sync(loader, draw(shapes, 3)).replayed_params == 0
    assert_same(model, reference(lambda: qkv()[0], draw(shapes, 3)))


def test_a_parameter_laid_out_anew_in_its_memory_drops_the_plan() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    at = model.qkv.weight.data_ptr()
    model.qkv.weight.data = model.qkv.weight.data.view(5, 8).t()
    assert model.qkv.weight.data_ptr() == at
    for seed, replayed in ((3, 0), (4, 2)):
        assert sender.sync(loader, draw(shapes, seed)).replayed_params == replayed
        expected = reference(lambda: qkv()[0], draw(shapes, seed))
        got = {name: param.data.contiguous() for name, param in model.named_parameters()}
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_sync_that_is_given_up_is_looked_at_anew() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    loader.start(f"names:{sender.epoch}")
    loader.abort()
    model.qkv.weight = parameter(8, 5, loader=model.qkv.weight.weight_loader)
    assert sender.sync(loader, draw(shapes, 3)).replayed_params == 0
    assert_same(model, reference(lambda: qkv()[0], draw(shapes, 3)))


def test_other_names_drop_the_plan() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    assert sender.sync(loader, draw(shapes, 3), digest="others").replayed_params == 0
    assert sender.sync(loader, draw(shapes, 4), digest="others").replayed_params == 2


def test_the_plan_can_be_dropped() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    for seed in (1, 2):
        sender.sync(loader, draw(shapes, seed))
    loader.drop("asleep")
    assert sender.sync(loader, draw(shapes, 3)).replayed_params == 0


def test_an_aborted_first_sync_teaches_nothing_and_leaves_the_model_whole() -> None:
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    before = {name: param.clone() for name, param in model.named_parameters()}
    loader.start("names:1")
    loader.load(0, sender.buckets[0], keep_alive=False)
    loader.abort()
    loader.abort()
    assert_same(model, before)
    for seed in (1, 2):
        counts = sender.sync(loader, draw(shapes, seed))
        assert_same(model, reference(lambda: qkv()[0], draw(shapes, seed)))
    assert counts.replayed_params == 2


def test_memory_of_incoming_copies_is_let_go_during_the_first_sync() -> None:
    """A first sync must not hold a second model: copies go when their layer is done."""
    model, shapes = qkv()
    loader, sender = planned(model), Sender(draw(shapes, 1))
    loader.start("names:1")
    copies: list[Any] = []
    incoming = loader._inner.seen
    loader._inner.seen = lambda name, t: (copies.append(weakref.ref(t)), incoming(name, t))
    for k, bucket in enumerate(sender.buckets):
        loader.load(k, bucket, keep_alive=False)
    loader.finish()
    assert copies
    assert not any(copy() is not None for copy in copies)


def test_a_load_before_start_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call start first"):
        planned(qkv()[0]).load(0, [], keep_alive=True)
