"""Lets the phases of a run wait for conditions, and ends their waits when the run breaks."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from asyncrl.errors import WaitTimeout

_PIECE_SECONDS = 0.5
"""Time limits are counted in pieces of this length: a process that was suspended for long loses one
of them, and not the whole limit."""


class ConditionWait:
    """Condition variable of a run's phases, which evaluate their conditions after each `notify`."""

    def __init__(self) -> None:
        self.stop_requested = False
        """The user wants the run to end after the current step. Set before `notify`."""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def notify(self) -> None:
        """Make waiting phases evaluate their conditions again."""
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """End the run: raise this error in the waiting phase. Only the first error counts."""
        if self._error is None:
            self._error = error
        self._changed.set()

    async def next_change(self) -> None:
        """Wait for the next `notify`. Raises the error given to `fail`, if there is one."""
        self._changed.clear()
        if self._error is None:
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def until(
        self,
        condition: Callable[[], bool],
        *,
        seconds: float,
        what: Callable[[], str],
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        """Wait until the condition holds, at most `seconds` without `progress`.

        It is evaluated after every change. A change of `progress()` restarts the limit; time in
        which this process was suspended does not count. Raises WaitTimeout with `what()`.
        """
        waited, made = 0.0, progress()
        while not condition():
            if progress() != made:
                waited, made = 0.0, progress()
            if waited >= seconds:
                raise WaitTimeout(f"waited {seconds:.0f} s for {what()}")
            piece, began = min(_PIECE_SECONDS, seconds - waited), time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(piece):
                    await self.next_change()
            waited += min(piece, time.monotonic() - began)
