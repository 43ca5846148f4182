"""Those who watch a run: all are sent the same bytes, once a second, without asking again.

    WatchRequest ──► the newest view, and a place in the audience for WATCH_SECONDS
    once a second ──► one view is made and encoded, and sent to the whole audience

Without an audience nothing is made. A watcher that is gone is forgotten when it is sent something;
one that takes nothing, when its time is over. Until then at most one view per second waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from asyncrl.steering.replies import EncodedOnce
from asyncrl.wire.messages import control

logger = logging.getLogger(__name__)

VIEW_SECONDS = 1.0
"""Between two views."""
MAX_WATCHERS = 1000
_TURN = 25
"""Watchers that are sent a view before other tasks get a turn."""


class Sender(Protocol):
    """The socket of users (`wire.Hub`)."""

    def send_to_all(self, peers: Iterable[str], body: msgspec.Raw) -> list[str]:
        """Send to many; returns those who cannot be sent anything."""


class Audience:
    """Who watches, and until when.

    Args:
        hub: sends.
        view: makes what is shown.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        hub: Sender,
        view: Callable[[], control.ViewReply],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._view = EncodedOnce(view, VIEW_SECONDS, clock)
        self._until: dict[str, float] = {}
        """When each one's time is over."""
        self._somebody = asyncio.Event()

    def __len__(self) -> int:
        return len(self._until)

    def join(self, peer: str) -> control.Refused | msgspec.Raw:
        """A watcher asks, for the first time or again. Returns what it is answered."""
        if peer not in self._until and len(self._until) >= MAX_WATCHERS:
            return control.Refused(
                f"{MAX_WATCHERS} watch this run already; `asyncrl status` works without a place"
            )
        view = self._view.reply()
        self._until[peer] = self._clock() + control.WATCH_SECONDS
        self._somebody.set()
        return view

    async def show(self) -> None:
        """Send views until cancelled."""
        while True:
            await self._somebody.wait()
            if (left := self._view.seconds_left) > 0:
                await asyncio.sleep(left)
                continue
            for _ in self.send_view():
                await asyncio.sleep(0)

    def send_view(self) -> Iterator[None]:
        """Send one view to the whole audience, a few watchers at a time."""
        now = self._clock()
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        if not self._until:
            self._somebody.clear()
            return
        try:
            view = self._view.reply()
        except Exception:
            logger.exception("there is no view for those who watch; they have to ask again")
            self._until.clear()
            return
        everybody = list(self._until)
        for start in range(0, len(everybody), _TURN):
            for peer in self._hub.send_to_all(everybody[start : start + _TURN], view):
                self._until.pop(peer, None)
            yield
