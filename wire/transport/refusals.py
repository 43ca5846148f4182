"""Handles refused frames of a socket: counts them, logs a few, cuts their senders off."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.wire.transport.decoding import FrameRefused, Reason

logger = logging.getLogger(__name__)


class Limit(NamedTuple):
    """Limit above which a sender is cut off."""

    frames: int
    seconds: float


NO_PASS = FrameRefused(Reason.UNKNOWN_PEER, "its name and its pass do not belong together")
LIMIT = Limit(100, 10.0)
MAX_SENDERS = 1024
"""Number of remembered senders. Beyond it, the one whose last frame is the oldest is forgotten, so
that memory stays bounded however many names an attacker invents."""
_LOG_SECONDS = 1.0
"""Shortest time between two log lines about refused frames."""


@dataclass(slots=True)
class _Sender:
    since: float
    refused: int = 0
    cut_off: bool = False


class Refusals:
    """The refused frames of one socket; `count` is called with the reason of each."""

    def __init__(
        self,
        count: Callable[[Reason], None] = lambda _: None,
        limit: Limit = LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = count
        self.on_cut_off: Callable[[str, str], None] = lambda *_: None
        """Called once for each sender that is cut off, with its name and the reason."""
        self._limit = limit
        self._clock = clock
        self._senders: OrderedDict[str, _Sender] = OrderedDict()
        self._last_log = self._last_cut_off = float("-inf")
        self._unlogged = 0

    def is_cut_off(self, sender: str) -> bool:
        """Return True if frames of this sender are dropped undecoded."""
        known = self._senders.get(sender)
        return known is not None and known.cut_off

    def note(self, sender: str, error: FrameRefused) -> None:
        """Count a refusal, and log it unless others were logged recently."""
        self.count(error.reason)
        now = self._clock()
        if now - self._last_log < _LOG_SECONDS:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        logger.warning("refused a frame from %r (%s): %s%s", sender, error.reason, error, more)
        self._last_log, self._unlogged = now, 0

    def refuse(self, sender: str, error: FrameRefused) -> None:
        """Note a refused frame; cut off its sender if there were too many."""
        self.note(sender, error)
        now = self._clock()
        known = self._remembered(sender, now)
        if now - known.since > self._limit.seconds:
            known.since, known.refused = now, 0
        known.refused += 1
        if known.refused > self._limit.frames:
            count, seconds = known.refused, self._limit.seconds
            sent = f"sent {count} frames within {seconds:.0f} s that were refused"
            self.cut_off(sender, f"{sent}, the last one because: {error}")

    def cut_off(self, sender: str, why: str) -> None:
        """Drop all further frames of a sender, and report it. Idempotent."""
        now = self._clock()
        known = self._remembered(sender, now)
        if not known.cut_off:
            known.cut_off = True
            if now - self._last_cut_off >= _LOG_SECONDS:  # others are not logged: names are cheap
                logger.error("%r is cut off: it %s", sender, why)
                self._last_cut_off = now
            self.on_cut_off(sender, why)

    def drop(self, sender: str) -> None:
        """Count a frame of a sender that is cut off."""
        self.count(Reason.CUT_OFF)
        self._senders.move_to_end(sender)

    def _remembered(self, sender: str, now: float) -> _Sender:
        known = self._senders.setdefault(sender, _Sender(now))
        self._senders.move_to_end(sender)
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        return known
