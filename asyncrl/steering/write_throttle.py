"""Throttles the writes of a file that many events change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BURST = 8
SECONDS = 1.0


class PacedWrites:
    """Writes at once, or a second later with further changes, since a write blocks the loop."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._written = 0
        self._is_due = False

    def __call__(self) -> None:
        """Write the present state soon. Called in an event loop."""
        if self._written == BURST:
            self._is_due = True
            return
        if self._written == 0:
            asyncio.get_running_loop().call_later(SECONDS, self._begin_again)
        self._written += 1
        self._write()

    def _begin_again(self) -> None:
        self._written = 0
        if self._is_due:
            self._is_due = False
            self()
