"""Requests to one or several servers: all servers at once, all or none; and one that need not wait for its answer."""

from __future__ import annotations

import ipaddress
import json
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from fsdp_ipc.clients.base import ServerRequestError, base_url_hint, error_text, hint_for

_T = TypeVar("_T")

_KEEP_ALIVE_S = 1.0
"""vLLM's server keeps an idle connection for 5 s."""

_GRACE_S = 0.2
"""Left to the connection's own time-outs, whose errors say more."""


class HTTPTransport:
    """JSON over HTTP to a fixed set of servers; see `HTTPWeightSyncClient` for the arguments.

    Raises:
        ValueError: No URL, a URL twice, a URL that is not http(s), or a time-out that is not positive.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        request_timeout_s: float = 300.0,
        connect_timeout_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(urls, (str, Sequence)):
            raise TypeError(
                f"urls={urls!r}: expected a server's base URL, e.g. http://127.0.0.1:8000, or a list of them"
            )
        given = [urls] if isinstance(urls, str) else list(urls)
        self.urls: tuple[str, ...] = tuple(url.rstrip("/") for url in given)
        if not self.urls:
            raise ValueError(
                "urls is empty: give the base URL of at least one server, e.g. http://127.0.0.1:8000"
            )
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not the base URL of a server: expected http://host:port")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError(f"a server is named twice in {list(self.urls)}: it would get every update twice")
        if request_timeout_s <= 0 or connect_timeout_s <= 0:
            raise ValueError(
                f"time-outs must be positive, got request_timeout_s={request_timeout_s}, "
                f"connect_timeout_s={connect_timeout_s}"
            )
        self.request_timeout_s = request_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self._headers = dict(headers or {})
        self._lock = threading.Lock()
        self._connections: dict[str, list[_Connection]] = {url: [] for url in self.urls}

    def post(
        self, route: str, body: dict[str, Any] | None = None, params: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """POST to every server.

        Args:
            route: Path, with its slash.
            body: Sent as JSON; None sends no body.
            params: Query.

        Returns:
            The parsed answers, in the order of the URLs.

        Raises:
            ServerRequestError: A server refused or did not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        return self.fan_out(lambda url: self.request(url, "POST", route, data=data, params=params))

    def post_soon(self, route: str, body: dict[str, Any] | None = None) -> Future[None]:
        """POST to every server, and wait for no answer: the request to a single server is written when this returns.

        Args:
            route: Path, with its slash.
            body: Sent as JSON; None sends no body.

        Returns:
            What becomes of it: the error that `post` would raise, or None.
        """
        if len(self.urls) > 1:
            return in_background(lambda: self.post(route, body))
        url, label = self.urls[0], f"POST {route}"
        data = None if body is None else json.dumps(body).encode()
        done: Future[None] = Future()

        def read(answer: Future[_Answer]) -> None:
            try:
                with self._told(url, label):
                    status, text = answer.result()
                _parsed(url, label, route, status, text)
            except BaseException as error:  # noqa: BLE001 - raised again by whoever looks
                done.set_exception(error)
            else:
                done.set_result(None)

        self._begin(url, "POST", route, data, None).add_done_callback(read)
        return done

    def get(self, route: str) -> list[Any]:
        """GET from every server; otherwise as `post`."""
        return self.fan_out(lambda url: self.request(url, "GET", route))

    def fan_out(self, call: Callable[[str], _T]) -> list[_T]:
        """Run `call` for every URL at the same time and wait for all; raise the failures of all as one."""
        results: dict[str, _T] = {}
        errors: dict[str, Exception] = {}

        def run(url: str) -> None:
            try:
                results[url] = call(url)
            except Exception as error:  # noqa: BLE001 - raised again below, in the thread of the caller
                errors[url] = error

        threads = [threading.Thread(target=run, args=(url,), daemon=True) for url in self.urls[1:]]
        for thread in threads:
            thread.start()
        run(self.urls[0])
        for thread in threads:
            thread.join()
        failed = [errors[url] for url in self.urls if url in errors]
        for error in failed:
            if not isinstance(error, ServerRequestError):
                raise error
        refused = [error for error in failed if isinstance(error, ServerRequestError)]
        if len(refused) == 1:
            raise refused[0]
        if refused:
            first, *others = refused
            raise ServerRequestError(
                first.url, first.route, status=first.status, body=first.body, hint=first.hint, others=others
            ) from first
        return [results[url] for url in self.urls]

    def request(
        self,
        url: str,
        method: str,
        route: str,
        *,
        data: bytes | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send one request to one server.

        Returns:
            The parsed JSON of the answer, or None if its body is empty.
        """
        status, text = self.fetch(url, method, route, data=data, params=params)
        return _parsed(url, f"{method} {route}", route, status, text)

    def fetch(
        self,
        url: str,
        method: str,
        route: str,
        *,
        data: bytes | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> tuple[int, str]:
        """Status and body of one request to one server, whatever they are.

        Raises:
            ServerRequestError: No answer came.
        """
        with self._told(url, f"{method} {route}"):
            answer = self._begin(url, method, route, data, params)
            return answer.result(timeout=self.request_timeout_s + _GRACE_S)

    def _begin(
        self, url: str, method: str, route: str, data: bytes | None, params: Mapping[str, Any] | None
    ) -> Future[_Answer]:
        """Write a request to one server; the answer is read in a thread of the connection's."""
        headers = dict(self._headers)
        if data is not None:
            headers["Content-Type"] = "application/json"
        target = f"{route}?{urlencode(params, doseq=True)}" if params else route
        with self._lock:
            kept = self._connections[url]
            # One is enough unless a request goes out while another has not been answered yet.
            connection = next((c for c in kept if not c.busy), None)
            if connection is None:
                connection = _Connection(url, self.connect_timeout_s, self.request_timeout_s)
                kept.append(connection)
            connection.busy = True
        return connection.begin(method, target, data, headers)

    @contextmanager
    def _told(self, url: str, label: str) -> Iterator[None]:
        """Raise what kept a server from answering as a `ServerRequestError`."""
        try:
            yield
        except TimeoutError as error:
            raise ServerRequestError(
                url,
                label,
                status=None,
                body=f"timed out after {self.request_timeout_s:g} s ({type(error).__name__})",
                hint="raise request_timeout_s if the server is only slow; see the server's log otherwise",
            ) from error
        except (HTTPException, OSError) as error:
            body = f"{type(error).__name__}: {error}"
            hint = "is the server up, and is this its address?"
            raise ServerRequestError(url, label, status=None, body=body, hint=hint) from error


def in_background(call: Callable[[], object]) -> Future[None]:
    """Run a call in a thread of its own."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever looks
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, daemon=True, name="fsdp_ipc-call").start()
    return done


def _parsed(url: str, label: str, route: str, status: int, text: str) -> Any:
    """The JSON of an answer, None for an empty one.

    Raises:
        ServerRequestError: It is not one of success, or no JSON.
    """
    if not 200 <= status < 300:
        raise ServerRequestError(
            url,
            label,
            status=status,
            body=error_text(text),
            hint=base_url_hint(url, route, status) or hint_for(status, text),
        )
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerRequestError(
            url,
            label,
            status=status,
            body=error_text(text, limit=400),
            hint="expected JSON or an empty body: this address is not a vLLM server's, or a proxy answered for it",
        ) from error


_Answer = tuple[int, str]


class _Connection:
    """A connection to one server, kept for the requests of one sync, which follow each other in milliseconds.

    A connection that was idle for longer may be closed by the server just as the next request goes out, and a request
    that was lost in this way must not be sent again; so an idle one is left. The caller writes a request, since a thread
    that shares the interpreter with a busy one gets to it late. Answers are read in a thread: a socket's time-out starts
    anew with every byte, and a thread that gets no end of an answer can be left behind, with its connection.
    """

    def __init__(self, url: str, connect_s: float, read_s: float) -> None:
        self._url, self._path = url, urlsplit(url).path
        self._connect_s, self._read_s = connect_s, read_s
        self.busy = False
        self._last_used = 0.0
        # In containers of their own, so that the last reference to the client closes the socket and ends the thread.
        self._open: list[HTTPConnection] = []
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_thread = False
        weakref.finalize(self, _let_go, self._open, self._jobs)

    def begin(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> Future[_Answer]:
        """Write a request; `busy` is false again before its status and body, or its error, are there."""
        answer: Future[_Answer] = Future()
        try:
            self._write(method, target, data, headers)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever looks
            self._end(keep=False)
            answer.set_exception(error)
            return answer
        if not self._has_thread:
            threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="fsdp_ipc-http").start()
            self._has_thread = True
        self._jobs.put((self._read, answer))
        return answer

    def _write(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> None:
        if time.monotonic() - self._last_used > _KEEP_ALIVE_S or (self._open and _has_ended(self._open[0])):
            self._drop()
        if not self._open:
            connection, self._path = _connect(self._url, self._connect_s)
            connection.sock.settimeout(self._read_s)
            self._open.append(connection)
        self._open[0].request(method, self._path + target, body=data, headers=headers)

    def _read(self, answer: Future[_Answer]) -> None:
        try:
            response = self._open[0].getresponse()
            found = response.status, response.read().decode("utf-8", errors="replace")
        except BaseException as error:  # noqa: BLE001 - raised again by whoever looks
            self._end(keep=False)
            answer.set_exception(error)
            return
        # After an error vLLM's server closes the connection without saying so.
        self._end(keep=200 <= found[0] < 300 and not response.will_close)
        answer.set_result(found)

    def _end(self, *, keep: bool) -> None:
        if not keep:
            self._drop()
        self._last_used, self.busy = time.monotonic(), False

    def _drop(self) -> None:
        while self._open:
            self._open.pop().close()


def _has_ended(connection: HTTPConnection) -> bool:
    """Whether an idle connection has something to read: its end, or what nobody asked for."""
    try:
        return bool(select.select([connection.sock], [], [], 0)[0])
    except (OSError, ValueError):
        return True


def _let_go(connections: list[HTTPConnection], jobs: queue.SimpleQueue[Any]) -> None:
    for connection in connections:
        connection.close()
    jobs.put(None)


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        call, answer = job
        call(answer)
        del job, call, answer


def _connect(url: str, timeout_s: float) -> tuple[HTTPConnection, str]:
    """A connection to a server, or to the proxy in front of it, and what comes before each request's route.

    Raises:
        OSError: It can't be reached, or not within the time-out.
    """
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port, prefix = parts.port or (443 if secure else 80), parts.path
    proxy = getproxies().get(parts.scheme)
    to = (host, port)
    # A proxy from the environment cannot reach this host's own loopback.
    behind = bool(proxy) and not _is_loopback(url) and not proxy_bypass(host)
    if behind:
        assert proxy is not None
        at = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        to = (at.hostname or "", at.port or 80)
    connection = HTTPSConnection(*to, timeout=timeout_s) if secure else HTTPConnection(*to, timeout=timeout_s)
    if behind and secure:
        connection.set_tunnel(host, port)
    elif behind:
        prefix = url
    try:
        connection.connect()
    except TimeoutError as error:
        raise ConnectionError(f"no connection within {timeout_s:g} s") from error
    return connection, prefix


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
