"""A vLLM server beside the trainer: how it is started, watched, and stopped whatever happens.

The server runs under a guard, a small process that holds the read end of a pipe. When the trainer's end closes,
because the job has finished, raised, was signalled or was killed, the guard stops the server and all of its
children. So no exit path of the trainer needs a handler of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import requests

from recipes.checks import check_server
from recipes.config import ServerConfig

_LOOPBACK = "127.0.0.1"
_STOP_GRACE_S = float(os.environ.get("FSDP_IPC_STOP_GRACE_S", "20"))
_TRAINER_ONLY = re.compile(
    # What torchrun and the trainer's allocator put into the environment; in a server each of them misleads.
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|NCCL_ASYNC_ERROR_HANDLING|GLOO_SOCKET_IFNAME"
)


class ServerFailed(RuntimeError):  # noqa: N818 - says what happened, like the built-in ones
    """The server did not start, or died; the message holds the end of its log."""


class Server:
    """A vLLM server that lives no longer than this object and this process.

    Args:
        model_dir: Model to serve; only its configuration and tokenizer are read, the weights are dummies.
        num_replicas: Data-parallel size, one replica a trainer rank.
        config: The server's settings.
        log_path: File that takes everything that the server prints.
        on_gpu: Whether to serve from GPUs.

    Attributes:
        url: Base URL, on the loopback interface unless the settings permit another one.

    Raises:
        ValueError: Settings that cannot work, or an address that other machines can reach without permission.
    """

    def __init__(
        self, model_dir: Path, *, num_replicas: int, config: ServerConfig, log_path: Path, on_gpu: bool
    ) -> None:
        check_server(config, "inference")
        port = free_port(config.host)
        self.url = f"http://{_reachable(config.host)}:{port}"
        self.log_path = log_path
        self._start_timeout_s = config.start_timeout_s
        self._started = time.monotonic()
        argv = server_argv(model_dir, port=port, num_replicas=num_replicas, config=config, on_gpu=on_gpu)
        env = server_env(
            os.environ, num_replicas=num_replicas, config=config, on_gpu=on_gpu, num_cpus=usable_cpus()
        )
        read_end, self._write_end = os.pipe()
        try:
            with log_path.open("w") as log:
                log.write(f"$ {' '.join(argv)}\n")
                log.flush()
                self._guard = subprocess.Popen(
                    [sys.executable, "-m", "recipes.serve", str(read_end), *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**env, "PYTHONPATH": with_root(env.get("PYTHONPATH"))},
                    pass_fds=[read_end],
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it before us
                )
        finally:
            os.close(read_end)

    def wait_healthy(self, progress: Callable[[float, str], None] | None = None) -> None:
        """Block until the server answers.

        Args:
            progress: Called about once a second with the seconds since the start and the log's last line.

        Raises:
            ServerFailed: It died, or the time-out has passed.
        """
        while True:
            elapsed = time.monotonic() - self._started
            self.check_alive()
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            if elapsed > self._start_timeout_s:
                raise ServerFailed(
                    f"the vLLM server was not healthy after {elapsed:.0f} s (inference.start_timeout_s="
                    f"{self._start_timeout_s:g}); {self._log_story()}"
                )
            if progress is not None:
                progress(elapsed, (log_tail(self.log_path, 1) or [""])[-1])
            time.sleep(1)

    def check_alive(self) -> None:
        """Raise if the server has died.

        Raises:
            ServerFailed: With the end of the log.
        """
        code = self._guard.poll()
        if code is not None:
            raise ServerFailed(f"the vLLM server died with exit code {code}; {self._log_story()}")

    def close(self) -> None:
        """Stop the server and its children, and wait until they are gone. Idempotent."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        self._guard.wait(_STOP_GRACE_S + 15)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _log_story(self) -> str:
        lines = log_tail(self.log_path, 40)
        return f"the end of {self.log_path}:\n" + "\n".join(f"  | {line}" for line in lines)


