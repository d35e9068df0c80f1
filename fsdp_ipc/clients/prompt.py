"""Requests to a server of this host that are written before the call returns, and whose answers come later.

A thread that shares the interpreter with a busy one gets to its work late, so the caller writes; what a sync sends in this
way is small, and goes to a loopback address, over plain HTTP and past every proxy. All else takes `transport`.
"""

from __future__ import annotations

import io
import os
import queue
import select
import socket
import threading
import time
import weakref
from concurrent.futures import Future
from http.client import HTTPConnection, HTTPResponse
from typing import Any, TypeVar

_T = TypeVar("_T")

Answer = tuple[int, str]
"""Status and body."""

_CONNECT_S = 0.05
"""A server of this host takes a connection at once, or its queue is full."""

KEEP_ALIVE_S = 1.0
"""vLLM's server keeps an idle connection for 5 s."""


class PromptSender:
    """Connections to one server, each of which has one request out at most.

    Args:
        host: Loopback address of the server.
        port: Its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._pid = os.getpid()

    def post(
        self, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> Future[Answer]:
        """Write a POST; the answer ends within `timeout_s`, or is a `TimeoutError`.

        Raises:
            OSError: The server takes no connection, or not at once; nothing was sent.
        """
        with self._lock:
            if self._pid != os.getpid():
                # The parent's sockets stay the parent's, and its threads are not here.
                self._connections, self._pid = [], os.getpid()
            connection = next((c for c in self._connections if not c.busy), None)
            if connection is None:
                connection = _Connection()
                self._connections.append(connection)
            connection.busy = True
        return connection.post(self._to, path, body, headers, timeout_s)


class _Connection:
    """A connection, kept for the requests of one sync, which follow each other in milliseconds, and the thread that reads.

    A connection that was idle for longer may be closed by the server just as the next request goes out, and a request
    that was lost in this way must not be sent again; so an idle one is left.
    """

    def __init__(self) -> None:
        self.busy = False
        self._last_used = 0.0
        # In containers of their own, so that the last reference to the client closes the socket and ends the thread.
        self._sockets: list[socket.socket] = []
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_thread = False
        # At the interpreter's exit both go anyway.
        weakref.finalize(self, _let_go, self._sockets, self._jobs, os.getpid()).atexit = False

    def post(
        self, to: tuple[str, int], path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> Future[Answer]:
        """See `PromptSender.post`."""
        deadline = time.monotonic() + timeout_s
        answer: Future[Answer] = Future()
        try:
            if time.monotonic() - self._last_used > KEEP_ALIVE_S or not _is_idle(self._sockets):
                _close(self._sockets)
                self._sockets.append(socket.create_connection(to, timeout=_CONNECT_S))
                self._sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._has_thread:
                threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="fsdp_ipc-http").start()
                self._has_thread = True
        except BaseException:
            self.busy = False
            raise
        request = HTTPConnection(*to)
        request.sock = self._sockets[0]
        request.sock.settimeout(timeout_s)
        try:
            request.request("POST", path, body=body, headers=headers)
        except Exception as error:  # noqa: BLE001  raised again by whoever looks
            _close(self._sockets)
            self.busy = False
            answer.set_exception(error)
            return answer
        self._jobs.put((self, deadline, answer))
        return answer

    def read(self, deadline: float) -> Answer:
        """The answer of the request that is out."""
        response = HTTPResponse(_Until(self._sockets[0], deadline), method="POST")  # type: ignore[arg-type]
        try:
            response.begin()
            status, text = response.status, response.read().decode("utf-8", errors="replace")
        except BaseException:
            _close(self._sockets)
            raise
        finally:
            response.close()
            self._last_used = time.monotonic()
        # After an error vLLM's server closes the connection without saying so.
        if not 200 <= status < 300 or response.will_close:
            _close(self._sockets)
        return status, text


class _Until(io.RawIOBase):
    """A socket to read from until a deadline, and not for a while after every byte."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = sock, deadline

    def makefile(self, *args: Any, **kwargs: Any) -> io.BufferedReader:
        """What `HTTPResponse` asks of a socket."""
        del args, kwargs
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Some bytes, 0 at the end of the stream."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer did not end in time")
        self._socket.settimeout(left)
        return self._socket.recv_into(buffer)


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        connection, deadline, answer = job
        found: Answer | BaseException
        try:
            found = connection.read(deadline)
        except BaseException as error:  # noqa: BLE001  raised again by whoever looks
            found = error
        connection.busy = False  # before the answer is there: who sees it may send the next request
        del job, connection
        settle(answer, found)
        del answer, found


def settle(future: Future[_T], found: _T | BaseException) -> None:
    """End a future with what was found, or with the error."""
    if isinstance(found, BaseException):
        future.set_exception(found.with_traceback(None))  # whose frames hold the future
    else:
        future.set_result(found)


def _is_idle(sockets: list[socket.socket]) -> bool:
    """Whether there is a connection, and nothing to read from it: its end, or what nobody asked for."""
    if not sockets:
        return False
    poll = select.poll()
    poll.register(sockets[0], select.POLLIN)
    return not poll.poll(0)


def _close(sockets: list[socket.socket]) -> None:
    while sockets:
        sockets.pop().close()


def _let_go(sockets: list[socket.socket], jobs: queue.SimpleQueue[Any], pid: int) -> None:
    for each in sockets if pid == os.getpid() else ():  # a shutdown would reach the parent's end, too
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # its server was faster
    _close(sockets)
    jobs.put(None)
