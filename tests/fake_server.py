"""A strict stand-in for vLLM's HTTP server: the same routes and states, checks that are stricter, faults on demand.

It enforces init, start, update*, finish and the payloads of each release of the stock `ipc` backend, keeps a list of
what was wrong (`violations`), and can be told to fail a route. Workers of another backend are plugged in as objects.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import torch

from fsdp_ipc.wire.stock import dialect_for
from tests.fake_worker import UUIDS, AnyWorker, EngineWorker, StockWorker, Worker, fake_rebuild_args

__all__ = ["UUIDS", "AnyWorker", "EngineWorker", "FakeServer", "StockWorker", "Worker", "fake_rebuild_args"]

_NO_BODY = object()


@dataclass
class _Fault:
    act: Callable[[Any], bool]
    after: int
    times: int


class FakeServer:
    """A server on a free port of the loopback, in threads of this process; a context manager.

    Args:
        version: vLLM's release, as `/version` gives it.
        backend: Configured weight-transfer backend, or None for a server without one.
        uuids: GPU of each worker of the stock backend.
        workers: Workers of any backend instead; their order is the index of list payloads.
        read: Passed to the stock workers.
        dev_mode: `VLLM_SERVER_DEV_MODE`.
        allow_insecure: `VLLM_ALLOW_INSECURE_SERIALIZATION`.
        data_parallel_size: Replicas among which the workers are divided.
        sleep_mode: `--enable-sleep-mode`.
        port: Port of the loopback; 0 takes a free one.
    """

    def __init__(
        self,
        *,
        version: str = "0.32.0",
        backend: str | None = "ipc",
        uuids: Sequence[str] = UUIDS[:1],
        workers: Sequence[Worker] | None = None,
        read: Callable[[tuple[Any, ...]], torch.Tensor] | None = None,
        dev_mode: bool = True,
        allow_insecure: bool = True,
        data_parallel_size: int = 1,
        sleep_mode: bool = True,
        port: int = 0,
    ) -> None:
        self.version, self.backend, self.dev_mode = version, backend, dev_mode
        self.data_parallel_size, self.sleep_mode = data_parallel_size, sleep_mode
        self.dialect = dialect_for(version)
        self.workers: list[Any] = list(
            workers
            if workers is not None
            else [StockWorker(self.dialect, uuid, read, allow_insecure) for uuid in uuids]
            if backend == "ipc"
            else [AnyWorker()]
        )
        self.calls: list[tuple[str, Any]] = []
        self.initialized = self.active = self.paused = False
        self.asleep: set[str] = set()
        self.log_stats = True
        self.weight_version = "default"
        self.published: list[str] = []
        self.num_cache_resets = 0
        self.cache_reset_answer: Any = _NO_BODY if self.dialect.first < (0, 32) else {"success": True}
        self.checksums: dict[str, str] = {}
        self.parallel_config: dict[str, Any] = {}
        self._violations: list[str] = []
        self._faults: dict[str, list[_Fault]] = {}
        self._lock = threading.Lock()
        # vLLM's engine does one call after the other: a finish that comes while a start runs waits for it.
        self._engine = threading.Lock()
        self.closing = threading.Event()
        self._http = _Server(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; requests that hang are dropped."""
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def violations(self) -> list[str]:
        """What was wrong in the order of calls or in the payloads, beyond what a real server refuses."""
        return self._violations + [text for w in self.workers for text in getattr(w, "violations", [])]

    @property
    def routes(self) -> list[str]:
        """Routes that were called, in order, without those that only ask."""
        quiet = (
            "/version", "/server_info", "/get_world_size", "/is_sleeping", "/is_paused", "/health", "/metrics",
        )  # fmt: skip
        return [route for route, _ in self.calls if route not in quiet]

    # Faults. `after` calls of the route go through, then `times` calls fail (-1: all).

    def answer(
        self,
        route: str,
        status: int,
        body: str = "",
        *,
        content_type: str = "application/json",
        after: int = 0,
        times: int = -1,
    ) -> None:
        """Answer a route with this instead of doing anything."""

        def act(handler: Any) -> bool:
            handler.reply(status, body.encode(), content_type)
            return True

        self._add(route, act, after, times)

    def fail(
        self, route: str, text: str = "boom", *, status: int = 500, after: int = 0, times: int = 1
    ) -> None:
        """Fail a route with vLLM's JSON error."""
        self.answer(route, status, json.dumps(_error(text, status)), after=after, times=times)

    def hang(self, route: str, *, after: int = 0, times: int = -1) -> None:
        """Never answer a route."""

        def act(handler: Any) -> bool:
            self.closing.wait()
            return True

        self._add(route, act, after, times)

    def reset(self, route: str, *, after: int = 0, times: int = 1) -> None:
        """Reset the connection instead of answering."""

        def act(handler: Any) -> bool:
            handler.drop()
            return True

        self._add(route, act, after, times)

    def delay(self, route: str, seconds: float, *, after: int = 0, times: int = -1) -> None:
        """Wait before a route does its work."""

        def act(handler: Any) -> bool:
            self.closing.wait(seconds)
            return False

        self._add(route, act, after, times)

    def _add(self, route: str, act: Callable[[Any], bool], after: int, times: int) -> None:
        with self._lock:
            self._faults.setdefault(route, []).append(_Fault(act, after, times))

    def fault(self, route: str) -> Callable[[Any], bool] | None:
        """The fault that this call meets, if any."""
        with self._lock:
            for fault in self._faults.get(route, []):
                if fault.after > 0:
                    fault.after -= 1
                elif fault.times != 0:
                    fault.times -= 1
                    return fault.act
        return None

    # What the routes do. Returns the JSON of the answer, or _NO_BODY.

    def handle(self, route: str, query: dict[str, list[str]], body: Any) -> Any:
        """Do what a route does; what this raises becomes the answer."""
        if route == "/version":
            return {"version": self.version}
        if route == "/health":
            return _NO_BODY
        if not self.dev_mode or not self._exists(route):
            raise _HttpError(404, "Not Found")
        action = getattr(self, "_do" + route.replace("/", "_"), None)
        if action is None:
            raise _HttpError(404, "Not Found")
        return action(query, body)

    def _exists(self, route: str) -> bool:
        if route in ("/update_weight_version", "/weight_info"):
            return self.dialect.weight_version
        return route != "/weight_checker" or self.dialect.checksums

    def _do_server_info(self, query: Any, body: Any) -> Any:
        transfer = None if self.backend is None else {"backend": self.backend}
        parallel = {
            "world_size": len(self.workers) // self.data_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "data_parallel_size_local": self.data_parallel_size,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
            **self.parallel_config,
        }
        config = {
            "weight_transfer_config": transfer,
            "parallel_config": parallel,
            "model_config": {"enable_sleep_mode": self.sleep_mode},
        }
        return {"vllm_config": config if query.get("config_format") == ["json"] else str(config)}

    def _do_get_world_size(self, query: Any, body: Any) -> Any:
        return {"world_size": len(self.workers)}

    def _do_init_weight_transfer_engine(self, query: Any, body: Any) -> Any:
        if not isinstance(body, dict) or not isinstance(body.get("init_info"), dict):
            raise _HttpError(400, "Missing 'init_info' in request body")
        self._need_backend()
        self._each(lambda worker: worker.init(body["init_info"]))
        self.initialized = True
        return {"message": "Weight transfer initialized"}

    def _do_start_weight_update(self, query: Any, body: Any) -> Any:
        with self._engine:
            return self._start(body)

    def _start(self, body: Any) -> Any:
        if self.dialect.start_takes_body and not isinstance(body, dict):
            raise _HttpError(400, "Invalid JSON format")
        self._need_backend()
        if not self.initialized:
            self._violations.append("start without init")
            raise RuntimeError("start_weight_update before init_weight_transfer_engine")
        if self.active:
            self._violations.append("start while an update is active")
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        self._each(lambda worker: worker.start())
        self.active = True
        return {"message": "Weight update started"}

    def _do_update_weights(self, query: Any, body: Any) -> Any:
        info = body.get("update_info") if isinstance(body, dict) else None
        if info is None:
            raise _HttpError(400, "Missing 'update_info' in request body")
        self._need_backend()
        if not self.active:
            if not (isinstance(info, dict) and "abort" in info):  # which a sender may send to be sure
                self._violations.append("update outside start and finish")
            raise RuntimeError("start_weight_update must be called before update_weights.")
        if "weights" in self.asleep:
            self._violations.append("update while the server sleeps: a real one dies")
            self.closing.wait()
        if isinstance(info, list) and not self.dialect.list_payload:
            raise ValueError("update_info: Input should be a valid dictionary")
        try:
            self._each(
                lambda worker, index: worker.update(info[index] if isinstance(info, list) else info), True
            )
        except BaseException:
            # Only 0.22 leaves the session as it is.
            self.active = self.version.startswith("0.22.")
            raise
        return {"message": "Weights updated"}

    def _do_finish_weight_update(self, query: Any, body: Any) -> Any:
        with self._engine:
            return self._finish(body)

    def _finish(self, body: Any) -> Any:
        self._need_backend()
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        version = body.get("weight_version") if isinstance(body, dict) else None
        if version is not None and not self.dialect.weight_version:
            self._violations.append(f"weight_version was sent to vLLM {self.version}, which drops it")
            version = None
        self._each(lambda worker: worker.finish())
        self.active = False
        if version is not None:
            self._publish(version)
        return {"message": "Weight update finished"}

    def _do_update_weight_version(self, query: Any, body: Any) -> Any:
        self._publish(body["new_version"])
        return {"success": True, "new_version": self.weight_version}

    def _do_weight_info(self, query: Any, body: Any) -> Any:
        return {"weight_version": self.weight_version}

    def _do_weight_checker(self, query: Any, body: Any) -> Any:
        return {"checksums": self.checksums}

    def _do_pause(self, query: Any, body: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    def _do_resume(self, query: Any, body: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def _do_is_paused(self, query: Any, body: Any) -> Any:
        return {"is_paused": self.paused}

    def _do_sleep(self, query: Any, body: Any) -> Any:
        self.asleep = {"weights", "kv_cache"}
        return _NO_BODY

    def _do_wake_up(self, query: Any, body: Any) -> Any:
        self.asleep -= set(query.get("tags", self.asleep))
        if not self.asleep:
            self.paused = False
        return _NO_BODY

    def _do_is_sleeping(self, query: Any, body: Any) -> Any:
        # Also true while it is only paused, and until the last part is awake.
        return {"is_sleeping": self.paused or bool(self.asleep)}

    def sleep_metrics(self) -> str:
        """The sleep state as vLLM's metrics tell it; releases before 0.29 take any waking for all of it."""
        partly = bool(self.asleep) if self.dialect.first >= (0, 29) else "weights" in self.asleep
        lines = [
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{state}"}} {float(value)}'
            for state, value in (("awake", not partly), ("weights_offloaded", partly), ("discard_all", False))
        ]
        return "\n".join(["# HELP vllm:engine_sleep_state Engine sleep state", *lines, ""])

    def _do_reset_prefix_cache(self, query: Any, body: Any) -> Any:
        self.num_cache_resets += 1
        if self.active:
            self._violations.append("prefix cache reset inside an update")
        return self.cache_reset_answer

    def _publish(self, version: str) -> None:
        self.weight_version = version
        self.published.append(version)

    def _need_backend(self) -> None:
        if self.backend is None:
            raise RuntimeError(
                "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            )

    def _each(self, call: Callable[..., None], indexed: bool = False) -> None:
        """All workers at the same time, as engines of their own; the first error wins."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            jobs = [
                pool.submit(call, worker, index) if indexed else pool.submit(call, worker)
                for index, worker in enumerate(self.workers)
            ]
        for job in jobs:
            job.result()


class _HttpError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _error(text: str, status: int) -> dict[str, Any]:
    return {"error": {"message": text, "type": "InternalServerError", "param": None, "code": status}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed or gave up is what many tests are about, and no news."""


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body: Any = json.loads(data) if data else None
            except ValueError:
                body = None
            with contextlib.suppress(OSError):
                fake.calls.append((parts.path, body))
                fault = fake.fault(parts.path)
                if fault is not None and fault(self):
                    return
                if parts.path == "/metrics":
                    self.reply(200, (fake.sleep_metrics() if fake.log_stats else "").encode(), "text/plain")
                    return
                try:
                    result = fake.handle(parts.path, parse_qs(parts.query), body)
                except _HttpError as error:
                    self.reply(error.status, json.dumps({"detail": str(error)}).encode())
                except Exception as error:
                    self.reply(500, json.dumps(_error(str(error), 500)).encode())
                else:
                    self.reply(200, b"" if result is _NO_BODY else json.dumps(result).encode())

        def reply(self, status: int, data: bytes, content_type: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def drop(self) -> None:
            # Lingering off with a time of 0 makes the close a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
