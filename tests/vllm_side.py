"""Runs vLLM's own weight-transfer code of a given release in a process of its own, on CPU, without the rest of vLLM.

The unpacked files of a wheel (`tests.vllm_wheels`) are imported as they are; every other `vllm` module that they ask
for is an empty stand-in. For the installed vLLM nothing is replaced but CUDA: `rebuild_cuda_tensor` maps the file that
a handle names, and a GPU's UUID is whatever the test says.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import pickle
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

INSTALLED = "installed"
_REAL = ("vllm.distributed.weight_transfer", "vllm.model_executor.model_loader.reload")
_ROOT = Path(__file__).resolve().parent.parent


class Side:
    """The parent's end: calls functions of `tests.vllm_contracts` in the side process.

    Args:
        root: Folder of an unpacked wheel, or `INSTALLED`.
        env: Further environment of the side process.
    """

    def __init__(self, root: Path | str, env: dict[str, str] | None = None) -> None:
        paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_side", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})},
            cwd=_ROOT,
        )

    def call(self, function: str, *args: Any) -> Any:
        """Call a function there; what it raises is raised here as an AssertionError with its traceback."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((function, args), self._process.stdin)
        self._process.stdin.flush()
        try:
            ok, result = pickle.load(self._process.stdout)
        except EOFError:
            raise AssertionError(f"the side process died with code {self._process.wait()}") from None
        if not ok:
            raise SideError(result)
        return result

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            # The interpreter of a real vLLM may be slow to leave; nothing of it is needed any more.
            self._process.kill()
            self._process.wait()


class SideError(AssertionError):
    """Something raised in the side process; the message is its traceback."""


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the real files below `root`, and empty modules for all else of vLLM."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm" and not fullname.startswith("vllm."):
            return None
        if fullname.startswith(_REAL):
            base = self.root.joinpath(*fullname.split("."))
            if base.is_dir():
                return importlib.util.spec_from_file_location(
                    fullname, base / "__init__.py", submodule_search_locations=[str(base)]
                )
            return importlib.util.spec_from_file_location(fullname, base.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(_contents(module.__name__))


class _Stub(types.ModuleType):
    """A module in which every name is a class without anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__name__ == "vllm":
            raise AttributeError(name)
        if self.__name__ == "vllm.envs":
            return os.environ.get(name) == "1"
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def _contents(name: str) -> dict[str, Any]:
    if name == "vllm.logger":
        return {"init_logger": _logger}
    if name == "vllm.model_executor.model_loader.weight_utils":
        return {"default_weight_loader": _load}
    if name == "vllm.model_executor.layers.attention":
        return {"is_deferred_attention_layer": lambda layer: False}
    if name == "vllm.model_executor.model_loader.mtp_validation":
        return {"disable_mtp_completeness_check": contextlib.nullcontext}
    return {}


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.warning_once = logger.info_once = logger.debug  # type: ignore[attr-defined]
    return logger


def _load(param: Any, loaded: Any) -> None:
    """What vLLM's default loader does: same shape, or one element each."""
    if param.numel() == loaded.numel() == 1:
        param.data.copy_(loaded.view(param.shape))
        return
    assert param.shape == loaded.shape, f"{tuple(param.shape)} != {tuple(loaded.shape)}"
    param.data.copy_(loaded)


def _install(root: str) -> None:
    for name, substitute in (("ray", None), ("pybase64", "base64"), ("requests", None)):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = importlib.import_module(substitute) if substitute else types.ModuleType(name)
    if root != INSTALLED:
        sys.meta_path.insert(0, _Stubs(Path(root)))


@contextlib.contextmanager
def _own_stdout() -> Iterator[Any]:
    """The pipe for answers; what anyone prints goes to stderr."""
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)
        yield pipe


def main() -> None:
    """Serve calls until the parent closes the pipe."""
    with _own_stdout() as pipe:
        _install(sys.argv[1])
        from tests import vllm_contracts

        while True:
            try:
                function, args = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer: Any = (True, getattr(vllm_contracts, function)(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            pickle.dump(answer, pipe)
            pipe.flush()


if __name__ == "__main__":
    main()
