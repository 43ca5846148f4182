"""A limit on what a node sends, as a token bucket."""

from __future__ import annotations


class Pace:
    """At most `bytes_per_second` on average, and `burst` bytes at once.

    Args:
        bytes_per_second: None: no limit.
        burst: bytes; what was not sent in a pause may be sent after it up to here.
        now: seconds of a clock that does not jump.
    """

    def __init__(self, bytes_per_second: float | None, burst: int, now: float) -> None:
        self._rate = bytes_per_second
        self._burst = float(burst)
        self._left = float(burst)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until something may be sent."""
        if self._rate is None:
            return 0.0
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, -self._left / self._rate)

    def sent(self, nbytes: int) -> None:
        """So many bytes were sent; the next ones wait until these are paid for."""
        self._left -= nbytes
