"""The HTTP client against a strict server: order, fan-out, time-outs, and errors that name their cure."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from fsdp_ipc.clients import HTTPWeightSyncClient, ServerRequestError, WeightSyncClient
from fsdp_ipc.clients.inprocess import InProcessWeightSyncClient
from tests.fake_server import UUIDS, AnyWorker, FakeServer

VERBS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


def make_client(*servers: FakeServer, **settings: Any) -> HTTPWeightSyncClient:
    settings.setdefault("request_timeout_s", 5.0)
    return HTTPWeightSyncClient([server.url for server in servers], **settings)


def sync(client: WeightSyncClient, version: str | None = None) -> None:
    client.init_weight_transfer_engine({"k": 1})
    client.start_weight_update()
    client.update_weights({"n": 1})
    client.finish_weight_update(version)


def test_the_four_verbs_reach_the_server_in_order_with_plain_json() -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        client = make_client(server)
        sync(client, "step-1")
        assert server.workers[0].seen == [
            ("init", {"k": 1}),
            ("start", None),
            ("update", {"n": 1}),
            ("finish", None),
        ]
        assert server.routes == list(VERBS)
        assert server.violations == []
        assert client.weight_version() == "step-1"
    assert isinstance(client, WeightSyncClient)


def test_a_list_of_payloads_reaches_each_worker_with_its_own_entry() -> None:
    workers = [AnyWorker(), AnyWorker()]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        client = make_client(server)
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        client.update_weights([{"n": 0}, {"n": 1}])
    assert [worker.seen[-1] for worker in workers] == [("update", {"n": 0}), ("update", {"n": 1})]


@pytest.mark.parametrize(
    ("urls", "text"),
    [
        ([], "empty"),
        ("localhost:8000", "not the base URL"),
        ("ftp://h", "not the base URL"),
        (["http://a:1/", "http://a:1"], "twice"),
    ],
)
def test_bad_urls_are_refused(urls: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HTTPWeightSyncClient(urls)


def test_a_time_out_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        HTTPWeightSyncClient("http://a:1", request_timeout_s=0)


def test_a_server_that_never_answers_times_out() -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        server.hang("/start_weight_update")
        client = make_client(server, request_timeout_s=0.5)
        client.init_weight_transfer_engine({})
        began = time.monotonic()
        with pytest.raises(ServerRequestError, match=r"timed out after 0\.5 s") as caught:
            client.start_weight_update()
        assert time.monotonic() - began < 3
        assert caught.value.status is None
        assert "request_timeout_s" in str(caught.value)


def test_an_answer_that_comes_drop_by_drop_times_out() -> None:
    with FakeServer(backend="fsdp_ipc") as server:

        def drip(handler: Any) -> bool:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            while not server.closing.wait(0.1):
                handler.wfile.write(b" ")
            return True

        server._add("/health", drip, 0, -1)
        client = make_client(server, request_timeout_s=0.6)
        began = time.monotonic()
        with pytest.raises(ServerRequestError, match="timed out"):
            client.health()
        assert time.monotonic() - began < 3


def test_a_reset_connection_and_an_absent_server_are_errors_and_nothing_is_sent_twice() -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        server.reset("/start_weight_update")
        client = make_client(server)
        client.init_weight_transfer_engine({})
        with pytest.raises(ServerRequestError, match="ProtocolError"):
            client.start_weight_update()
        assert server.routes.count("/start_weight_update") == 1
    with pytest.raises(ServerRequestError, match="is the server up"):
        client.start_weight_update()


def test_a_connection_is_left_after_an_error() -> None:
    """vLLM's server closes the connection after an exception of its own, without a word in its answer."""
    with FakeServer(backend="fsdp_ipc") as server:
        client = make_client(server)
        seen: list[Any] = []

        def note(handler: Any) -> bool:
            seen.append(handler.client_address)
            return False

        server._add("/health", note, 0, -1)
        client.health()
        with pytest.raises(ServerRequestError, match="start_weight_update before init"):
            client.start_weight_update()
        client.health()
    assert seen[0] != seen[1]


