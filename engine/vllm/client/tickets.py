"""Which row the tokens of a step's table belong to.

A request that generates has a ticket: a number that it is sent with and that comes back with each
of its tokens (`engine.vllm.extras.StepTable`). Tickets are never used twice, so tokens of a request
that was ended from this side belong to nobody, whoever has its row now.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.vllm.extras import NO_TICKET

NO_ROW = -1
"""Nobody waits for the tokens of this ticket."""
NEW = -2
"""The ticket has no row yet: these are the first tokens of its request."""

_SLOT_BITS = 20
_SLOTS = (1 << _SLOT_BITS) - 1
_FREE = -1

Index = NDArray[np.int64]


class Tickets:
    """The tickets that are taken. A ticket is a slot and a serial number; slots are used again."""

    def __init__(self) -> None:
        self._serial = 0
        self._free: list[int] = []
        self._ticket: Index = np.full(1, _FREE, np.int64)  # slot 0, that of NO_TICKET, is not used
        self._row: Index = np.full(1, NO_ROW, np.int64)

    def take(self) -> int:
        """A new ticket."""
        if not self._free:
            have = len(self._ticket)
            more = np.full(max(15, have), _FREE, np.int64)
            self._ticket = np.concatenate([self._ticket, more])
            self._row = np.concatenate([self._row, more])
            self._free = list(range(len(self._ticket) - 1, have - 1, -1))
        slot = self._free.pop()
        self._serial += 1
        ticket = self._serial << _SLOT_BITS | slot
        self._ticket[slot], self._row[slot] = ticket, NEW
        return ticket

    def set_row(self, ticket: int, row: int) -> None:
        """The row of a ticket that is taken."""
        self._row[ticket & _SLOTS] = row

    def give_back(self, ticket: int) -> None:
        """Nobody waits for the tokens of this ticket any more. Idempotent."""
        slot = ticket & _SLOTS
        if ticket != NO_TICKET and self._ticket[slot] == ticket:
            self._ticket[slot] = _FREE
            self._free.append(slot)

    def rows_of(self, tickets: Index) -> Index:
        """`[N]` rows; NO_ROW for tickets that are not taken, NEW for those without a row."""
        slots = tickets & _SLOTS
        return np.where(self._ticket[slots] == tickets, self._row[slots], NO_ROW)
