"""Ports of an agent's children, where the user has fixed them. Pure."""

from __future__ import annotations

import re

from asyncrl.config.agents import MAX_PORT
from asyncrl.errors import UserError

NEEDED = {"trainer": 1, "relay": 3, "generator": 0}
"""How many a process listens at, by role."""


class Ports:
    """Hands out ports of a range, and takes them back.

    Args:
        text: `FIRST-LAST`; empty: the system chooses.

    Raises:
        UserError: it is no range, or too small for a trainer and a relay.
    """

    def __init__(self, text: str) -> None:
        self._free: list[int] | None = None
        self._given: dict[str, list[int]] = {}
        if not text:
            return
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        least = sum(NEEDED.values())
        if not 1 <= first <= last <= MAX_PORT or last - first + 1 < least:
            raise UserError(
                f"--ports {text}: must be FIRST-LAST with at least {least} ports from 1 to "
                f"{MAX_PORT}, for example 5910-5919"
            )
        self._free = list(range(first, last + 1))

    def give(self, process: str, role: str) -> tuple[int, ...]:
        """Ports for a process; empty: the system chooses.

        Raises:
            UserError: too few are left.
        """
        if self._free is None:
            return ()
        count = NEEDED[role]
        if count > len(self._free):
            raise UserError(
                f"{process} needs {count} ports, and --ports has {len(self._free)} left over"
            )
        self._given[process] = self._free[:count]
        del self._free[:count]
        return tuple(self._given[process])

    def take_back(self, process: str) -> None:
        """The process has ended."""
        if self._free is not None:
            self._free = sorted(self._free + self._given.pop(process, []))