def test_a_connection_is_kept_for_requests_in_a_row_and_left_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # After a pause the server may close it just as the next request goes out, which must then not be sent again.
    monkeypatch.setattr("fsdp_ipc.clients.transport.KEEP_ALIVE_S", 0.5)
    with FakeServer(backend="fsdp_ipc") as server:
        client = make_client(server)
        seen: list[Any] = []

        def note(handler: Any) -> bool:
            seen.append(handler.client_address)
            return False

        server._add("/health", note, 0, -1)
        client.health()
        client.health()
        time.sleep(0.7)
        client.health()
    assert seen[0] == seen[1]
    assert seen[1] != seen[2]


def test_proxies_from_the_environment_are_not_used_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with FakeServer() as server:
        assert make_client(server).server_info().version == "0.32.0"


def _first_line(listener: socket.socket, answer: bytes, seen: list[str]) -> None:
    with listener.accept()[0] as connection:
        seen.append(connection.recv(4096).decode().splitlines()[0])
        connection.sendall(answer)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://nowhere.invalid:8000/base", "GET http://nowhere.invalid:8000/base/health HTTP/1.1"),
        ("https://nowhere.invalid", "CONNECT nowhere.invalid:443 HTTP/1."),
    ],
)
def test_a_proxy_from_the_environment_is_asked_for_other_hosts(
    url: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        answer = b"HTTP/1.1 503 no\r\nContent-Length: 5\r\nConnection: close\r\n\r\nsorry"
        proxy = threading.Thread(target=_first_line, args=(listener, answer, seen))
        proxy.start()
        with pytest.raises(ServerRequestError, match="503|sorry"):
            HTTPWeightSyncClient(url, request_timeout_s=5).health()
        proxy.join()
    assert seen[0].startswith(line)


def test_a_base_url_may_have_a_path() -> None:
    seen: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        server = threading.Thread(target=_first_line, args=(listener, answer, seen))
        server.start()
        HTTPWeightSyncClient(
            f"http://127.0.0.1:{listener.getsockname()[1]}/v/one/", request_timeout_s=5
        ).health()
        server.join()
    assert seen == ["GET /v/one/health HTTP/1.1"]


def test_a_call_that_ends_in_soon_is_written_at_once_and_tells_later() -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        client = make_client(server)
        client.init_weight_transfer_engine({})
        asked, go_on = threading.Event(), threading.Event()

        def wait(handler: Any) -> bool:
            asked.set()
            return not go_on.wait(5)

        server._add("/start_weight_update", wait, 0, 1)
        began = time.monotonic()
        started = client.start_weight_update_soon()
        assert asked.wait(5)
        assert not started.done()
        client.health()  # another request while that one is out
        assert time.monotonic() - began < 4
        go_on.set()
        assert started.exception(timeout=5) is None
        client.update_weights({})
        assert client.finish_weight_update_soon("8").exception(timeout=5) is None
        assert server.published == ["8"]
        server.fail("/start_weight_update", "boom")
        refused = client.start_weight_update_soon().exception(timeout=5)
        assert isinstance(refused, ServerRequestError)
        assert (refused.status, "boom" in refused.body) == (500, True)
    absent = HTTPWeightSyncClient(server.url).start_weight_update_soon().exception(timeout=5)
    assert isinstance(absent, ServerRequestError)
    assert "is the server up" in str(absent)


def _drip(server: FakeServer) -> Any:
    def act(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not server.closing.wait(0.1):
            try:
                handler.wfile.write(b" ")
            except OSError:
                break
        return True

    return act


@pytest.mark.parametrize("how", ["silent", "drop by drop"])
def test_a_call_that_ends_in_soon_has_one_time_out_for_all_of_it(how: str) -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        client = make_client(server, request_timeout_s=30)
        client.init_weight_transfer_engine({})
        if how == "silent":
            server.hang("/start_weight_update")
        else:
            server._add("/start_weight_update", _drip(server), 0, -1)
        client.request_timeout_s = 0.6  # as a sender lowers it, after its first use
        began = time.monotonic()
        refused = client.start_weight_update_soon().exception(timeout=5)
        assert isinstance(refused, ServerRequestError)
        assert "timed out after 0.6 s" in str(refused)
        assert 0.5 < time.monotonic() - began < 3
        client.health()


def test_a_server_with_a_full_queue_does_not_hold_the_caller_up() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fill = [socket.socket() for _ in range(3)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        client = HTTPWeightSyncClient(f"http://127.0.0.1:{listener.getsockname()[1]}", request_timeout_s=0.7)
        began = time.monotonic()
        started = client.start_weight_update_soon()
        assert time.monotonic() - began < 0.5
        assert isinstance(started.exception(timeout=5), ServerRequestError)
        for each in fill:
            each.close()


def test_what_a_subclass_or_a_patch_put_in_the_place_of_a_verb_is_called() -> None:
    called: list[Any] = []

    class Logged(HTTPWeightSyncClient):
        def finish_weight_update(self, weight_version: str | None = None) -> None:
            called.append(weight_version)
            super().finish_weight_update(weight_version)

    with FakeServer(backend="fsdp_ipc") as server:
        client = Logged(server.url)
        client.init_weight_transfer_engine({})
        original = client.start_weight_update
        client.start_weight_update = lambda: called.append(original())  # type: ignore[method-assign]
        assert client.start_weight_update_soon().exception(timeout=5) is None
        client.update_weights({})
        assert client.finish_weight_update_soon("3").exception(timeout=5) is None
        assert server.published == ["3"]
    assert called == [None, "3"]


_LEAVE = """
import os, sys, time
from fsdp_ipc.clients import HTTPWeightSyncClient
client = HTTPWeightSyncClient(sys.argv[1], request_timeout_s=60)
client.post_soon("/pause").result(timeout=10)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        client.post_soon("/pause").result(timeout=10)
        os._exit(7)
    client.post_soon("/pause").result(timeout=10)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.post_soon("/resume")
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["fork", "exit"])
def test_a_process_can_fork_and_exit_with_an_answer_outstanding(how: str) -> None:
    with FakeServer(backend="fsdp_ipc") as server:
        peers: list[Any] = []

        def note(handler: Any) -> bool:
            peers.append(handler.client_address)
            return False

        server._add("/pause", note, 0, -1)
        server._add("/resume", _drip(server), 0, -1)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", _LEAVE, server.url, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 7, done.stderr
        assert done.stderr == ""
        assert time.monotonic() - began < 20
    if how == "fork":
        assert sorted(peers.count(peer) for peer in set(peers)) == [1, 2], (
            "the child has a connection of its own"
        )


def test_of_several_servers_a_call_that_ends_in_soon_tells_every_failure() -> None:
    with FakeServer(backend="fsdp_ipc") as one, FakeServer(backend="fsdp_ipc") as other:
        client = make_client(one, other)
        client.init_weight_transfer_engine({})
        assert client.start_weight_update_soon().exception(timeout=5) is None
        client.update_weights({})
        other.fail("/finish_weight_update", "boom")
        refused = client.finish_weight_update_soon("1").exception(timeout=5)
        assert isinstance(refused, ServerRequestError)
        assert "boom" in str(refused)
        assert one.published == other.published == []


def test_headers_are_sent_and_stay_out_of_errors() -> None:
    with FakeServer() as server:
        server.fail("/health", "no")
        seen: list[str] = []

        def note(handler: Any) -> bool:
            seen.append(handler.headers["Authorization"])
            return False

        server._add("/pause", note, 0, -1)
        client = make_client(server, headers={"Authorization": "Bearer s3cret"})
        client.pause()
        with pytest.raises(ServerRequestError) as caught:
            client.health()
    assert seen == ["Bearer s3cret"]
    assert "s3cret" not in str(caught.value)


def test_server_info_tells_release_backend_and_workers() -> None:
    with FakeServer(version="0.28.0", uuids=UUIDS[:4], data_parallel_size=2) as server:
        info = make_client(server).server_info()
    assert (info.version, info.backend, info.backend_known, info.dev_mode) == ("0.28.0", "ipc", True, True)
    assert info.world_size == 4


def test_server_info_without_backend_and_without_dev_mode() -> None:
    with FakeServer(backend=None) as server:
        info = make_client(server).server_info()
        assert info.backend is None
        assert info.backend_known
    with FakeServer(dev_mode=False) as server:
        info = make_client(server).server_info()
        assert (info.version, info.backend_known, info.dev_mode) == ("0.32.0", False, False)


def test_server_info_survives_a_configuration_that_cannot_be_written() -> None:
    with FakeServer() as server:
        server.fail("/server_info", "cannot serialize", times=-1)
        info = make_client(server).server_info()
    assert (info.version, info.backend_known, info.world_size) == ("0.32.0", False, 1)


def test_servers_of_different_releases_are_refused() -> None:
    with (
        FakeServer(version="0.28.0") as a,
        FakeServer(version="0.32.0") as b,
        pytest.raises(ValueError, match="same release"),
    ):
        make_client(a, b).server_info()


def test_an_error_survives_pickling_with_all_its_parts() -> None:
    error = ServerRequestError(
        "u", "r", status=500, body="b", hint="h", others=[ServerRequestError("v", "r", status=None, body="c")]
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.others[0].url == "v"


def test_lifecycle_helpers() -> None:
    with FakeServer() as server:
        client = make_client(server)
        client.pause("wait")
        assert client.is_paused()
        client.resume()
        assert not client.is_paused()
        client.sleep(level=2)
        assert client.is_sleeping()
        client.wake_up()
        assert not client.is_sleeping()
        server.checksums = {"a.weight": "00ff"}
        assert client.weight_checksums() == [{"a.weight": "00ff"}]


# Field cases.


def test_field_E1_refused_pickle_names_the_variable_and_our_backend() -> None:
    """https://github.com/vllm-project/vllm/pull/35928: VLLM_ALLOW_INSECURE_SERIALIZATION missing."""
    with FakeServer(allow_insecure=False) as server:
        client = make_client(server)
        client.init_weight_transfer_engine({"packed": True})
        client.start_weight_update()
        with pytest.raises(ServerRequestError) as caught:
            client.update_weights(
                {
                    "names": [],
                    "dtype_names": [],
                    "shapes": [],
                    "ipc_handles": {UUIDS[0]: ()},
                    "tensor_sizes": [],
                }
            )
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=1" in (caught.value.hint or "")
    assert "fsdp_ipc" in (caught.value.hint or "")


def test_field_E2_missing_dev_routes_name_the_variable() -> None:
    """https://github.com/vllm-project/vllm-project.github.io/pull/207: VLLM_SERVER_DEV_MODE unset, routes absent."""
    with FakeServer(dev_mode=False) as server:
        client = make_client(server)
        with pytest.raises(ServerRequestError, match="VLLM_SERVER_DEV_MODE=1") as caught:
            client.init_weight_transfer_engine({})
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("status", "body", "content_type", "raises"),
    [
        (404, '{"detail":"Not Found"}', "application/json", "VLLM_SERVER_DEV_MODE"),
        (
            500,
            '{"error":{"message":"the worker said boom","code":500}}',
            "application/json",
            "the worker said boom",
        ),
        (500, "plain boom", "text/plain", "plain boom"),
        (200, "<html>welcome to the proxy</html>", "text/html", "welcome to the proxy"),
        (307, "", "text/plain", "status 307"),
        (200, "", "text/plain", None),
        (200, "{}", "application/json", None),
    ],
)
def test_field_E2_answers(status: int, body: str, content_type: str, raises: str | None) -> None:
    """https://github.com/vllm-project/vime/pull/47: a failed parse became success; the body was lost."""
    with FakeServer() as server:
        server.answer("/start_weight_update", status, body, content_type=content_type)
        client = make_client(server)
        if raises is None:
            client.start_weight_update()
        else:
            with pytest.raises(ServerRequestError, match=raises):
                client.start_weight_update()


def test_field_E4_every_call_fans_out_in_order_and_one_failure_fails_all() -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/issues/1158: one request does not reach all API servers."""
    with FakeServer(backend="fsdp_ipc") as a, FakeServer(backend="fsdp_ipc") as b:
        client = make_client(a, b)
        sync(client, "v1")
        assert a.routes == b.routes == [*VERBS, "/update_weight_version"]
        assert a.weight_version == b.weight_version == "v1"
        b.fail("/finish_weight_update", "boom of b", after=0)
        client.start_weight_update()
        with pytest.raises(ServerRequestError, match="boom of b") as caught:
            client.finish_weight_update("v2")
        assert caught.value.url == b.url
        assert a.weight_version == b.weight_version == "v1", "no server publishes what another failed to take"
        assert client.server_info().world_size == 2


def test_field_E4_the_calls_of_one_step_run_at_the_same_time() -> None:
    """https://github.com/sgl-project/sglang/pull/2050: servers that wait for each other."""
    with FakeServer(backend="fsdp_ipc") as a, FakeServer(backend="fsdp_ipc") as b:
        together = threading.Barrier(2)

        def meet(handler: Any) -> bool:
            together.wait(3)
            return False

        for server in (a, b):
            server._add("/health", meet, 0, -1)
        make_client(a, b).health()


def test_field_E4_all_failures_are_told() -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/issues/1158: both servers' words are in the error."""
    with FakeServer() as a, FakeServer() as b:
        a.fail("/pause", "boom of a")
        b.reset("/pause")
        with pytest.raises(ServerRequestError, match="boom of a") as caught:
            make_client(a, b).pause()
    assert b.url in str(caught.value)
    assert [error.url for error in caught.value.others] == [b.url]


@pytest.mark.parametrize(
    ("version", "answer", "expected"),
    [("0.32.0", {"success": True}, True), ("0.32.0", {"success": False}, False), ("0.26.0", None, None)],
)
def test_field_E5_the_verdict_of_a_cache_reset_is_told(
    version: str, answer: Any, expected: bool | None
) -> None:
    """https://github.com/vllm-project/vllm/pull/46125: an update resets no prefix cache; 200 does not mean done."""
    with FakeServer(version=version) as server:
        if answer is not None:
            server.cache_reset_answer = answer
        assert make_client(server).reset_prefix_cache() is expected
        assert server.num_cache_resets == 1


def test_field_E7_a_sleeping_server_can_be_seen_before_an_update() -> None:
    """https://github.com/vllm-project/vllm/issues/57853: an update while asleep kills the engine and never returns."""
    with FakeServer(backend="fsdp_ipc") as a, FakeServer(backend="fsdp_ipc") as b:
        client = make_client(a, b, request_timeout_s=0.5)
        assert not client.is_sleeping()
        b.asleep = {"weights"}
        assert client.is_sleeping(), "one sleeping server is enough"
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        with pytest.raises(ServerRequestError, match="timed out"):
            client.update_weights({})
        assert b.violations == ["update while the server sleeps: a real one dies"]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("CUDA error: invalid device context", "namespaces"),
        ("RuntimeError: pidfd_getfd: Operation not permitted", "expandable"),
        ("OSError: [Errno 22] Invalid argument", None),
        ("CUDA error: invalid resource handle", "WSL2"),
    ],
)
def test_field_A17_a_workers_cuda_error_comes_with_advice(text: str, advice: str | None) -> None:
    """https://github.com/vllm-project/vllm/pull/55906: separate PID namespaces give `invalid device context`."""
    with FakeServer() as server:
        server.fail("/pause", text)
        with pytest.raises(ServerRequestError) as caught:
            make_client(server).pause()
    assert caught.value.body == text
    assert caught.value.hint is None if advice is None else advice in (caught.value.hint or "")


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
@pytest.mark.parametrize("log_stats", [True, False])
def test_field_E7_only_weights_that_sleep_are_in_the_way(version: str, log_stats: bool) -> None:
    """https://github.com/vllm-project/vllm/issues/57853: paused or half-awake servers say `is_sleeping` as well."""
    with FakeServer(version=version) as server:
        server.log_stats = log_stats
        client = make_client(server)
        client.server_info()
        assert not client.weights_asleep()
        client.pause()
        assert client.is_sleeping()
        assert not client.weights_asleep(), "paused only"
        client.sleep()
        assert client.weights_asleep()
        client.wake_up("kv_cache")
        assert client.weights_asleep()
        client.wake_up("weights")
        assert not client.weights_asleep()
        client.sleep()
        client.wake_up("weights")
        assert client.is_sleeping()
        assert not client.weights_asleep(), "the cache sleeps, the weights do not"
        client.wake_up("kv_cache")
        assert not client.weights_asleep()