def server_argv(
    model_dir: Path, *, port: int, num_replicas: int, config: ServerConfig, on_gpu: bool
) -> list[str]:
    """Build the server's command line. Pure.

    The module is started and not the console script: that of the CPU build asks for a distribution named
    `vllm` and fails.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model_dir), "--served-model-name", "policy"]
    argv += ["--host", config.host, "--port", str(port)]
    argv += ["--load-format", "dummy", "--dtype", config.dtype, "--max-model-len", str(config.max_model_len)]
    argv += ["--data-parallel-size", str(num_replicas), "--max-num-seqs", str(config.max_num_seqs)]
    argv += ["--weight-transfer-config", json.dumps({"backend": config.backend}, separators=(",", ":"))]
    if config.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if config.enforce_eager:
        argv += ["--enforce-eager"]
    if on_gpu:
        argv += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
        argv += ["--enable-sleep-mode"] if config.sleep_mode else []
    return [*argv, *config.extra_args]


def server_env(
    environ: Mapping[str, str], *, num_replicas: int, config: ServerConfig, on_gpu: bool, num_cpus: int
) -> dict[str, str]:
    """Derive the server's environment from the trainer's. Pure.

    Args:
        environ: The trainer's environment.
        num_replicas: Data-parallel size.
        config: The server's settings.
        on_gpu: Whether to serve from GPUs.
        num_cpus: Processor cores to share among the replicas of a CPU server.

    Returns:
        The whole environment of the server.
    """
    env = {name: value for name, value in environ.items() if not _TRAINER_ONLY.fullmatch(name)}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if name in env:
            kept = without_expandable_segments(env.pop(name))
            if kept:
                env[name] = kept
    # The routes of weight transfer exist in development mode only; without permission the server listens on the
    # loopback alone.
    env["VLLM_SERVER_DEV_MODE"] = "1"
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["VLLM_HOST_IP"] = _LOOPBACK
    env.setdefault("HF_HUB_OFFLINE", "1")
    if config.backend == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the stock back end unpickles its handles
    else:
        env.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    if "VLLM_PLUGINS" in env and config.backend == "fsdp_ipc":
        wanted = [name for name in env["VLLM_PLUGINS"].split(",") if name]
        env["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*wanted, "fsdp_ipc"]))
    if on_gpu:
        visible = visible_devices(config.devices, environ.get("CUDA_VISIBLE_DEVICES"))
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        env.pop("OMP_NUM_THREADS", None)  # torchrun's 1 is meant for its own ranks
    else:
        # Replicas bound to cores would all be bound to the same ones where there are few.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(max(1, num_cpus // max(1, num_replicas)))
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env


def without_expandable_segments(conf: str) -> str:
    """Drop `expandable_segments` from an allocator setting; it is at odds with the server's sleep mode.

    Args:
        conf: Value of `PYTORCH_CUDA_ALLOC_CONF`, for example `"expandable_segments:True,max_split_size_mb:64"`.

    Returns:
        The other options, as they were.
    """
    # Commas inside brackets, as in `roundup_power2_divisions:[64:8,256:4]`, separate no options.
    options = re.split(r",(?![^\[]*\])", conf)
    return ",".join(o for o in options if o.strip() and o.split(":")[0].strip() != "expandable_segments")


def visible_devices(requested: Any, parent: str | None) -> str | None:
    """Name GPUs for a child's `CUDA_VISIBLE_DEVICES`. Pure.

    An index counts among the GPUs that this process sees, as torch counts them: under a parent pinned to
    `4,5,6,7`, index 1 is GPU 5. The child must get that absolute name.

    Args:
        requested: An index, a UUID, a comma-separated text of these, or (nested) lists of them; None: all.
        parent: `CUDA_VISIBLE_DEVICES` of this process.

    Returns:
        The value for the child, or None to leave it unset.

    Raises:
        ValueError: A device that this process does not see, one named twice, or an empty request.
    """
    if requested is None:
        return parent
    seen = None if parent is None else [entry.strip() for entry in parent.split(",") if entry.strip()]
    chosen = [_resolve(device, seen) for device in _flatten(requested)]
    if not chosen:
        raise ValueError(f"devices={requested!r} names no device")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"devices={requested!r} names a device twice: {chosen}")
    return ",".join(chosen)


def _flatten(requested: Any) -> list[str]:
    if isinstance(requested, str):
        return [part.strip() for part in requested.split(",") if part.strip()]
    if isinstance(requested, Sequence):
        return [device for entry in requested for device in _flatten(entry)]
    if isinstance(requested, bool) or not isinstance(requested, int):
        raise ValueError(f"device {requested!r}: expected an index, a UUID or lists of them")
    return [str(requested)]


def _resolve(device: str, seen: list[str] | None) -> str:
    if device.lstrip("-").isdigit():
        index = int(device)
        if index < 0 or (seen is not None and index >= len(seen)):
            raise ValueError(
                f"device {index} is not among the {len(seen or [])} that this process sees: {seen}"
            )
        return device if seen is None else seen[index]
    if seen is None or all(entry.isdigit() for entry in seen):
        return device  # a UUID under a parent that speaks of indices: only the driver could compare them
    # CUDA takes any unambiguous beginning of a UUID.
    matches = [entry for entry in seen if entry.startswith(device) or device.startswith(entry)]
    if len(matches) != 1:
        raise ValueError(f"device {device!r} matches {len(matches)} of those that this process sees: {seen}")
    return matches[0]


def free_port(host: str = _LOOPBACK) -> int:
    """Find a port of an interface, by its address, that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _reachable(host: str) -> str:
    """The address to put into a URL for what listens on `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - permitted by the settings
        return socket.gethostbyname(socket.gethostname())
    return f"[{host}]" if ":" in host else host


def usable_cpus() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def log_tail(path: Path, num_lines: int) -> list[str]:
    """Read the last lines of a log, without terminal colours.

    Args:
        path: The log.
        num_lines: Most lines to return; empty ones do not count.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return [line for line in plain.splitlines() if line.strip()][-num_lines:]


def with_root(pythonpath: str | None) -> str:
    """Put the folder above `recipes` first on a `PYTHONPATH`, for processes that import them."""
    root = str(Path(__file__).resolve().parent.parent)
    return root if not pythonpath else f"{root}{os.pathsep}{pythonpath}"


def guard(read_end: int, argv: Sequence[str]) -> int:
    """Run the server until it exits or the trainer's end of the pipe closes; then stop its whole session.

    Returns:
        The server's exit code, or 0 if it was stopped.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)  # whoever signals us signals the trainer too, and the pipe tells
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True)
    code: int | None = None
    try:
        while (code := server.poll()) is None:
            if select.select([read_end], [], [], 0.2)[0]:
                return 0
        return code
    finally:
        _stop_session(server)


def _stop_session(server: subprocess.Popen[bytes]) -> None:
    # The engines are children in the server's own session; asked first, so that they can free what they hold.
    if server.poll() is None:
        server.terminate()
    deadline = time.monotonic() + _STOP_GRACE_S
    while time.monotonic() < deadline and (server.poll() is None or _session_members(server.pid)):
        time.sleep(0.1)
    for pid in _session_members(server.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.wait()


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry.name))
    return members


if __name__ == "__main__":
    raise SystemExit(guard(int(sys.argv[1]), sys.argv[2:]))
