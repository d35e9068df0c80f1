"""Several servers at once and the trainers that push into them: started together, stopped whatever happens."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fsdp_ipc.version import __version__
from recipes.config import ServerConfig
from recipes.serve import Server, ServerFailed, free_port, log_tail

ROOT = Path(__file__).resolve().parent.parent.parent


class Clock:
    """The time that a whole run may take."""

    def __init__(self, budget_s: float) -> None:
        self._began, self._budget_s = time.monotonic(), budget_s

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds that are left, at most this many and at least one."""
        return max(1.0, min(at_most, self._began + self._budget_s - time.monotonic()))

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        sys.stdout.write(f"[{time.monotonic() - self._began:6.1f}] {text}\n")
        sys.stdout.flush()


class Results:
    """JSON lines and a count of what went wrong."""

    def __init__(self, path: Path, clock: Clock) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._clock = path, clock
        self.failed: list[str] = []

    def add(self, name: str, good: bool, text: str = "", **more: Any) -> None:
        """Record one outcome, print it at once."""
        self._clock.say(f"{'ok    ' if good else 'FAILED'} {name}  {text}")
        if not good:
            self.failed.append(name)
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, "good": good, "text": text, **more}, default=str) + "\n")

    def merge(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take outcomes over that another process has printed already."""
        self.failed += [str(line["name"]) for line in lines if not line["good"]]
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def exit_code(self) -> int:
        """0 if nothing failed; prints the verdict."""
        self._clock.say(
            "all good" if not self.failed else f"{len(self.failed)} failed: {', '.join(self.failed)}"
        )
        return 1 if self.failed else 0


@dataclass(kw_only=True)
class ServerSpec:
    """One server to start.

    Attributes:
        name: For logs.
        model_dir: Its model.
        backend: Weight-transfer backend.
        replicas: Data-parallel size.
        args: Further command-line arguments; later ones win.
        env: Additions to its environment.
    """

    name: str
    model_dir: Path
    backend: str
    replicas: int = 1
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Fleet:
    """Servers that are started at once and stopped together.

    Args:
        out: Folder for logs.
        clock: The run's time.
        on_gpu: Whether they serve from GPUs.
        common: Command-line arguments of all of them.
    """

    def __init__(self, out: Path, clock: Clock, *, on_gpu: bool, common: Sequence[str] = ()) -> None:
        self._out, self._clock, self._on_gpu, self._common = out, clock, on_gpu, list(common)
        self._stack = ExitStack()
        self._servers: dict[str, Server] = {}
        out.mkdir(parents=True, exist_ok=True)
        ensure_plugin(out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(*self._servers)

    def start(self, spec: ServerSpec) -> None:
        """Start one; it is not waited for."""
        args = [*self._common, *spec.args]
        if self._on_gpu:
            args = ["--kv-cache-memory-bytes", str(1 << 29), "--max-num-batched-tokens", "1024", *args]
        config = ServerConfig(
            backend=spec.backend,
            max_model_len=512,
            gpu_memory_utilization=0.05,
            start_timeout_s=3600,
            extra_args=args,
        )
        before = {name: os.environ.get(name) for name in spec.env}
        os.environ.update(spec.env)
        try:
            self._servers[spec.name] = Server(
                spec.model_dir,
                num_replicas=spec.replicas,
                config=config,
                log_path=self._out / f"server-{spec.name}.log",
                on_gpu=self._on_gpu,
            )
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Wait for all of them; the URLs of those that answer, by name. The others' log ends are printed."""
        deadline = time.monotonic() + timeout_s
        urls: dict[str, str] = {}
        dead: set[str] = set()
        while len(urls) + len(dead) < len(self._servers) and time.monotonic() < deadline:
            for name, server in self._servers.items():
                if name in urls or name in dead:
                    continue
                try:
                    server._start_timeout_s = 0.0  # one look, no waiting
                    server.wait_healthy()
                    urls[name] = server.url
                    self._clock.say(f"server {name} answers")
                except ServerFailed as error:
                    if "was not healthy" not in str(error):
                        dead.add(name)
                        self._clock.say(f"server {name} DIED: {self.tail(name)}")
            time.sleep(1)
        for name in self._servers.keys() - urls.keys() - dead:
            self._clock.say(f"server {name} did not answer in time: {self.tail(name)}")
        return urls

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of a server's log."""
        return "\n" + "\n".join(f"  | {line}" for line in log_tail(self._servers[name].log_path, lines))

    def processes(self, name: str) -> list[int]:
        """All processes of a server, its guard left out."""
        return session_below(self._servers[name]._guard.pid)

    def stop(self, *names: str) -> None:
        """Stop them, all at once."""
        threads = [threading.Thread(target=self._servers.pop(name).close) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def session_below(guard: int) -> list[int]:
    """The processes of the session that the guard of a server has started."""
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    leaders = {pid for pid, fields in stats.items() if int(fields[1]) == guard}
    return [pid for pid, fields in stats.items() if int(fields[3]) in leaders and fields[0] != "Z"]


def missing_gpu(device: str) -> str | None:
    """Why a run on this kind of device is not possible here, or None."""
    if device != "cuda":
        return None
    import torch

    return (
        None
        if torch.cuda.is_available()
        else "needs a CUDA GPU; this machine has none (--device cpu runs at toy size)"
    )


def ensure_plugin(out: Path) -> None:
    """Let servers find our plugin where the package is on the path but not installed.

    vLLM finds plugins by the metadata of installed packages; here a folder with that metadata goes onto the path.
    """
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    known = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(entry.name == "fsdp_ipc" for entry in known):
        return
    folder = out / "plugin" / f"fsdp_ipc-{__version__}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fsdp-ipc\nVersion: {__version__}\n")
    (folder / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfsdp_ipc = fsdp_ipc.vllm_plugin:register\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder.parent.resolve()), os.environ["PYTHONPATH"]])


