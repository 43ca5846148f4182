"""One producer for all watchers of a run.

While there are watchers, it asks for the status once a second and draws the sections as often as
that is cheap. Each watcher takes the newest snapshot when it can, so nothing is buffered for it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.web.controller_link import ASK_SECONDS, Source, Status
from asyncrl.web.sections import Section, Sections

logger = logging.getLogger(__name__)

MAX_WATCHERS = 200
DRAW_SECONDS = 3.0
DRAW_SHARE = 0.05
SECONDS_PER_WATCHER = 0.15
"""Increase of the drawing interval per watcher, since each watcher fetches what was drawn."""


class Feed:
    """Snapshots of a run for all watchers."""

    def __init__(self, source: Source, sections: Sections, disk: ThreadPoolExecutor) -> None:
        self._source = source
        self._sections = sections
        self._disk = disk
        self._drawn: Mapping[str, Section] = {}
        self._draw_at = float("-inf")
        self._watchers = self._streams = 0
        self._snapshot = b""
        self._number = 0
        self._newer = asyncio.Condition()
        self._producer: asyncio.Task[None] | None = None
        self._drawing = asyncio.Lock()
        self.closed = False

    async def section(self, name: str) -> Section:
        """Return the latest drawing of a section. Raises KeyError."""
        await self._draw()
        return self._drawn[name]

    @contextlib.contextmanager
    def stream(self) -> Iterator[bool]:
        """Count a stream; yield False if there are MAX_WATCHERS already."""
        is_free = self._streams < MAX_WATCHERS
        self._streams += is_free
        try:
            yield is_free
        finally:
            self._streams -= is_free

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield snapshots as JSON until the feed is closed."""
        self._watchers += 1
        try:
            seen = 0
            if self._producer is None or self._producer.done():
                self._producer = asyncio.create_task(self._produce())
                seen = self._number  # the last one is as old as the last watcher
            while True:
                async with self._newer:
                    while self._number == seen and not self.closed:
                        await self._newer.wait()
                if self.closed:
                    return
                seen = self._number
                yield self._snapshot
        finally:
            self._watchers -= 1

    async def close(self) -> None:
        """End all streams."""
        self.closed = True
        async with self._newer:
            self._newer.notify_all()
        if self._producer is not None:
            self._producer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._producer

    async def _produce(self) -> None:
        while self._watchers and not self.closed:
            began = time.monotonic()
            await self._draw()
            try:
                await self._publish(await self._source.status(), None)
            except AsyncrlError as failure:
                await self._publish(None, str(failure))
            await asyncio.sleep(max(0.05, ASK_SECONDS - (time.monotonic() - began)))

    async def _publish(self, status: Status | None, error: str | None) -> None:
        snapshot = {
            "time": round(time.time(), 3),  # noqa: TID251 - for the reader
            "status": status,
            "error": error,
            "sections": {name: one.version for name, one in self._drawn.items()},
            "watchers": self._watchers,
            "takes_orders": self._source.takes_orders,
        }
        async with self._newer:
            self._snapshot = msgspec.json.encode(snapshot)
            self._number += 1
            self._newer.notify_all()

    async def _draw(self) -> None:
        async with self._drawing:
            began = time.monotonic()
            if began < self._draw_at:
                return
            loop = asyncio.get_running_loop()
            try:
                self._drawn = await loop.run_in_executor(self._disk, self._sections.drawn)
            except Exception:
                logger.exception("cannot draw the sections of the page")
            took = time.monotonic() - began
            pause = max(DRAW_SECONDS, took / DRAW_SHARE, self._watchers * SECONDS_PER_WATCHER)
            self._draw_at = time.monotonic() + pause
