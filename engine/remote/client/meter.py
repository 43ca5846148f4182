"""Counters and gauges of a running core."""

from __future__ import annotations

import time


class Meter:
    """What a core has done since its start. The engine adds what each message reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.busy_seconds = 0.0
        self.running = 0
        self.waiting = 0
        self.kv_used = 0.0
        self.prefix_asked = 0
        """Context tokens that new requests came with."""
        self.prefix_found = 0
        """Of those, tokens whose KV was found in the prefix cache."""
        self._busy_since: float | None = None

    def idle(self) -> None:
        """Nothing runs from now on (paused, or the last request was aborted)."""
        self._busy_since = None

    def busy(self) -> None:
        """Something runs from now on."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def loaded(self, running: int, waiting: int, kv_used: float) -> None:
        """Note the load after the last step of a message, and the time that its steps took.

        Args:
            running: requests.
            waiting: requests.
            kv_used: 0 to 1.
        """
        now = time.monotonic()
        if self._busy_since is not None:
            self.busy_seconds += now - self._busy_since
        self.running, self.waiting, self.kv_used = running, waiting, kv_used
        self._busy_since = now if running or waiting else None
