"""Would these names fill this model? Answered by vLLM's own loaders, before any data moves.

The dry run puts meta tensors in the place of every parameter, in the shape that vLLM's loaders expect, calls the
model's `load_weights` with meta tensors of the planned shapes, and watches which bytes of which parameter each name
writes. Nothing is allocated or copied, and the model is put back as it was. From the record follow missing, unknown,
overlapping and ill-shaped names, for every model class whose loaders don't look at values.

A model whose loaders cannot run on meta tensors is not refused: the check at the end of the update
(`loader.LayerwiseLoader.finish`) is then all there is, and the log says so.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_ipc.naming import KEEP_DTYPE, Patterns
from fsdp_ipc.vllm_plugin.coverage import Recorder, Target
from fsdp_ipc.vllm_plugin.json_fields import names_text
from fsdp_ipc.vllm_plugin.loader import is_attention, layer_info, without_mtp_check
from fsdp_ipc.vllm_plugin.payload_plan import TensorRow

logger = logging.getLogger(__name__)

ALLOW_MISSING_ENV = "FSDP_IPC_ALLOW_MISSING"
"""Comma-separated patterns of vLLM parameter names that a sync need not fill."""

# A trainer with fp32 masters keeps these in fp32, for servers that hold them so. One that does not rounds them as it
# does when it loads a checkpoint that has them in fp32.
_MAY_BE_ROUNDED = Patterns(KEEP_DTYPE)

MAX_BLAMED = 64
_REAL_BYTES = 1 << 28
_LOOK_BACK = 4


class UnusableError(Exception):
    """The model's loaders cannot run without data; nothing is known about the names."""


@dataclass
class Findings:
    """What a dry run found. All lists hold text that names the tensor or the vLLM parameter."""

    unknown: list[str] = field(default_factory=list)
    misfit: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    overlap: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def error(self) -> str | None:
        """The text of the refusal, or None if the names fill the model."""
        parts = [
            f"{title}: {names_text(found)}"
            for title, found in (
                ("names that vLLM's model does not know", self.unknown),
                ("wrong shapes", self.misfit),
                ("dtypes that vLLM would round (send the dtype that the server runs in)", self.dtype),
                ("sent more than once", self.overlap),
                ("vLLM parameters that would not get all of their weights", self.missing),
            )
            if found
        ]
        return "; ".join(parts) or None


def check(model: nn.Module, buckets: Sequence[Sequence[TensorRow]], *, vllm_config: Any) -> bool:
    """Refuse a plan that would not fill the model.

    Args:
        model: vLLM's model on this worker, whole (no reload open). Unchanged afterwards.
        buckets: The rows that this worker will load, in the same portions.
        vllm_config: vLLM's config, for how the model is split and quantised.

    Returns:
        Whether the dry run worked. If not, only the check at the end of the update is left.

    Raises:
        ValueError: Names are missing, unknown or overlap, or shapes or dtypes are wrong; all are named.
    """
    try:
        findings = examine(model, buckets, vllm_config=vllm_config)
    except UnusableError as error:
        logger.warning(
            "The names of this sync cannot be checked before it, because %s cannot load without data (%s). "
            "Missing weights will be found at its end.",
            type(model).__name__,
            error,
        )
        return False
    if findings.skipped:
        logger.info(
            "vLLM leaves out %d sent tensor(s): %s", len(findings.skipped), names_text(findings.skipped)
        )
    if (text := findings.error()) is not None:
        raise ValueError(f"fsdp_ipc: refused before any data moved; {text}")
    return True


@torch.no_grad()
def examine(model: nn.Module, buckets: Sequence[Sequence[TensorRow]], *, vllm_config: Any) -> Findings:
    """Run the model's loaders on meta tensors and judge what they did.

    Raises:
        UnusableError: The loaders need data, or failed for a reason that no name explains.
    """
    findings = Findings()
    recorder = Recorder()
    with _on_meta(model) as (targets, ties):
        for name, tensor in targets.items():
            recorder.add_target(name, tensor)
        with recorder, without_mtp_check():
            for rows in buckets:
                _load_bucket(model, rows, recorder, findings)
        rows_by_name = {row.name: row for rows in buckets for row in rows}
        _judge_sources(rows_by_name, recorder, findings, vllm_config)
        _judge_targets(model, targets, ties, recorder, findings, vllm_config)
    return findings


def _load_bucket(model: Any, rows: Sequence[TensorRow], recorder: Recorder, findings: Findings) -> None:
    """Hand a bucket to the model as the sync will; on an error find whose it is and go on after it."""
    pending = list(rows)
    while pending:
        handed: list[TensorRow] = []
        try:
            model.load_weights(_incoming(pending, recorder, handed))
            return
        except Exception as error:  # noqa: BLE001  whatever a model's loader raises
            _blame(model, handed[-_LOOK_BACK:], recorder, findings, error)
        if len(findings.unknown) + len(findings.misfit) >= MAX_BLAMED:
            return
        pending = pending[len(handed) :]


