"""Which row the tokens of a step's table belong to.

A request that generates has a ticket: a number that it is sent with and that comes back with each
of its tokens (`StepTable`). Tickets are never used twice, so tokens of a request that was ended
from this side belong to nobody, whoever has its row now.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.extras import NO_TICKET
from asyncrl.rollout.jit import kernels_of

kernel = kernels_of("engine/remote/client")

NO_ROW = -1
"""Nobody waits for the tokens of this ticket."""
NEW = -2
"""The ticket has no row yet: these are the first tokens of its request."""

_SLOT_BITS = 28
"""Of 63. The other 35 count requests: 1,000 a second for a year."""
_FREE = -1

Index = NDArray[np.int64]


class Tickets:
    """The tickets that are taken. A ticket is a slot and a serial number; slots are used again.

    Args:
        slot_bits: bits of the slot, at least 4: fewer than `1 << slot_bits` tickets can be taken
            at a time.
    """

    def __init__(self, slot_bits: int = _SLOT_BITS) -> None:
        self._slot_bits = slot_bits
        self._slots = (1 << slot_bits) - 1
        self._serial = 0
        self._free: list[int] = []
        self._ticket: Index = np.full(1, _FREE, np.int64)  # slot 0, that of NO_TICKET, is not used
        self._row: Index = np.full(1, NO_ROW, np.int64)

    def take(self) -> int:
        """A new ticket.

        Raises:
            EngineError: every slot has a ticket: another one would name two requests.
        """
        if not self._free:
            have = len(self._ticket)
            if have > self._slots:
                raise EngineError(
                    f"this generator has {self._slots:,} unfinished requests, and cannot tell more "
                    "apart: send it fewer at a time"
                )
            more = np.full(max(15, have), _FREE, np.int64)
            self._ticket = np.concatenate([self._ticket, more])
            self._row = np.concatenate([self._row, more])
            self._free = list(range(len(self._ticket) - 1, have - 1, -1))
        slot = self._free.pop()
        self._serial += 1
        ticket = self._serial << self._slot_bits | slot
        self._ticket[slot], self._row[slot] = ticket, NEW
        return ticket

    def set_row(self, ticket: int, row: int) -> None:
        """The row of a ticket that is taken."""
        self._row[ticket & self._slots] = row

    def give_back(self, ticket: int) -> None:
        """Nobody waits for the tokens of this ticket any more. Idempotent."""
        slot = ticket & self._slots
        if ticket != NO_TICKET and self._ticket[slot] == ticket:
            self._ticket[slot] = _FREE
            self._free.append(slot)

    def rows_of(self, tickets: Index) -> tuple[Index, int, bool]:
        """Find the rows of a step's tokens.

        Args:
            tickets: `[N]` those of a request follow each other.

        Returns:
            `[N]` rows: NO_ROW for tickets that are not taken, NEW for those without a row; the most
            tokens of a row; and whether any row is NEW.
        """
        return _rows_of(tickets, self._ticket, self._row, self._slots)


@kernel
def _rows_of(tickets: Index, taken: Index, row_of: Index, mask: int) -> tuple[Index, int, bool]:
    rows = np.empty(len(tickets), np.int64)
    longest, run, new = 0, 0, False
    for i in range(len(tickets)):
        slot = tickets[i] & mask
        rows[i] = row_of[slot] if taken[slot] == tickets[i] else NO_ROW
        new |= rows[i] == NEW
        run = run + 1 if i and rows[i] == rows[i - 1] else 1
        longest = max(longest, run)
    return rows, longest, new
