"""Requests to one or several servers: all servers at once, all or none; and such as need not wait for their answers."""

from __future__ import annotations

import ipaddress
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from fsdp_ipc.clients.base import ServerRequestError, base_url_hint, error_text, hint_for
from fsdp_ipc.clients.prompt import KEEP_ALIVE_S, Answer, PromptSender, settle

_T = TypeVar("_T")

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
        self._connections = {url: (_Connection(url), _Connection(url)) for url in self.urls}
        parts = urlsplit(self.urls[0])
        prompt = len(self.urls) == 1 and parts.scheme == "http" and _is_loopback(self.urls[0])
        self._prompt = PromptSender(parts.hostname or "", parts.port or 80) if prompt else None

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
        data = _encoded(body)
        return self.fan_out(lambda url: self.request(url, "POST", route, data=data, params=params))

    def post_soon(self, route: str, body: dict[str, Any] | None = None) -> Future[None]:
        """POST to every server, and wait for no answer: a request to one server of this host is written when this returns.

        Args:
            route: Path, with its slash.
            body: Sent as JSON; None sends no body.

        Returns:
            What becomes of it within `request_timeout_s`: the error that `post` would raise, or None.
        """
        if self._prompt is None:
            return in_background(lambda: self.post(route, body))
        (url,) = self.urls
        data = _encoded(body)
        try:
            answer = self._prompt.post(
                urlsplit(url).path + route, data, self._headers_for(data), self.request_timeout_s
            )
        except OSError:  # nothing was sent; the other way waits longer, and says more
            return in_background(lambda: self.post(route, body))
        done: Future[None] = Future()

        def read(answer: Future[Answer]) -> None:
            found: BaseException | None = None
            try:
                with self._told(url, f"POST {route}"):
                    status, text = answer.result()
                _parsed(url, f"POST {route}", route, status, text)
            except BaseException as error:  # noqa: BLE001  raised again by whoever looks
                found = error
            settle(done, found)

        answer.add_done_callback(read)
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
        headers = self._headers_for(data)
        target = f"{url}{route}?{urlencode(params, doseq=True)}" if params else url + route
        timeout = urllib3.Timeout(
            connect=min(self.connect_timeout_s, self.request_timeout_s), read=self.request_timeout_s
        )
        with self._told(url, f"{method} {route}"):
            first, second = self._connections[url]
            # The second one is for a request that goes out while another has not been answered yet.
            return (second if first.busy else first).exchange(
                self.request_timeout_s + _GRACE_S, method, target, body=data, headers=headers, timeout=timeout
            )

    def _headers_for(self, data: bytes | None) -> dict[str, str]:
        return self._headers if data is None else {**self._headers, "Content-Type": "application/json"}

    @contextmanager
    def _told(self, url: str, label: str) -> Iterator[None]:
        """Raise what kept a server from answering as a `ServerRequestError`."""
        try:
            yield
        except (urllib3.exceptions.TimeoutError, TimeoutError) as error:
            # urllib3 calls a refused connection a time-out, too.
            if isinstance(error, urllib3.exceptions.NewConnectionError):
                raise _unanswered(url, label, error) from error
            raise ServerRequestError(
                url,
                label,
                status=None,
                body=f"timed out after {self.request_timeout_s:g} s ({type(error).__name__})",
                hint="raise request_timeout_s if the server is only slow; see the server's log otherwise",
            ) from error
        except (urllib3.exceptions.HTTPError, HTTPException, OSError) as error:
            raise _unanswered(url, label, error) from error


def in_background(call: Callable[[], object]) -> Future[None]:
    """Run a call in a thread of its own; its error, or None, is the future's."""
    done: Future[None] = Future()

    def run() -> None:
        found: BaseException | None = None
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised again by whoever looks
            found = error
        settle(done, found)

    threading.Thread(target=run, daemon=True, name="fsdp_ipc-call").start()
    return done


def _encoded(body: dict[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


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


def _unanswered(url: str, label: str, error: Exception) -> ServerRequestError:
    body = f"{type(error).__name__}: {error}"
    return ServerRequestError(
        url, label, status=None, body=body, hint="is the server up, and is this its address?"
    )


class _Connection:
    """A connection to one server, kept for the requests of one sync, which follow each other in milliseconds.

    A connection that was idle for longer may be closed by the server just as the next request goes out, and a request
    that was lost in this way must not be sent again; so an idle one is left. Requests run in a thread of their own: a
    socket's time-out starts anew with every byte, and a thread that got no end of an answer can be left behind.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: urllib3.PoolManager | None = None
        self._last_used = 0.0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is out on it."""
        return self._lock.locked()

    def exchange(self, total_s: float, method: str, target: str, **options: Any) -> Answer:
        """Status and body of one request, with urllib3's options. One at a time.

        Raises:
            TimeoutError: The answer did not end within `total_s` seconds.
        """
        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="fsdp_ipc-http").start()
                weakref.finalize(self, self._jobs.put, None)
            answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._jobs.put((lambda: self._send(method, target, options), answer))
            try:
                found = answer.get(timeout=total_s)
            except queue.Empty:
                # Its thread ends when the answer does; the next request gets another connection and thread.
                self._jobs.put(None)
                self._jobs, self._pool = None, None
                raise TimeoutError("the answer did not end in time") from None
            if isinstance(found, BaseException):
                raise found
            status, text = found
            # After an error vLLM's server closes the connection without saying so.
            self._last_used = time.monotonic() if 200 <= status < 300 else 0.0
            return status, text

    def _send(self, method: str, target: str, options: Mapping[str, Any]) -> Answer:
        if self._pool is None:
            self._pool = _pool_for(self._url)
        elif time.monotonic() - self._last_used > KEEP_ALIVE_S:
            self._pool.clear()
        response = self._pool.request(method, target, retries=False, redirect=False, **options)
        return response.status, response.data.decode("utf-8", errors="replace")


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        call, answer = job
        try:
            answer.put(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
            answer.put(error)
        del job, call, answer


def _pool_for(url: str) -> urllib3.PoolManager:
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    # A proxy from the environment cannot reach this host's own loopback.
    if proxy and not _is_loopback(url) and not proxy_bypass(parts.hostname or ""):
        return urllib3.ProxyManager(proxy, num_pools=1, maxsize=1)
    return urllib3.PoolManager(num_pools=1, maxsize=1)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