def _incoming(
    rows: Sequence[TensorRow], recorder: Recorder, handed: list[TensorRow], *, real: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    for row in rows:
        handed.append(row)
        # Loaders of single numbers read them with `item()`, which needs a value.
        device = "cpu" if real or row.nbytes == row.dtype.itemsize else "meta"
        tensor = torch.empty(row.shape, dtype=row.dtype, device=device)
        if device == "cpu":
            tensor.zero_()
        recorder.add_source(row.name, tensor)
        yield row.name, tensor


def _blame(
    model: Any, suspects: Sequence[TensorRow], recorder: Recorder, findings: Findings, error: Exception
) -> None:
    """Try the tensors handed out last one by one: loaders read ahead, so the last need not be the one.

    Raises:
        UnusableError: None of them fails alone, or one fails for want of data.
    """
    for row in reversed(suspects):
        alone = _try_alone(model, row, recorder, real=False)
        if alone is not None and _wants_data(alone) and row.nbytes <= _REAL_BYTES:
            alone = _try_alone(model, row, recorder, real=True)
            if alone is None:
                return
        if alone is None:
            continue
        if _wants_data(alone) or _fails_without_any(model):
            raise UnusableError(f"{row.name}: {alone}") from alone
        sent = f"{row.name} (sent as {_dtype_name(row.dtype)}{list(row.shape)}; vLLM: {_reason(alone)})"
        if (
            isinstance(alone, KeyError)
            or "no module or parameter" in str(alone)
            or "nested weight" in str(alone)
        ):
            findings.unknown.append(sent)
        else:
            findings.misfit.append(sent)
        return
    raise UnusableError(f"{type(error).__name__}: {error}") from error


def _try_alone(model: Any, row: TensorRow, recorder: Recorder, *, real: bool) -> Exception | None:
    try:
        model.load_weights(_incoming([row], recorder, [], real=real))
    except Exception as error:  # noqa: BLE001  whatever a model's loader raises
        return error
    return None


def _fails_without_any(model: Any) -> bool:
    """Whether the model's loader fails however little it gets, so that no name is to blame."""
    try:
        model.load_weights(iter(()))
    except Exception:  # noqa: BLE001  whatever a model's loader raises
        return True
    return False


def _wants_data(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or "meta tensor" in text or "device meta" in text


def _judge_sources(
    rows: dict[str, TensorRow], recorder: Recorder, findings: Findings, vllm_config: Any
) -> None:
    parallel = vllm_config.parallel_config
    quantized = vllm_config.model_config.quantization is not None
    whole = parallel.tensor_parallel_size == 1 and not parallel.enable_expert_parallel
    blamed = {text.split(" ", 1)[0] for text in (*findings.unknown, *findings.misfit)}
    for name, row in rows.items():
        source = recorder.sources.get(name)
        if source is None or name in blamed:
            continue
        sent = f"{name} (sent as {_dtype_name(row.dtype)}{list(row.shape)}"
        if not recorder.traced(name):
            findings.skipped.append(name)
        elif source.narrowed_to is not None and not _may_be_rounded(row, source.narrowed_to):
            findings.dtype.append(f"{sent}; vLLM stores {_dtype_name(source.narrowed_to)})")
        elif source.broadcast is not None and not (quantized and source.nbytes == row.dtype.itemsize):
            findings.misfit.append(f"{sent}; vLLM would copy {source.broadcast})")
        elif whole and not quantized and source.read_bytes() < source.nbytes:
            # Loaders cut out the part that they expect, so a tensor that is too long goes unnoticed in them.
            used = source.read_bytes() // row.dtype.itemsize
            findings.misfit.append(
                f"{sent}; vLLM would use {used} of {source.nbytes // row.dtype.itemsize} elements)"
            )


def _may_be_rounded(row: TensorRow, to: torch.dtype) -> bool:
    return row.dtype is torch.float32 and to.is_floating_point and row.name in _MAY_BE_ROUNDED


def _judge_targets(
    model: nn.Module,
    targets: dict[str, torch.Tensor],
    ties: dict[str, list[str]],
    recorder: Recorder,
    findings: Findings,
    vllm_config: Any,
) -> None:
    quantized = vllm_config.model_config.quantization is not None
    by_name = {target.name: target for target in recorder.targets.values()}
    allowed = [
        pattern.strip() for pattern in os.environ.get(ALLOW_MISSING_ENV, "").split(",") if pattern.strip()
    ]
    for prefix, layer in model.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name in (*layer._parameters, *layer._buffers)]
        touched = any(
            name in by_name and _was_written(by_name[name], targets[name], recorder) for name in own
        )
        for qualified in own:
            target = by_name.get(qualified)
            if target is None:
                continue
            name = qualified.rpartition(".")[2]
            if not quantized and (clash := target.overlaps()):
                findings.overlap.append(f"{qualified} (by {names_text(sorted(clash))})")
            if any(fnmatch.fnmatchcase(qualified, pattern) for pattern in allowed):
                continue
            if name in layer._buffers and (not touched or name in layer._non_persistent_buffers_set):
                continue
            # Attention scales are recalculated by vLLM from defaults when a checkpoint brings none.
            if is_attention(layer) and "scale" in name:
                continue
            text = _lack(target, targets[qualified], recorder)
            others = [name for name in ties.get(qualified, ()) if name != qualified]
            # Either name of a tie brings the weight for both.
            if text is None or any(_lack(by_name[name], targets[name], recorder) is None for name in others):
                continue
            findings.missing.append(f"{qualified} ({text})")


def _was_written(target: Target, tensor: torch.Tensor, recorder: Recorder) -> bool:
    return bool(target.writes) or bool(recorder.names_of(tensor))


def _lack(target: Target, tensor: torch.Tensor, recorder: Recorder) -> str | None:
    """What a target did not get, as text; None if it got all."""
    if tensor.numel() == 0 or target.approximate:
        return None
    # `param.data = loaded` replaces the storage and is no operation that a dispatch mode sees.
    if recorder.names_of(tensor):
        return None
    if not target.writes:
        return "nothing was sent for it"
    # Padding that the weight's creator declared is never sent.
    declared = getattr(tensor, "weight_loader_numel", tensor.numel())
    expected = min(int(declared), tensor.numel())
    covered = target.covered_bytes() // tensor.element_size()
    if covered >= expected:
        return None
    return f"only {covered} of {expected} elements, from {names_text(sorted(target.names))}"


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, list[str]]]]:
    """Swap every parameter and loadable buffer for one on meta, in the format that loaders expect.

    The formats are those that vLLM recorded when it built the model. Tied parameters get one meta tensor each, as in
    vLLM's reload: only so may the two names of a tie come in different portions.

    Yields:
        The new tensors by qualified name; and for each name of a tie, all the names of that tie.
    """
    saved: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
    targets: dict[str, torch.Tensor] = {}
    owners: dict[int, list[str]] = {}
    ties: dict[str, list[str]] = {}
    root: Any = model
    torchao = getattr(root, "_do_torchao_reload", None)
    try:
        if torchao is not None:
            # With it set, `load_weights` opens a reload of its own.
            root._do_torchao_reload = False
        for prefix, layer in model.named_modules():
            params, buffers = _formats(layer)
            saved.append((layer, dict(layer._parameters), dict(layer._buffers)))
            for live, formats in ((layer._parameters, params), (layer._buffers, buffers)):
                replaced = {}
                for name, format_ in formats.items():
                    qualified = f"{prefix}.{name}" if prefix else name
                    targets[qualified] = replaced[name] = _meta_copy(format_, layer)
                    if (current := live.get(name)) is not None:
                        ties[qualified] = owners.setdefault(id(current), [])
                        ties[qualified].append(qualified)
                if live is layer._parameters:
                    # Parameters that processing made are no part of the loading format.
                    live.clear()
                live.update(replaced)
        yield targets, ties
    finally:
        for layer, params_before, buffers_before in saved:
            layer._parameters.clear()
            layer._parameters.update(params_before)
            layer._buffers.clear()
            layer._buffers.update(buffers_before)
        if torchao is not None:
            root._do_torchao_reload = torchao


