"""Ctrl-C, SIGTERM and SIGHUP: the first signal ends a run in order, the second one at once.

first     finish the current step, write a checkpoint, end; exit code 0
second    kill the run's processes and end; exit code 130, after AT_ONCE_SECONDS at the latest
third     exit now

SIGHUP only counts as a first one: when a terminal is closed, both the kernel and the shell send it.

The handlers are Python's own instead of the event loop's, so that they also run while the loop is
busy. A run that has ended can always be resumed: every checkpoint is complete or absent, and each
step's record is one write.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from asyncrl.errors import Interrupted
from asyncrl.runs.runtime_folders import Endable

AT_ONCE_SECONDS = 5.0
"""Longest time from the second signal to the exit of the process."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(eq=False)
class Interrupts:
    """The signals that one run has received: the first one stops it, the second makes it fail."""

    _run: Endable
    _kill: Callable[[], None]
    """Ends the run's processes; a signal handler or another thread may call it."""
    _clean_up: Callable[[], None]
    """Quickly removes what an immediate exit would leave behind."""
    _say: Callable[[str], None]
    _received: int = field(default=0, init=False)
    _stopping: asyncio.Task[None] | None = field(default=None, init=False)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside the block, in the main thread. Raises Interrupted at its end."""
        loop = asyncio.get_running_loop()

        def handle(number: int, _frame: FrameType | None) -> None:
            if number == signal.SIGHUP and self._received:
                return
            self._received += 1
            if self._received == 1:
                loop.call_soon_threadsafe(self._stop)
            elif self._received == 2:
                loop.call_soon_threadsafe(self._run.fail, Interrupted())
                self._kill()
                timer = threading.Timer(AT_ONCE_SECONDS, self._exit)
                timer.daemon = True
                timer.start()
            else:
                self._exit()

        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        except Exception as error:
            if self._received > 1:
                raise Interrupted from error
            raise
        else:
            if self._received > 1:
                raise Interrupted
        finally:
            if self._received < 2:  # otherwise the process is about to exit
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _stop(self) -> None:
        self._say(
            "stopping: a step that has begun is finished, and a checkpoint is written "
            "(press Ctrl-C again to end at once)"
        )
        self._stopping = asyncio.ensure_future(self._run.stop())
        self._stopping.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._run.fail(error)

    def _exit(self) -> None:
        try:
            self._kill()
            self._clean_up()
        finally:
            os._exit(Interrupted.exit_code)
