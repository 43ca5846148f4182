"""A clock that a test moves by hand."""

from __future__ import annotations

from asyncrl.monitoring.records.timeline import Clock


class FakeClock:
    """Monotonic seconds that stand still until `now` is set; call it to read them."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def clock(self, wall_offset: float) -> Clock:
        """A `Clock` whose wall clock is this many seconds ahead."""
        return Clock(monotonic=self, wall=lambda: self.now + wall_offset)
