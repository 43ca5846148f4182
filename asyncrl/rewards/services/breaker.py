"""A circuit breaker: after some failed calls in a row, calls fail at once for a while.

    closed ── `failures` failed calls in a row ──► open ── after `seconds` ──► half open
       ▲                                            ▲                             │
       └──────────── the probe succeeds ────────────┼─────────────────────────────┤
                                                    └────── the probe fails ──────┘

A call that fails has used all its attempts, or all its time. So an outage that is shorter than
`rewards.timeout_seconds` opens nothing. While the breaker is open, a run with `rewards.on_error:
zero` does not spend that time on every sample.
"""

from __future__ import annotations

from collections.abc import Callable


class Breaker:
    """Decides whether a call may be made. Pure: the clock is given.

    Args:
        failures: failed calls in a row that open it.
        seconds: from when it opens until one call, the probe, is let through.
        clock: monotonic seconds.

    Example:
        >>> now = 0.0
        >>> breaker = Breaker(2, 30.0, lambda: now)
        >>> [(breaker.admits(), breaker.failed()) for _ in range(2)]
        [(True, False), (True, True)]
        >>> breaker.admits()
        False
        >>> now = 30.0
        >>> breaker.admits(), breaker.admits()
        (True, False)
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float]) -> None:
        self._failures, self._seconds, self._clock = failures, seconds, clock
        self._in_a_row = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once, the probe excepted."""
        return self._open_until is not None

    @property
    def seconds_left(self) -> float:
        """Until the next probe; 0 if it is closed or the probe is due."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def admits(self) -> bool:
        """Whether a call may be made now. If so, one of the three methods below must follow.

        The call is the probe if the breaker is open then.
        """
        if self._open_until is None:
            return True
        if self._probing or self._clock() < self._open_until:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The server has answered."""
        self._in_a_row, self._open_until, self._probing = 0, None, False

    def failed(self, *, probe: bool = False) -> bool:
        """A call failed; True if this opened the breaker, or kept it open after the probe."""
        self._in_a_row += 1
        if self._in_a_row < self._failures:
            return False
        if self.is_open and not probe:  # a call from before it opened
            return False
        self._open_until, self._probing = self._clock() + self._seconds, False
        return True

    def abandoned(self, *, probe: bool = False) -> None:
        """The call was given up and says nothing. If it was the probe, the next call is one."""
        if probe:
            self._probing = False
