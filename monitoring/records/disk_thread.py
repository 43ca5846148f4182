"""A thread for calls that a hanging disk may never end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class DiskThread:
    """Makes one call at a time in a thread of its own, so that the caller need not wait for it.

    The thread is a daemon: a call that never returns does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._returned = threading.Event()
        self._returned.set()
        self._thread = threading.Thread(target=self._serve, name="disk", daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], None]) -> None:
        """Make a call, which must not raise, after those that were begun before."""
        self._returned.clear()
        self._calls.put(call)

    def has_returned(self, seconds: float) -> bool:
        """Whether the call has returned; waits up to this long. One at a time may be begun."""
        return self._returned.wait(seconds)

    def end(self) -> None:
        """Let the thread end when its calls have returned. Nothing may be begun afterwards."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._returned.set()
