"""A second process for tests of the data plane: it runs what it is told and answers over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_STATE: dict[str, Any] = {}


class Peer:
    """A spawned process that calls functions of importable modules, each with its `state` dict first.

    Args:
        env: Set in the process before torch is imported.
    """

    def __init__(self, env: dict[str, str] | None = None) -> None:
        context = mp.get_context("spawn")
        self._conn, theirs = context.Pipe()
        # A spawned process inherits the environment of the moment at which it starts.
        before = {name: os.environ.get(name) for name in env or {}}
        os.environ.update(env or {})
        try:
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Begin a call; `result` waits for it."""
        self._conn.send((fn, args))

    def result(self, timeout_s: float = 60.0) -> Any:
        assert self._conn.poll(timeout_s), "the peer did not answer"
        error, value = self._conn.recv()
        if error is not None:
            raise AssertionError(f"in the peer:\n{error}")
        return value

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.start(fn, *args)
        return self.result()

    def kill(self) -> None:
        """Kill without a chance to clean up; the process stays a zombie until `close`."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End normally, atexit handlers included."""
        with contextlib.suppress(OSError):
            self._conn.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(conn: Any) -> None:
    while True:
        try:
            message = conn.recv()
        except EOFError:
            return
        if message is None:
            return
        fn, args = message
        try:
            conn.send((None, fn(_STATE, *args)))
        except BaseException:
            conn.send((traceback.format_exc(), None))