def test_field_E7_another_clients_sleep_is_seen_and_its_pause_is_no_sleep() -> None:
    """https://github.com/vllm-project/vllm/issues/57853: someone else put the server to sleep."""
    with FakeServer() as server:
        ours, theirs = make_client(server), make_client(server)
        theirs.pause()
        assert not ours.weights_asleep()
        theirs.sleep()
        assert ours.weights_asleep()
        server.log_stats = False
        assert ours.weights_asleep(), "where it cannot be told, an update is not risked"
    with FakeServer(sleep_mode=False) as server:
        client = make_client(server)
        assert client.server_info().sleep_mode is False
        server.paused = True
        assert not client.weights_asleep()


# In-process engines.


class FakeLLM:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.seen.append(request.init_info)

    def start_weight_update(self) -> None:
        self.seen.append("start")

    def update_weights(self, request: Any) -> None:
        self.seen.append(request.update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.seen.append(weight_version)


class FakeAsyncLLM:
    def __init__(self) -> None:
        self.engine = FakeLLM()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await asyncio.sleep(0)
        self.engine.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await asyncio.sleep(0)
        self.engine.update_weights(request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update(weight_version)


def test_an_engine_in_this_process_gets_request_objects() -> None:
    engine = FakeLLM()
    sync(InProcessWeightSyncClient(engine), "v")
    assert engine.seen == [{"k": 1}, "start", {"n": 1}, "v"]


def test_an_async_engine_is_driven_in_its_own_loop() -> None:
    engine = FakeAsyncLLM()
    with pytest.raises(ValueError, match="loop="):
        InProcessWeightSyncClient(engine)

    async def main() -> None:
        client = InProcessWeightSyncClient(engine, loop=asyncio.get_running_loop(), call_timeout_s=5)
        await asyncio.to_thread(sync, client, "v")
        with pytest.raises(ServerRequestError, match="use a thread"):
            client.start_weight_update()

    asyncio.run(main())
    assert engine.engine.seen == [{"k": 1}, "start", {"n": 1}, "v"]


def test_an_object_without_the_verbs_is_no_engine() -> None:
    with pytest.raises(TypeError, match="finish_weight_update"):
        InProcessWeightSyncClient(object())


def test_an_engines_error_keeps_its_words_and_gets_a_hint() -> None:
    class Broken(FakeLLM):
        def start_weight_update(self) -> None:
            raise RuntimeError(
                "Weight transfer not configured. Please set weight_transfer_config to enable it."
            )

    with pytest.raises(ServerRequestError, match="--weight-transfer-config"):
        InProcessWeightSyncClient(Broken()).start_weight_update()


def test_a_url_with_a_path_behind_it_is_told_from_a_server_without_development_mode() -> None:
    with FakeServer() as server:
        client = HTTPWeightSyncClient(f"{server.url}/v1")
        with pytest.raises(ServerRequestError) as caught:
            client.server_info()
        assert (
            "this is not the server's base URL: every vLLM server has /version there; leave out '/v1'"
            in str(caught.value)
        )
        assert "VLLM_SERVER_DEV_MODE" not in str(caught.value)
    with (
        FakeServer(dev_mode=False) as server,
        pytest.raises(ServerRequestError, match="VLLM_SERVER_DEV_MODE=1"),
    ):
        HTTPWeightSyncClient(server.url).start_weight_update()
