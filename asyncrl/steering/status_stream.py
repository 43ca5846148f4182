"""Streams the run's status to all watchers: the same bytes, once a second.

    WatchRequest ──► the newest view, and a place in the audience for WATCH_SECONDS
    once a second ──► one view is made and encoded, and sent to the whole audience

Views are made only if there is an audience. A watcher that is gone is forgotten at the next view,
one that does not read when its time is over. Until then at most one view per second is queued for
it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.wire import Hub
from asyncrl.wire.messages import control


@dataclass(eq=False)
class EncodedOnce:
    """A reply that is made and encoded at most once in some seconds, for all clients."""

    _make: Callable[[], control.Reply]
    _seconds: float
    _clock: Callable[[], float] = time.monotonic
    _encoded: msgspec.Raw | None = field(default=None, init=False)
    _made_at: float = field(default=0.0, init=False)

    @property
    def seconds_left(self) -> float:
        """Seconds until it is old; 0 if it is, or was never made."""
        if self._encoded is None:
            return 0.0
        return max(0.0, self._made_at + self._seconds - self._clock())

    def reply(self) -> msgspec.Raw:
        """Return the same bytes for all requests of one interval."""
        if self._encoded is None or not self.seconds_left:
            made_at = self._clock()
            self._encoded = msgspec.Raw(msgspec.msgpack.encode(self._make()))
            self._made_at = made_at
        return self._encoded

    def forget(self) -> None:
        """Drop the reply, since the next client has to see a change."""
        self._encoded = None


def status_reply(config: RunConfig, fleet: Fleet, view: RunView) -> control.StatusReply:
    """Return the answer to `asyncrl status`."""
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
    """Return the message for `asyncrl watch`."""
    return control.ViewReply(msgspec.to_builtins(view))


logger = logging.getLogger(__name__)

VIEW_SECONDS = 1.0
MAX_WATCHERS = 1000
_TURN = 25
"""Number of watchers that are sent a view before other tasks get a turn."""


class Audience:
    """The watchers, and the end of each one's time."""

    def __init__(
        self,
        hub: Hub[Any],
        view: Callable[[], control.ViewReply],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._view = EncodedOnce(view, VIEW_SECONDS, clock)
        self._until: dict[str, float] = {}
        self._has_watchers = asyncio.Event()

    def __len__(self) -> int:
        return len(self._until)

    def join(self, peer: str) -> control.Refused | msgspec.Raw:
        """Add or renew a watcher, and return its answer."""
        if peer not in self._until and len(self._until) >= MAX_WATCHERS:
            return control.Refused(
                f"this run has {MAX_WATCHERS} watchers, the maximum; use `asyncrl status`"
            )
        view = self._view.reply()
        self._until[peer] = self._clock() + control.WATCH_SECONDS
        self._has_watchers.set()
        return view

    async def show(self) -> None:
        """Send views until cancelled."""
        while True:
            await self._has_watchers.wait()
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
            self._has_watchers.clear()
            return
        try:
            view = self._view.reply()
        except Exception:
            logger.exception("the view could not be made; watchers have to ask again")
            self._until.clear()
            return
        peers = list(self._until)
        for start in range(0, len(peers), _TURN):
            for peer in self._hub.send_to_all(peers[start : start + _TURN], view):
                self._until.pop(peer, None)
            yield
