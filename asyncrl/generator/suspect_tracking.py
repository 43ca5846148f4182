"""Processes that ended with a sample's environment, and whether the sample is at fault. Pure.

A process serves many samples at once, so its end alone does not say which of them caused it:

    one call was in progress      that sample is at fault, once: a death
    several were                  each is a suspect: its calls run alone until as many turns are
                                  answered as its environment had been given, also if the sample
                                  starts over meanwhile. So the one at fault ends a process alone
    none was                      nobody is known to be at fault

An end is explained once a sample is known to be at fault for it, and then counts for no other
sample. Each sample has a bound for its deaths, and one for ends that stay unexplained: an
environment that ends its process between calls, or with a delay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.environments.lane import ProcessEnd, SessionLost
from asyncrl.environments.protocol import FailureReason

MAX_UNEXPLAINED = 50
"""Ends without a sample at fault before that counts as a failure."""


@dataclass(slots=True)
class ProcessEnds:
    """Those of one sample."""

    count: int = 0
    """All of them."""
    deaths: int = 0
    """Those while only this sample was served."""
    _alone_until: int | None = None
    """Turns that must be answered until its calls run with others; 0: it must be opened."""
    _open: list[ProcessEnd] = field(default_factory=list)
    """Those that were not explained when they were last looked at."""
    _suspected: list[ProcessEnd] = field(default_factory=list)
    """Those of them that a call of this sample may have caused."""

    @property
    def alone(self) -> bool:
        """Whether its calls run alone in their process."""
        return self._alone_until is not None

    @property
    def unexplained(self) -> int:
        """Those for which no sample is known to be at fault."""
        return sum(not end.explained for end in self._open)

    def note(self, lost: SessionLost, given: int) -> None:
        """A process has ended with the sample's session.

        Args:
            lost: as its call raised it.
            given: turns that the session had been given, the one in progress included.
        """
        self.count += 1
        self._open = [end for end in (*self._open, lost.end) if not end.explained]
        self._suspected = [end for end in self._suspected if not end.explained]
        if lost.suspects:
            self._suspected.append(lost.end)
            self._alone_until = max(given, self._alone_until or 0)
        if lost.suspects == 1:
            self.deaths += 1
            self.explain()

    def fault(self, lost: SessionLost, max_attempts: int) -> tuple[FailureReason, str] | None:
        """Why the sample has failed, now that this is noted, and a sentence; None: it has not."""
        if lost.suspects == 1 and lost.too_many:
            return "too_many_processes", str(lost)
        if self.deaths >= max_attempts:
            return "died", str(lost)
        if self.unexplained > MAX_UNEXPLAINED:
            return "died", (
                f"{lost}. That was process number {self.unexplained} which ended under this sample "
                "with no sample known to be at fault: the environment ends its process between "
                "calls, with a delay, or only under several samples at once"
            )
        return None

    def explain(self) -> None:
        """This sample is at fault: what it was suspected of says nothing about others."""
        for end in self._suspected:
            end.explained = True

    def answered(self, turns: int) -> None:
        """So many turns of the present session are answered; 0: it was opened."""
        if self._alone_until is not None and turns >= self._alone_until:
            self._alone_until = None

    def forget(self) -> None:
        """What it has failed at is gone; whether it is a suspect stays."""
        self.count = self.deaths = 0
        self._open.clear()
        self._suspected.clear()
