"""Lets many callers through at once, or one alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turnstile:
    """Many may be inside at once; one that must be alone waits until all have left.

    While one waits to be alone nobody else enters, so it gets its turn. Leaving waits for nothing:
    whoever is cancelled inside has told those that wait.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._inside = 0
        self._alone = 0
        """Callers that are or want to be inside alone."""
        self._occupied = False

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait to be let through, and leave at the end."""
        if not alone:
            await self._until(lambda: not self._alone)
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1
                self._changed.set()
            return
        self._alone += 1
        try:
            await self._until(lambda: not self._inside and not self._occupied)
            self._occupied = True
            try:
                yield
            finally:
                self._occupied = False
        finally:
            self._alone -= 1
            self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
