"""Applies `guard` to every request, and puts the headers of a locked-down page on every answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl.web.guard import MAX_BODY_BYTES, Denial, Policy, denial

logger = logging.getLogger(__name__)

BODY_SECONDS = 5.0
"""Longest time for the body of a request to arrive."""
_LOG_SECONDS = 1.0

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing but the page's own files; no script or style within the page."""
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guarded:
    """An application that only gets requests which `guard.denial` lets pass, with their bodies."""

    def __init__(self, application: ASGIApp, policy: Policy) -> None:
        self._application = application
        self._policy = policy
        self._logged = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # no web sockets; uvicorn is told to run no lifespan
            return
        sending = _with_headers(send)
        found = denial(self._policy, scope["method"], scope["path"], scope["headers"])
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
        """At most one line a second, without headers: they may hold a token."""
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            path = scope["path"][:80]
            logger.warning(
                "refused %s %r of %s: %s", scope["method"], path, _peer(scope), found.reason
            )


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return "somebody" if client is None else f"{client[0]}:{client[1]}"


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        await send(message)

    return sending


async def _body(receive: Receive) -> bytes:
    """The whole body, whose length the guard has seen."""
    body = b""
    while len(body) <= MAX_BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return body


def _already(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once, then what comes."""
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


async def _answer(send: Send, found: Denial) -> None:
    body = json.dumps({"detail": found.reason}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if found.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": found.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
