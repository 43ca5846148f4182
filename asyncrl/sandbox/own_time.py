"""How long a program has run or slept by its own doing, on a machine that others use too.

    own time = time by the clock, less the time in which it waited for a core

Looks at /proc/PID/task/*/schedstat. Where the kernel does not keep it, no waiting is seen, and all
time is the program's own. Import-light.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

Times = dict[str, tuple[float, float]]
"""By thread, the seconds that it has run and that it has waited for a core."""


@dataclass(slots=True)
class OwnTime:
    """Adds up what looks at one program see.

    Example:
        >>> own = OwnTime()
        >>> own.note(10.0, {"7": (0.0, 0.0)})
        >>> own.note(14.0, {"7": (1.0, 2.0)})  # it has run, waited for a core, and slept
        >>> own.seconds
        2.0
    """

    _began: float | None = None
    _last: float = 0.0
    _ran: float = 0.0
    _waited: float = 0.0
    _seen: Times = field(default_factory=dict)

    def note(self, now: float, times: Times) -> None:
        """Take in a look.

        Args:
            now: monotonic seconds.
            times: of its threads; none: it has not begun, or has ended.
        """
        if not times:
            return
        if self._began is None:
            self._began = now
        self._last = now
        before = [self._seen.get(thread, (0.0, 0.0)) for thread in times]
        pairs = list(zip(times.values(), before, strict=True))
        self._ran += sum(max(0.0, ran - earlier) for (ran, _), (earlier, _) in pairs)
        self._waited += max(max(0.0, waited - earlier) for (_, waited), (_, earlier) in pairs)
        self._seen = dict(times)

    @property
    def seconds(self) -> float:
        """Its own time. Threads that wait for each other's cores hold up nobody else."""
        elapsed = 0.0 if self._began is None else self._last - self._began
        return max(elapsed - self._waited, min(elapsed, self._ran))


def times_of(processes: Iterable[int]) -> Times:
    """Of all threads of these processes."""
    times: Times = {}
    for pid in processes:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    ran, waited = (thread / "schedstat").read_text().split()[:2]
                    times[thread.name] = (int(ran) / 1e9, int(waited) / 1e9)
    return times or dict.fromkeys(map(str, processes), (0.0, 0.0))
