"""The metrics port under anything that may be sent to a port."""

import re
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.monitoring.metrics import http_server
from asyncrl.monitoring.metrics.exporter import start_exporter
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def port():
    registry = new_registry()
    GeneratorMetrics.register(registry, "generator-0").running.set(7)
    exporter = start_exporter(registry, "127.0.0.1", 0)
    yield exporter.port
    exporter.close()


def ask(port, content, *, close=True):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        try:
            client.sendall(content)
            if close:
                client.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has answered already
        answer = b""
        try:
            while chunk := client.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass  # it did not read all that was sent
        return answer


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\x00\xff\xfe",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET http:/// HTTP/1.1 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"*1\r\n$4\r\nPING\r\n\r\n",
    ],
    ids=lambda content: repr(content[:24]),
)
def test_what_is_no_request_is_refused(port, content, capfd):
    assert re.match(rb"HTTP/1\.0 (400|405|505) ", ask(port, content))
    assert ask(port, SCRAPE).startswith(b"HTTP/1.0 200 OK\r\n")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost : evil.example\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
    ],
)
def test_other_methods_and_malformed_headers_never_reach_the_application(content, status):
    def application(_environ, start):
        start("200 OK", [])
        return [b"answered"]

    server = http_server.MetricsServer("127.0.0.1", 0, application)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    answer = ask(server.port, content)
    server.shutdown()
    server.server_close()
    assert answer.startswith(b"HTTP/1.0 " + status)
    assert (b"answered" in answer) == (status == b"200")
    assert (b"Allow: GET, HEAD, OPTIONS" in answer) == (status == b"405")


def test_huge_heads_are_cut_off(port, capfd):
    for content in (b"GET /" + b"a" * 10_000_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1_000_000):
        assert ask(port, content, close=False)[:10] in (b"HTTP/1.0 4", b"")
    assert b"asyncrl_engine_running_requests" in ask(port, SCRAPE)
    assert capfd.readouterr() == ("", "")


@settings(max_examples=60)
@given(st.binary(max_size=100) | st.binary(max_size=40).map(lambda tail: SCRAPE[:-2] + tail))
def test_any_bytes_are_answered_or_refused(port, content):
    """An empty first line is answered with nothing, as by the library."""
    assert ask(port, content)[:9] in (b"HTTP/1.0 ", b"")


def test_scrapes_in_each_form(port):
    plain = ask(port, SCRAPE)
    head, _, body = plain.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    packed = ask(port, b"GET / HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
    assert b"Content-Encoding: gzip" in packed
    one = ask(port, b"GET /metrics?name[]=asyncrl_engine_running_requests HTTP/1.1\r\n\r\n")
    assert one.count(b"# HELP") == 1


def send_slowly(client):
    for _ in range(1000):
        client.sendall(b"G")
        time.sleep(0.02)


def test_slow_and_idle_clients_are_bounded_and_do_not_stop_scrapes(port, monkeypatch, capfd):
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 0.5)
    threads_before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(80)]
    try:
        assert threading.active_count() <= threads_before + http_server.MAX_CONNECTIONS
        deadline = time.monotonic() + 60
        while b"200 OK" not in ask(port, SCRAPE):
            assert time.monotonic() < deadline, "the idle connections were not closed"
    finally:
        for client in idle:
            client.close()
    slow = socket.create_connection(("127.0.0.1", port), timeout=60)
    with slow, pytest.raises(OSError, match=r"reset|pipe"):
        send_slowly(slow)
    assert capfd.readouterr() == ("", "")


def test_a_client_that_leaves_before_the_answer(port, capfd):
    for _ in range(20):
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.sendall(SCRAPE)
        client.close()
    assert ask(port, SCRAPE).startswith(b"HTTP/1.0 200 OK")
    assert capfd.readouterr() == ("", "")


def test_a_connection_without_a_thread_does_not_keep_its_place(port, monkeypatch, capfd):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(http_server.MAX_CONNECTIONS):
            assert ask(port, SCRAPE) == b""
    assert ask(port, SCRAPE).startswith(b"HTTP/1.0 200 OK")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("host", "status"),
    [(b"evil.example", 403), (b"127.0.0.1.evil.example:9100", 403), (b"", 403),
     (b"127.0.0.1:9100", 200), (b"LOCALHOST", 200), (b"[::1]:9100", 200), (None, 200)],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_reads_nothing(port, host, status):
    """A page of another site, by DNS rebinding; without a Host it is no browser."""
    line = b"" if host is None else b"Host: " + host + b"\r\n"
    answer = ask(port, b"GET /metrics HTTP/1.1\r\n" + line + b"\r\n")
    assert answer.startswith(b"HTTP/1.0 %d " % status)
    assert (b"asyncrl_" in answer) == (status == 200)


def test_elsewhere_any_name_will_do():
    exporter = start_exporter(new_registry(), "0.0.0.0", 0)  # noqa: S104
    answer = ask(exporter.port, b"GET /metrics HTTP/1.1\r\nHost: node-7:9100\r\n\r\n")
    exporter.close()
    assert answer.startswith(b"HTTP/1.0 200")
