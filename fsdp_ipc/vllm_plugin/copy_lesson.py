"""One watched sync, and the verdict on each module that it loaded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_ipc.vllm_plugin.copy_memory import Kernel, Piece
from fsdp_ipc.vllm_plugin.copy_proof import is_constant
from fsdp_ipc.vllm_plugin.copy_record import CopyRecorder
from fsdp_ipc.vllm_plugin.copy_replay import CONSTANT, CopyPlan, attention_layers, feeding
from fsdp_ipc.vllm_plugin.hidden_state import StateWatch

__all__ = ["Lesson"]

ATTENTION = "attention derives weights from it"


class Lesson:
    """One sync that is watched."""

    def __init__(self, model: nn.Module, plan: CopyPlan) -> None:
        self._model = model
        self._plan = plan
        self._users: dict[nn.Module, list[Kernel]] = {}
        for kernel in plan.kernels:
            for module, _ in kernel.users:
                self._users.setdefault(module, []).append(kernel)
        self._watch = StateWatch(model, self._users)
        self.recorder = CopyRecorder(plan.kernels)

    def num_loaded(self) -> int:
        """Live tensors that incoming tensors were loaded into."""
        modules = {module for modules in self.recorder.headed.values() for module in modules}
        kernels = {kernel for module in modules for kernel in self._users.get(module, ())}
        return sum(_is_loaded(kernel, self.recorder) for kernel in kernels)

    def conclude(self) -> None:
        """Judge every module that was loaded, and enter the verdicts in the plan."""
        self.recorder.close()
        plan, recorder = self._plan, self.recorder
        names_of: dict[nn.Module, set[str]] = {}
        for name, modules in recorder.headed.items():
            plan.headed[name] = set(modules)
            for module in modules:
                names_of.setdefault(module, set()).add(name)
        plan.strayed.update(recorder.strayed)
        fed = {m for attention in attention_layers(self._model) for m in feeding(attention)}
        live = {k.tensor.untyped_storage().data_ptr() for k in plan.kernels if k.tensor.numel()}
        for module, names in names_of.items():
            before = plan.verdicts.get(module, CONSTANT)
            if plan.learned and before != CONSTANT:
                continue
            plan.verdicts[module] = self._judge(module, names, fed, live)
            for kernel in self._users.get(module, ()):
                pieces = recorder.pieces(kernel)
                if plan.verdicts[module] is None and any(p.name is not None for p in pieces):
                    plan.proven[kernel] = pieces
        plan.settle(self._model)

    def _judge(self, module: nn.Module, names: set[str], fed: set[nn.Module], live: set[int]) -> str | None:
        recorder = self.recorder
        kernels = self._users.get(module, [])
        if module in fed:
            return ATTENTION
        if _moves_experts(module):
            return "expert load balancing moves it"
        if any(not kernel.tensor.numel() for kernel in kernels):
            return "packed outside the parameters"
        strayed = next((recorder.strayed[name] for name in sorted(names) if name in recorder.strayed), None)
        written = [k for k in kernels if _is_loaded(k, recorder)]
        if not written:
            return strayed or "not found in any parameter"
        flaw = next((flaw for kernel in written if (flaw := recorder.flaw(kernel)) is not None), strayed)
        if flaw is not None:
            return flaw
        for user in {user for kernel in written for user, _ in kernel.users}:
            if _processes(user):
                hidden = self._watch.hidden(user, live)
                if hidden is not None:
                    return hidden
        if _processes(module) and any(_proves_little(k, recorder.pieces(k)) for k in written):
            return CONSTANT
        return None


def _is_loaded(kernel: Kernel, recorder: CopyRecorder) -> bool:
    """Whether a reload wrote a live tensor, or left nothing of it."""
    return not kernel.tensor.numel() or recorder.touched(kernel)


def _processes(module: nn.Module) -> bool:
    """Whether the module's quantisation method does anything with loaded weights."""
    method = getattr(module, "quant_method", None)
    process = getattr(type(method), "process_weights_after_loading", None)
    return process is not None and not getattr(process, "__qualname__", "").startswith("QuantizeMethodBase.")


def _proves_little(kernel: Kernel, pieces: Sequence[Piece]) -> bool:
    """Whether reordering a tensor, or a piece of it, would have left the same bits."""
    named = [p for p in pieces if p.name is not None]
    return any(p.constant and p.target.numel > 1 for p in named) or is_constant(kernel.tensor)


def _moves_experts(module: nn.Module) -> bool:
    """Whether experts may be rearranged in place between syncs, so that a slot holds another expert than it did."""
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
    return bool(getattr(module, "enable_eplb", False) or getattr(parallel, "enable_eplb", False))
