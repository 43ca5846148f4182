"""Serves a run on a socket, with limits on connections, requests and time."""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from asyncrl.web.api import Api, application
from asyncrl.web.controller_link import ControllerLink, EndedRun, Source
from asyncrl.web.feed import MAX_WATCHERS, Feed
from asyncrl.web.guard import MAX_BODY_BYTES, Denial, Policy, denial
from asyncrl.web.sections import EndedSections, LiveSections, Sections
from asyncrl.web.step_file import StepFile

logger = logging.getLogger(__name__)

BODY_SECONDS = 5.0
_LOG_SECONDS = 1.0

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Allows only the page's own files, without inline scripts or styles."""
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
MAX_CONNECTIONS = 2 * MAX_WATCHERS + 112
"""A browser has a stream and briefly a second connection. Further ones are refused with 503."""
REQUEST_SECONDS = 20.0
"""Time limit for a request to arrive on a connection, and for a short answer to be sent."""
SEND_SECONDS = 20.0
"""Time limit for a peer that does not read more than 64 KiB of queued data."""
HEAD_BYTES = 16_384
END_SECONDS = 1
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Guarded:
    """An application behind `guard.denial`: it gets only allowed requests, with their bodies."""

    def __init__(self, application: ASGIApp, policy: Policy) -> None:
        self._application = application
        self._policy = policy
        self._logged = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # web sockets and lifespan are off
            return
        sending = _with_headers(send)
        found = denial(self._policy, scope["method"], scope["path"], scope["headers"])
        if _head_bytes(scope) > HEAD_BYTES:  # h11 bounds only a head that arrives in pieces
            found = Denial(431, f"the head of the request is longer than {HEAD_BYTES} bytes")
        if found is None and scope["method"] == "POST":
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    receive = _already(await _body(receive), receive)
            except TimeoutError:
                found = Denial(408, f"the body did not arrive within {BODY_SECONDS:.0f} s")
        if found is not None:
            self._log(scope, found)
            await _answer(sending, found)
            return
        await self._application(scope, receive, sending)

    def _log(self, scope: Scope, found: Denial) -> None:
        """Log at most one line a second, without headers, which may hold a token."""
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            path, peer = scope["path"][:80], _peer(scope)
            logger.warning("refused %s %r from %s: %s", scope["method"], path, peer, found.reason)


def _head_bytes(scope: Scope) -> int:
    own = len(scope["raw_path"]) + len(scope["query_string"])
    return own + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return "an unknown client" if client is None else f"{client[0]}:{client[1]}"


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        await send(message)

    return sending


async def _body(receive: Receive) -> bytes:
    body = b""
    while len(body) <= MAX_BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return body


def _already(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body at once, then what comes."""
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


async def _answer(send: Send, found: Denial) -> None:
    body = json.dumps({"detail": found.reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if found.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": found.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class BoundedConnection(H11Protocol):
    """A connection that is cut when nothing is received, or nothing can be sent, for too long."""

    _request_deadline: asyncio.TimerHandle | None = None
    _answer_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        if len(self.connections) >= MAX_CONNECTIONS:
            self.transport = transport
            transport.write(_FULL)
            transport.close()
            return
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        """Start the timeout of the next request."""
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        """Start the timeout of a peer that does not read."""
        super().pause_writing()
        self._answer_deadline = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timeout: the peer has read nearly everything."""
        super().resume_writing()
        _cancel(self._answer_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel both timers."""
        _cancel(self._request_deadline)
        _cancel(self._answer_deadline)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        _cancel(self._request_deadline)
        self._request_deadline = self.loop.call_later(REQUEST_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Ends the streams of events when it is asked to end."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Notify watchers, then close."""
        await self._feed.close()
        await super().shutdown(sockets)


async def serve(run: Path, policy: Policy, listening: socket.socket, *, ended: bool) -> None:
    """Serve a run until SIGTERM or SIGINT; an `ended` one is shown without orders."""
    steps = StepFile(run / "metrics.jsonl")
    if ended:
        past = EndedRun(run)
        await serve_from(run, past, EndedSections(past.data), steps, policy, listening)
        return
    with contextlib.closing(ControllerLink(run)) as link:
        await serve_from(run, link, LiveSections(run, steps), steps, policy, listening)


async def serve_from(
    run: Path,
    source: Source,
    sections: Sections,
    steps: StepFile,
    policy: Policy,
    listening: socket.socket,
) -> None:
    """Serve these parts until SIGTERM or SIGINT."""
    with ThreadPoolExecutor(1, "files") as disk, _without_noise():
        feed = Feed(source, sections, disk)
        guarded = Guarded(application(Api(run, source, steps, feed, disk)), policy)
        config = uvicorn.Config(
            guarded, http=BoundedConnection, loop="asyncio", ws="none", lifespan="off",
            log_config=None, access_log=False, proxy_headers=False, server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES, timeout_keep_alive=int(REQUEST_SECONDS),
            timeout_graceful_shutdown=END_SECONDS,
        )  # fmt: skip
        await Server(config, feed).serve([listening])


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Do not log each invalid HTTP request, of which scanners send many."""
    logger = logging.getLogger("uvicorn.error")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
