"""Those who watch a run: all are sent the same bytes, once a second, without asking again.

    WatchRequest ──► the newest view, and a place in the audience for WATCH_SECONDS
    once a second ──► one view is made and encoded, and sent to the whole audience

Without an audience nothing is made. A watcher that is gone is forgotten when it is sent something;
one that takes nothing, when its time is over. Until then at most one view per second waits for it.

What the controller tells users of a run: made once in a while, encoded once, for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.wire.messages import control


class EncodedOnce:
    """A reply that is made and encoded at most once in an interval, however many ask.

    Args:
        make: makes it.
        seconds: length of the interval, and the greatest age of what `reply` gives.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        make: Callable[[], control.Reply],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._seconds = seconds
        self._clock = clock
        self._encoded: msgspec.Raw | None = None
        self._made_at = 0.0

    @property
    def seconds_left(self) -> float:
        """Until it is old; 0 if it is, or has never been made."""
        if self._encoded is None:
            return 0.0
        return max(0.0, self._made_at + self._seconds - self._clock())

    def reply(self) -> msgspec.Raw:
        """The same bytes for all who ask in one interval."""
        if self._encoded is None or not self.seconds_left:
            made_at = self._clock()
            self._encoded = msgspec.Raw(msgspec.msgpack.encode(self._make()))
            self._made_at = made_at
        return self._encoded

    def forget(self) -> None:
        """Something has changed that the next one who asks has to see."""
        self._encoded = None


def status_reply(config: RunConfig, fleet: Fleet, view: RunView) -> control.StatusReply:
    """The answer to `asyncrl status`."""
    processes = {
        worker.name: {
            "state": worker.state,
            "policy_version": worker.policy_version,
            "metrics_port": worker.metrics_port,
        }
        for worker in fleet.everyone()
    }
    return control.StatusReply(
        {
            "run": config.run.name,
            "steps": config.run.steps,
            "engine": config.engine_kinds,
            **view.as_status(),
            "processes": processes,
        }
    )


def view_reply(view: RunView) -> control.ViewReply:
    """What `asyncrl watch` is sent."""
    return control.ViewReply(msgspec.to_builtins(view))


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
