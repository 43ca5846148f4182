"""Serves a run on a socket, with limits on connections, requests and time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

MAX_CONNECTIONS = MAX_WATCHERS + 56
"""Further ones are answered with 503."""
REQUEST_SECONDS = 20.0
"""Longest time for a request to arrive on a connection, and for a short answer to be taken."""
HEAD_BYTES = 16_384
END_SECONDS = 1
"""Time that connections get when the process is asked to end."""


class BoundedConnection(H11Protocol):
    """A connection that is closed when nothing comes on it, or nothing is taken, for too long."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to come in time."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """The answer has to be taken, and the next request has to come, in time."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def _has_answered(self) -> bool:
        """Whether no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        if self._has_answered:
            self.transport.abort()


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
    with ThreadPoolExecutor(1, "files") as disk, contextlib.ExitStack() as closing:
        steps = StepFile(run / "metrics.jsonl")
        source: Source
        sections: Sections
        if ended:
            source = EndedRun(run)
            sections = EndedSections(source.data)
        else:
            source = link = ControllerLink(run)
            closing.callback(link.close)
            sections = LiveSections(run, steps)
        feed = Feed(source, sections, disk)
        guarded = Guarded(application(Api(run, source, steps, feed, disk)), policy)
        with _without_noise():
            await Server(_config(guarded), feed).serve([listening])


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
        limit_concurrency=MAX_CONNECTIONS,
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