def run_tasks(
    name: str,
    tasks: Sequence[dict[str, Any]],
    options: Any,
    out: Path,
    clock: Clock,
    results: Results,
    *,
    ranks: int,
    replicas: int = 1,
    outsider: bool = False,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run tasks of `tests.gpu.trainer` on some ranks; tasks whose servers are not there count as failed.

    Args:
        name: For files.
        tasks: See `tests.gpu.trainer`.
        options: The command line's, for `device` and `child_timeout`.
        out: Folder for logs.
        clock: The run's time.
        results: Where the outcomes go.
        ranks: Trainer ranks.
        replicas: Data-parallel size of the servers.
        outsider: One more rank, without a GPU, that is no member of the trainer group.
        env: Additions to the trainer's environment.
    """
    able = []
    for task in tasks:
        if task.get("url") and task.get("reference", "-"):
            able.append(task)
        else:
            results.add(task["name"], False, "its server is not there")
    if not able:
        return
    outcomes = out / f"tasks-{name}.jsonl"
    timeout_s = clock.left(options.child_timeout)
    spec = {"tasks": able, "results": str(outcomes), "device": options.device, "replicas": replicas}
    spec |= {"budget_s": timeout_s, "outsider": outsider}
    path = out / f"tasks-{name}.json"
    path.write_text(json.dumps(spec, indent=1))
    count = ranks + outsider
    code = torchrun(
        count, "tests.gpu.trainer", [str(path)], log=out / f"trainer-{name}.log", timeout_s=timeout_s, env=env
    )
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    results.merge(lines)
    if not lines or (code != 0 and all(line["good"] for line in lines)):
        results.add(f"trainer {name}", False, f"exit code {code}, {len(lines)} outcomes")


def launch(ranks: int, module: str, args: Sequence[str], *, log: Path, timeout_s: float) -> list[int]:
    """Run a module on ranks that nobody watches over: when one dies the others are left to find out by themselves.

    Returns:
        Exit codes by rank; -9 for those that were still running when time was up.
    """
    port, children = free_port(), []
    for rank in range(ranks):
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with log.with_suffix(f".{rank}.log").open("w") as file:
            argv = [sys.executable, "-m", module, *args]
            children.append(
                subprocess.Popen(
                    argv,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + timeout_s
    codes = []
    for child in children:
        try:
            codes.append(child.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            codes.append(-9)
    return codes


def torchrun(
    ranks: int,
    module: str,
    args: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a module under torchrun, showing its output as it comes. Killed with all its ranks when time is up.

    Returns:
        The exit code; -9 if it was killed.
    """
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    argv += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", module, *args]
    child_env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
    child = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**child_env, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )

    def copy() -> None:
        assert child.stdout is not None
        with log.open("a") as file:
            file.write(f"$ {' '.join(argv)}\n")
            for line in child.stdout:
                file.write(line)
                file.flush()
                sys.stdout.write(f"    {line}")
                sys.stdout.flush()

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        sys.stdout.write(f"    time is up after {timeout_s:.0f} s\n")
        return -9
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                break
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                continue
        reader.join(5)
