"""The API over real connections: answers, refusals, limits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from served_page import TOKEN, Client, FakeRun, serving
from synthetic_run import make_run

from asyncrl.errors import AsyncrlError, UserError
from asyncrl.monitoring.config import WebConfig
from asyncrl.monitoring.records.samples import SampleLog, SampleRecord, SampleSegment
from asyncrl.web import feed, server
from asyncrl.web import server as middleware
from asyncrl.web.controller_link import EndedRun
from asyncrl.web.guard import Policy
from asyncrl.web.sections import NAMES, EndedSections
from asyncrl.web.serving import listen
from asyncrl.wire.messages import control
from asyncrl.wire.records.step import RunResult

REFERENCE = re.compile(rb"""(?:src|href|action|url\()\s*=?\s*["']?([^"' )>]+)""")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("web") / "run", steps=12)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ASK_SECONDS", 0.1)


@pytest.fixture
def source() -> FakeRun:
    return FakeRun()


@pytest.fixture
def client(run: Path, source: FakeRun) -> Iterator[Client]:
    with serving(run, source) as found:
        yield found


def test_what_is_asked_for_is_answered(client: Client, run: Path, source: FakeRun) -> None:
    assert client.get("/api/status").json == source.status_now
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    assert client.get("/api/metrics").json == [msgspec.json.decode(line) for line in lines]
    some = client.get("/api/metrics?from=3&limit=2").json
    assert [one["step"] for one in some] == [3, 4]
    assert client.get("/api/samples?limit=2").json == [
        msgspec.json.decode(line) for line in (run / "samples.jsonl").read_bytes().splitlines()[-2:]
    ]
    assert client.get("/api/orders").json == []
    assert client.get("/api/timeline").json == {}, "the made-up run is long over"
    for path in ("/api/metrics?from=-1", "/api/metrics?limit=100000", "/api/samples?limit=x"):
        assert client.get(path).status == 422
    assert client.get("/api/nothing").status == 404
    assert client.get("/api/report/nothing").status == 422


def test_every_section_is_drawn(client: Client) -> None:
    drawn = {name: client.get(f"/api/report/{name}") for name in NAMES}
    assert {answer.status for answer in drawn.values()} == {200}
    for name in ("learning", "work", "samples", "health", "settings"):
        assert b"<section>" in drawn[name].body, name
    assert b"<svg" in drawn["learning"].body


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_other_script(client: Client) -> None:
    paths = ["/", "/page.css", "/page.js", "/docs", "/openapi.json"]
    paths += [f"/api/report/{name}" for name in NAMES]
    for path in paths:
        answer = client.get(path)
        assert answer.status == 200, path
        assert answer.headers["content-security-policy"] == middleware.CONTENT_POLICY
        if "html" in answer.headers["content-type"]:
            body = answer.body
            assert not re.search(
                rb"<script(?! src=\"/page.js\")|<style|<[^>]* style=|<[^>]* on\w+=", body
            )
            targets = {found.decode() for found in REFERENCE.findall(body)}
            assert all(one.startswith(("/", "#", "data:")) for one in targets), targets
    assert b"http" not in client.get("/page.css").body
    assert not re.search(rb"https?://", client.get("/page.js").body)


def test_answers_and_refusals_are_locked_down(client: Client) -> None:
    for path, status in (("/api/status", 200), ("/api/x", 404), ("/api/metrics?limit=0", 422)):
        answer = client.get(path)
        assert answer.status == status
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
    other = client.get("/api/status", Host="evil.example")
    assert (other.status, other.headers["x-frame-options"]) == (403, "DENY")
    assert "access-control-allow-origin" not in other.headers
    assert client.ask("OPTIONS", "/api/orders/stop").status == 405


@pytest.mark.parametrize(
    ("name", "arguments", "request_"),
    [
        ("stop", {}, control.StopRequest()),
        ("pause", {}, control.PauseRequest()),
        ("resume", {}, control.ResumeRequest()),
        ("drain", {}, control.DrainRequest()),
        ("checkpoint", {}, control.CheckpointRequest()),
        ("scale", {"generators": 3}, control.ScaleRequest(3)),
        ("set", {"key": "a.b", "value": 1e-05}, control.SetRequest("a.b", "1e-05")),
        ("set", {"key": "a.b", "value": "verify"}, control.SetRequest("a.b", "verify")),
        ("set", {"key": "a.b", "value": None}, control.SetRequest("a.b", "null")),
        ("set", {"key": "a.b", "value": True}, control.SetRequest("a.b", "true")),
    ],
)
def test_orders_arrive(
    client: Client, source: FakeRun, name: str, arguments: object, request_: control.Request
) -> None:
    answer = client.order(name, arguments)
    assert (answer.status, answer.json) == (200, {"accepted": "done", "step": 7})
    assert source.orders == [request_]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("stop", {"now": True}),
        ("stop", []),
        ("scale", {}),
        ("scale", {"generators": 0}),
        ("scale", {"generators": "3"}),
        ("scale", {"generators": True}),
        ("scale", {"generators": 10**9}),
        ("set", {"key": "a"}),
        ("set", {"key": "", "value": 1}),
        ("set", {"key": "a" * 300, "value": 1}),
        ("set", {"key": "a", "value": [1]}),
        ("set", {"key": "a", "value": "x" * 2000}),
    ],
)
def test_orders_that_make_no_sense_go_nowhere(
    client: Client, source: FakeRun, name: str, arguments: object
) -> None:
    assert client.order(name, arguments).status == 422
    assert source.orders == []


