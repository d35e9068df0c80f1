"""Fused experts (`mlp.experts.gate_up_proj`, one 3-D tensor a layer) and the per-expert tensors of checkpoints.

transformers' own models need nothing of this: their conversion unfuses them (`conversion`). It is for modules of
one's own with such tensors, and for servers that want them fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_ipc.recipe import Emit, ParamRecipe, view_emit

_FUSED = re.compile(
    r"^(?P<stem>(?:.*\.)?experts)\.(?P<kind>gate_up_proj|down_proj)(?P<leaf>_bias|\.bias|\.weight|)$"
)
_PER_EXPERT = re.compile(r"^(?P<stem>(?:.*\.)?experts)\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """How fused expert tensors hold gate and up, and what the per-expert tensors are called.

    Attributes:
        interleaved: Gate and up rows alternate (gate first), instead of gate in the first half, up in the second.
        transposed: Each expert's matrix is `[in, out]` and not `[out, in]`.
        names: Per-expert names of gate, up and down.
    """

    interleaved: bool = False
    transposed: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


HALVES = ExpertLayout()
"""Qwen-MoE, Mixtral, DeepSeek: `[experts, 2 * features, hidden]`, gate rows first."""
INTERLEAVED = ExpertLayout(interleaved=True, transposed=True)
"""gpt-oss: `[experts, hidden, 2 * features]`, gate and up alternate along the last dim."""


def is_fused(name: str) -> bool:
    """Whether this is the name of a fused expert tensor."""
    return _FUSED.match(name) is not None


def unfuse(name: str, shape: Sequence[int], layout: ExpertLayout) -> ParamRecipe:
    """Per-expert tensors of the fused tensor `name`.

    Contiguous slices, without a transform, unless `layout` is transposed or interleaved.

    Raises:
        ValueError: if it is no fused expert tensor, or its shape does not fit.
    """
    match = _FUSED.match(name)
    if match is None:
        raise ValueError(
            f"{name} is no fused expert tensor; expected ...experts.gate_up_proj or ...experts.down_proj"
        )
    is_bias = match["leaf"].endswith("bias")
    if len(shape) != (2 if is_bias else 3):
        raise ValueError(
            f"{name}: expected {2 if is_bias else 3} dims with experts first, got shape {tuple(shape)}"
        )
    gate_up = match["kind"] == "gate_up_proj"
    experts = shape[0]
    # A bias has one feature dim; seen as [out, 1] it follows the same arithmetic, the 1 dropped at the end.
    out, hidden = (
        (shape[1], 1) if is_bias else (shape[2], shape[1]) if layout.transposed else (shape[1], shape[2])
    )
    out_step, hidden_step = (1, out) if layout.transposed and not is_bias else (hidden, 1)
    if gate_up and out % 2:
        raise ValueError(
            f"{name}: shape {tuple(shape)} does not split into gate and up; its output size {out} is odd"
        )

    # (name, first output row, number of rows, step between rows)
    parts = [(layout.names[2], 0, out, 1)]
    if gate_up:
        half = out // 2
        first, step = (1, 2) if layout.interleaved else (half, 1)
        parts = [(layout.names[0], 0, half, step), (layout.names[1], first, half, step)]
    leaf = "bias" if is_bias else "weight"
    dims = 1 if is_bias else 2
    emits = tuple(
        view_emit(
            f"{match['stem']}.{expert}.{part}.{leaf}",
            (rows, hidden)[:dims],
            (step * out_step, hidden_step)[:dims],
            expert * out * hidden + row * out_step,
        )
        for expert in range(experts)
        for part, row, rows, step in parts
    )
    return ParamRecipe((name,), emits)


def keep_fused(recipe: ParamRecipe, shape: Sequence[int]) -> ParamRecipe:
    """The recipe that leaves a fused tensor whole where `recipe` unfuses it; else `recipe` itself.

    The name is what the checkpoint calls the experts plus what the training model calls the tensor.
    """
    stems = {match["stem"] if (match := _PER_EXPERT.match(emit.name)) else "" for emit in recipe.emits}
    trained = _FUSED.match(recipe.fqn)
    if trained is None or len(recipe.inputs) != 1 or len(stems) != 1 or not (stem := stems.pop()):
        return recipe
    name = f"{stem}.{trained['kind']}{trained['leaf']}"
    return ParamRecipe(recipe.inputs, (Emit(name, tuple(shape)),))


def check_expert_names(emits: Iterable[Emit]) -> None:
    """Refuse a 3-D tensor under the name of one expert: a server takes it for all experts of the layer.

    Raises:
        ValueError: naming it.
    """
    for emit in emits:
        if len(emit.shape) > 2 and _PER_EXPERT.match(emit.name):
            raise ValueError(
                f"{emit.name} has shape {emit.shape}; one expert's tensor has at most 2 dims. Unfuse it (`experts=`) or "
                "rename it to the fused name"
            )