def _formats(layer: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What loaders expect to find in a layer: vLLM's record, and what vLLM's reload leaves in place."""
    from vllm.model_executor.model_loader.reload import meta as reload_meta

    in_place = reload_meta.SKIP_TENSORS
    never_loaded = getattr(reload_meta, "SKIP_LOAD_TENSORS", reload_meta.SKIP_TENSORS) - {
        "e_score_correction_bias"
    }
    live_params: dict[str, torch.Tensor] = {
        name: param for name, param in layer._parameters.items() if param is not None
    }
    if type(layer).__name__ in reload_meta.SKIP_MODULES:
        return {}, {}
    params, buffers = layer_info(layer).restore_metadata
    if not params and not buffers:
        return live_params, {}
    return (
        {**params, **{name: param for name, param in live_params.items() if name in in_place - never_loaded}},
        dict(buffers),
    )


def _meta_copy(format_: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """A meta tensor of the same class, layout and attributes, with its own storage and vLLM's original loader."""
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    meta = torch.empty_strided(format_.size(), format_.stride(), dtype=format_.dtype, device="meta")
    meta.__class__ = format_.__class__
    meta.__dict__ = format_.__dict__.copy()
    restore_layer_refs(meta, layer)
    loader = getattr(meta, "weight_loader", None)
    while loader is not None and getattr(loader, "__name__", "") == "online_process_loader":
        # A reload's wrapper, which would start the reload's own bookkeeping.
        loader = loader.__wrapped__
        meta.weight_loader = loader  # type: ignore[attr-defined]
    return meta


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: Exception) -> str:
    """The first sentence: vLLM goes on to list every parameter that it has."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