def test_a_number_that_is_none_is_named_without_it(client: Client, source: FakeRun) -> None:
    headers = {"Content_Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    answer = client.ask("POST", "/api/orders/scale", b'{"generators": NaN}', **headers)
    assert answer.status == 422
    (mistake,) = answer.json["detail"]
    assert mistake["loc"] == ["body", "generators"]
    assert source.orders == []


def test_the_answers_of_the_run_are_passed_on(client: Client, source: FakeRun) -> None:
    source.reply = control.Refused("the run is stopping")
    refused = client.order("pause")
    assert (refused.status, refused.json) == (409, {"detail": "the run is stopping"})
    source.reply = AsyncrlError("waited 10 s for the controller's answer")
    for answer in (client.order("pause"), client.get("/api/status"), client.get("/api/processes")):
        assert (answer.status, answer.json) == (502, {"detail": str(source.reply)})
    assert client.order("nothing").status == 404


def test_orders_without_the_token_go_nowhere_and_no_log_has_it(
    client: Client, source: FakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "a-wrong-token-with-a-secret"
    assert client.order("stop", token=None).status == 401
    assert client.order("stop", token=wrong).status == 401
    assert client.ask("POST", "/api/orders/stop", b"{}", Content_Type="text/plain").status == 401
    assert source.orders == []
    assert client.order("stop").status == 200
    assert "order stop from 127.0.0.1" in caplog.text
    assert TOKEN not in caplog.text
    assert wrong not in caplog.text


def test_elsewhere_all_data_needs_the_token(run: Path, source: FakeRun) -> None:
    with serving(run, source, Policy(is_loopback=False, token=TOKEN)) as client:
        for path in ("/api/status", "/api/events", "/api/metrics", "/api/report/work"):
            assert client.get(path).status == 401
            assert client.get(path, Authorization="Bearer nonsense").status == 401
        assert client.get("/api/status", Authorization=f"Bearer {TOKEN}").status == 200
        assert client.get("/").status == 200
    assert source.asked == 1


def test_text_of_a_run_is_no_markup(tmp_path: Path, source: FakeRun) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    folder = make_run(tmp_path / "run", steps=3)
    log = SampleLog(folder / "samples.jsonl")
    log.append(
        SampleRecord(
            step=3, prompt=hostile, tokens=[hostile], provenance=["sampled"], reward=1.0,
            segments=[SampleSegment(0, 0, 1)], answer=hostile, sample_id=hostile,
        )
    )  # fmt: skip
    log.close()
    with serving(folder, source) as client:
        body = client.get("/api/report/samples").body
    assert b"&lt;img" in body
    assert b"<img" not in body


def test_one_producer_for_all_who_watch(client: Client, source: FakeRun) -> None:
    received = [0] * 10

    def watch(index: int) -> None:
        with client.snapshots() as snapshots:
            for _ in range(3):
                assert next(snapshots)["status"] == source.status_now
                received[index] += 1

    threads = [threading.Thread(target=watch, args=[index]) for index in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received == [3] * 10
    assert source.asked <= 6, "it does not grow with those who watch"


def test_a_silent_controller_is_said_to_those_who_watch(client: Client, source: FakeRun) -> None:
    with client.snapshots() as snapshots:
        assert next(snapshots)["error"] is None
        source.reply = AsyncrlError("the controller is silent")
        found = next(one for one in snapshots if one["error"])
        assert (found["status"], found["error"]) == (None, "the controller is silent")
        source.reply = control.Accepted("again")
        assert next(one for one in snapshots if not one["error"])["status"] == source.status_now


def test_too_many_streams_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WATCHERS", 2)
    with client.snapshots() as snapshots, contextlib.ExitStack() as closing:
        next(snapshots)
        together = [closing.enter_context(client.connect()) for _ in range(20)]
        for one in together:
            one.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = sorted(one.recv(12) for one in together)
        assert answers == [b"HTTP/1.1 200", *[b"HTTP/1.1 503"] * 19]
        answer = client.get("/api/events")
        assert answer.status == 503
        assert "too many" in answer.json["detail"]
        assert client.get("/api/status").status == 200


def test_head_is_answered_and_a_long_head_is_not(client: Client) -> None:
    for path in ("/", "/docs", "/api/status", "/api/metrics", "/api/report/work", "/api/events"):
        answer = client.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b""), path
    assert client.get("/api/status", Cookie="x" * 10_000).status == 200
    for answer in (client.get("/", Cookie="x" * 30_000), client.get(f"/?{'x' * 20_000}")):
        assert (answer.status, answer.json) == (
            431,
            {"detail": "the head of the request is longer than 16384 bytes"},
        )


def test_who_takes_nothing_is_disconnected(
    client: Client, source: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_SECONDS", 0.2)
    usual, source.status_now = source.status_now, {"run": "x" * (1 << 22)}
    with client.connect() as slow:
        slow.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"xxx" not in slow.recv(4096):
            pass
        # Only the slow one has much to take: reading 4 MB takes a busy machine longer than 0.2 s.
        source.status_now = usual
        with client.snapshots() as snapshots:
            seen = [next(snapshots)["watchers"] for _ in range(2)]
            assert max(seen) <= 2
            following = itertools.islice(snapshots, 200)
            assert any(one["watchers"] == 1 for one in following), "the slow one is not cut off"


@pytest.mark.parametrize("start", [b"", b"GET /api/status HTTP/1.1\r\nHost: loc"])
def test_a_connection_on_which_nothing_comes_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    with client.connect() as silent:
        silent.sendall(start)
        assert _rest(silent) == b""
    with client.connect() as kept:
        kept.sendall(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
        assert _rest(kept).startswith(b"HTTP/1.1 200 OK")


def test_a_body_that_does_not_come_is_given_up(
    client: Client, source: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    head = f"POST /api/orders/stop HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{"
    with client.connect() as slow:
        slow.sendall(head.encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
    assert source.orders == []


@pytest.mark.parametrize(
    "nonsense",
    [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 20_000],
    ids=["TLS", "a head without end"],
)
def test_nonsense_is_answered_with_400(client: Client, nonsense: bytes) -> None:
    with client.connect() as stranger:
        stranger.sendall(nonsense)
        assert stranger.recv(100).startswith(b"HTTP/1.1 400")
    assert client.get("/api/status").status == 200


def test_connections_are_bounded_and_those_there_are_served(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)

    def status(connection: socket.socket) -> bytes:
        connection.sendall(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b""
        while not found.endswith(b"}"):
            found += connection.recv(65536)
        return found.split(b"\r\n")[0]

    with client.connect() as first, client.connect() as second:
        assert status(first) == status(second) == b"HTTP/1.1 200 OK"
        with client.connect() as third:
            assert _rest(third).startswith(b"HTTP/1.1 503"), "it is closed, not kept"
        assert status(first) == b"HTTP/1.1 200 OK"
    deadline = time.monotonic() + 60
    while client.get("/api/status").status != 200:
        assert time.monotonic() < deadline


def _rest(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    return found


def test_the_status_of_an_ended_run_is_that_of_its_result(run: Path) -> None:
    ended = EndedRun(run)
    result = msgspec.json.decode((run / "result.json").read_bytes(), type=RunResult)
    status = asyncio.run(ended.status())
    assert status["step"] == result.steps
    assert status["accuracy_before"] == result.accuracy_before
    assert status["accuracy_after"] == result.accuracy_after
    assert status["exactly_on_policy"] is result.exactly_on_policy
    refused = asyncio.run(ended.order(control.StopRequest()))
    assert isinstance(refused, control.Refused)
    assert "does not take orders (stop)" in refused.reason
    assert b"<svg" in EndedSections(ended.data).drawn()["timeline"].html


def test_an_address_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} .*monitoring.web.port to 0"):
            listen(WebConfig(port=port))
    with pytest.raises(UserError, match=r"on \[::2\]:9100 \("):
        listen(WebConfig(host="[::2]", port=9100, token_file="/token"))
