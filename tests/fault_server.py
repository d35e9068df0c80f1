"""The strict fake server in a process of its own, so that it can be killed, with faults that can be switched on over HTTP.

What its workers read is told as digests, so that whoever pushed can compare.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import requests
import torch

from tests.fake_server import FakeServer, StockWorker
from tests.native_worker import NativeWorker
from tests.runner import _context
from tests.stock_on_cpu import read_export, stock_uuids

NUM_WORKERS = 2
BOOM = "boom of the server"
_OURS = ("/held", "/fault")
_TRANSFER = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/pause",
    "/resume",
)


def digests(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest of dtype, shape and bytes, by name."""
    told = {}
    for name, tensor in weights.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        told[name] = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data).hexdigest()[:16]
    return told


class _HangingWorker(NativeWorker):
    """Can stand still at a bucket until it is let go."""

    hang_at: int | None = None
    released = threading.Event()

    def before_bucket(self, bucket: int) -> None:
        if bucket == self.hang_at:
            self.released.wait(60)


class FaultyServer(FakeServer):
    """A fake server whose faults are switched over HTTP: POST /fault {"kind", "routes", "after", "worker"}."""

    def __init__(self, backend: str, port: int = 0) -> None:
        self._mode: dict[str, Any] = {}
        self._running = 0
        self._idle = threading.Condition()
        if backend == "ipc":
            super().__init__(version="0.32.0", uuids=stock_uuids(NUM_WORKERS), read=read_export, port=port)
        else:
            workers = [_HangingWorker(index) for index in range(NUM_WORKERS)]
            super().__init__(backend=backend, workers=workers, port=port)

    def fault(self, route: str) -> Callable[[Any], bool] | None:
        mode = self._mode
        if route not in mode.get("routes", ()):
            return None
        if mode["after"] > 0:
            mode["after"] -= 1
            return None
        return {"500": _refuse, "hang": self._hang, "reset": _reset}[mode["kind"]]

    def _hang(self, handler: Any) -> bool:
        _HangingWorker.released.wait(60)
        handler.close_connection = True
        return True

    def handle(self, route: str, query: Any, body: Any) -> Any:
        if route in _OURS:
            return super().handle(route, query, body)
        with self._idle:
            self._running += 1
        try:
            return super().handle(route, query, body)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _do_fault(self, query: Any, body: dict[str, Any]) -> Any:
        """Switch a fault on, or (kind "none") all off, and then wait until nothing runs any more."""
        kind, worker = body["kind"], body.get("worker")
        native = [w for w in self.workers if isinstance(w, _HangingWorker)]
        if kind == "none":
            self._mode = {}
            _HangingWorker.released.set()
            for each in native:
                each.fail_at, each.hang_at, each.delay_s = None, None, 0.0
            with self._idle:
                quiet = self._idle.wait_for(lambda: self._running == 0, 30)
            return {"quiet": quiet}
        _HangingWorker.released.clear()
        if kind == "slow":
            for each in native:
                each.delay_s = 0.05
            if not native:
                self.delay("/update_weights", 0.1, times=3)
        elif worker is not None and native:
            native[worker].fail_at = 1 if kind == "500" else None
            native[worker].hang_at = 1 if kind == "hang" else None
        else:
            self._mode = {
                "kind": kind,
                "routes": body.get("routes") or _TRANSFER,
                "after": body.get("after", 0),
            }
        return {}

    def _do_held(self, query: Any, body: Any) -> Any:
        return {
            "workers": [digests(worker.weights) for worker in self.workers],
            "published": self.published,
            "violations": self.violations,
            "active": self.active,
            "opened": [w.num_opened - w.num_closed for w in self.workers if isinstance(w, NativeWorker)],
            "mapped": [w.num_opens for w in self.workers if isinstance(w, StockWorker)],
        }


def _refuse(handler: Any) -> bool:
    body = f'{{"error": {{"message": "{BOOM}", "type": "InternalServerError", "code": 500}}}}'
    handler.reply(500, body.encode())
    return True


def _reset(handler: Any) -> bool:
    handler.drop()
    return True


class ServerProcess:
    """A `FaultyServer` in a child process.

    Attributes:
        url: Its address, kept over `restart`.
        pid: Its process.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._port = 0
        self.restart()

    def restart(self) -> None:
        """Start it, again if need be, at the same address."""
        self.kill()
        ours, theirs = _context().Pipe()
        self._process = _context().Process(
            target=_serve, args=(theirs, self._backend, self._port), daemon=True
        )
        self._process.start()
        theirs.close()
        assert ours.poll(30), "the fake server did not start"
        self._port = ours.recv()
        self._pipe = ours
        self.url = f"http://127.0.0.1:{self._port}"
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """End it at once, without a chance to clean up."""
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            process.join()
            self._pipe.close()

    def fault(self, **body: Any) -> Any:
        """Switch a fault on or off."""
        return requests.post(f"{self.url}/fault", json=body, timeout=40).json()

    def held(self) -> Any:
        """What its workers hold, and what was wrong."""
        return requests.post(f"{self.url}/held", json={}, timeout=20).json()


def _serve(pipe: Any, backend: str, port: int) -> None:
    with FaultyServer(backend, port) as server:
        pipe.send(server.port)
        with contextlib.suppress(EOFError):
            pipe.recv()
