"""Serves a run on a socket, with limits on connections, requests and time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from asyncrl.web.api import Api, application
from asyncrl.web.controller_link import ControllerLink, EndedRun, Source
from asyncrl.web.feed import MAX_WATCHERS, Feed
from asyncrl.web.guard import Policy
from asyncrl.web.middleware import Guarded
from asyncrl.web.sections import EndedSections, LiveSections, Sections
from asyncrl.web.step_file import StepFile

MAX_CONNECTIONS = 2 * MAX_WATCHERS + 112
"""A browser has a stream and for a while a second connection. Further ones are refused with 503."""
REQUEST_SECONDS = 20.0
"""Longest time for a request to arrive on a connection, and for a short answer to be taken."""
SEND_SECONDS = 20.0
"""A peer that does not take what waits for it, more than 64 KiB, is cut off after this time."""
HEAD_BYTES = 16_384
END_SECONDS = 1
"""Time that connections get when the process is asked to end."""


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedConnection(H11Protocol):
    """A connection that is cut when nothing comes on it, or nothing is taken, for too long."""

    _request_deadline: asyncio.TimerHandle | None = None
    _answer_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to come in time."""
        if len(self.connections) >= MAX_CONNECTIONS:
            self.transport = transport
            transport.write(_FULL)
            transport.close()
            return
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        """So has the next one."""
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        """The peer takes less than it is sent."""
        super().pause_writing()
        self._answer_deadline = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken nearly all."""
        super().resume_writing()
        _cancel(self._answer_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
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
        """Tell those who watch, then close."""
        await self._feed.close()
        await super().shutdown(sockets)


async def serve(run: Path, policy: Policy, listening: socket.socket, *, ended: bool) -> None:
    """Serve a run until SIGTERM or SIGINT.

    Args:
        run: the run's folder.
        policy: who may ask for what.
        listening: a socket that listens.
        ended: whether the run has ended: its folder is shown, and no order is taken.
    """
    steps = StepFile(run / "metrics.jsonl")
    if ended:
        past = EndedRun(run)
        await serve_from(Parts(run, past, EndedSections(past.data), steps), policy, listening)
        return
    link = ControllerLink(run)
    with contextlib.closing(link):
        await serve_from(Parts(run, link, LiveSections(run, steps), steps), policy, listening)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is served."""

    run: Path
    """The run's folder."""
    source: Source
    sections: Sections
    steps: StepFile


async def serve_from(parts: Parts, policy: Policy, listening: socket.socket) -> None:
    """Serve these parts until SIGTERM or SIGINT."""
    with ThreadPoolExecutor(1, "files") as disk, _without_noise():
        feed = Feed(parts.source, parts.sections, disk)
        api = Api(parts.run, parts.source, parts.steps, feed, disk)
        await Server(_config(Guarded(application(api), policy)), feed).serve([listening])


def _config(guarded: Any) -> uvicorn.Config:
    return uvicorn.Config(
        guarded,
        http=BoundedConnection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=int(REQUEST_SECONDS),
        timeout_graceful_shutdown=END_SECONDS,
    )


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Requests that are no HTTP, of which a scanner makes many, are not logged one by one."""
    logger = logging.getLogger("uvicorn.error")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
