"""Stops and resumes drawing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.engine.remote.client.core import Core
from asyncrl.engine.remote.client.streams import Streams


class Pausing:
    """Stops and resumes drawing; one change at a time."""

    def __init__(self, core: Core, streams: Streams) -> None:
        self._core = core
        self._streams = streams
        self._lock = asyncio.Lock()
        self.paused = False
        """By `pause`; not set while `stopped` has stopped it."""

    async def pause(self) -> None:
        """Stop drawing and report what was drawn; running requests stay. Idempotent."""
        async with self._lock:
            if not self.paused:
                await self._stop()
                self.paused = True

    async def resume(self) -> None:
        """Resume drawing after `pause`. Idempotent."""
        async with self._lock:
            if self.paused:
                await self._resume()
                self.paused = False

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """No token is drawn inside the block. After an exception drawing is not resumed."""
        async with self._lock:
            if not self.paused:
                await self._stop()
            yield
            if not self.paused:
                await self._resume()

    async def _stop(self) -> None:
        await self._core.pause()
        self._streams.flush()

    async def _resume(self) -> None:
        await self._core.resume()
        if len(self._streams):
            self._core.meter.busy()
