"""Tokens that the core has generated and that requests have not reported yet, as arrays.

`record` copies the new tokens of all requests in a step's table (`StepTable`) to their rows, in one
compiled loop. A chunk is then a slice of one row.

A request is sent with a ticket, a number that comes back with each of its tokens. Tickets are never
used twice, so tokens of a request that was ended from this side are dropped even if its row is in
use again.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.extras import NO_TICKET, StepTable
from asyncrl.engine.sampling.stopping import StopRule, cut_rows
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import ByteArray, FloatArray, IntArray, Provenance

kernel = kernels_of("engine/remote/client")

NO_ROW = -1
NEW = -2
"""The ticket awaits a row: these are the first tokens of its request."""

_SLOT_BITS = 28
"""Bits of the slot. The other 35 count requests: 1,000 a second for a year."""
_FREE = -1

Index = NDArray[np.int64]


class Tickets:
    """The tickets in use, fewer than `1 << slot_bits`: a reused slot and a serial number each."""

    def __init__(self, slot_bits: int = _SLOT_BITS) -> None:
        self._slot_bits = slot_bits
        self._slots = (1 << slot_bits) - 1
        self._serial = 0
        self._free: list[int] = []
        self._ticket: Index = np.full(1, _FREE, np.int64)  # slot 0, that of NO_TICKET, is not used
        self._row: Index = np.full(1, NO_ROW, np.int64)

    def take(self) -> int:
        """Return a new ticket. Raises EngineError if every slot is in use."""
        if not self._free:
            have = len(self._ticket)
            if have > self._slots:
                raise EngineError(
                    f"this generator already has {self._slots:,} unfinished requests, the most "
                    "possible: send it fewer at a time"
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
        """Set the row of a ticket that is in use."""
        self._row[ticket & self._slots] = row

    def give_back(self, ticket: int) -> None:
        """Free a ticket, whose later tokens are dropped. Idempotent."""
        slot = ticket & self._slots
        if ticket != NO_TICKET and self._ticket[slot] == ticket:
            self._ticket[slot] = _FREE
            self._free.append(slot)

    def rows_of(self, tickets: Index) -> tuple[Index, int, bool]:
        """Find the rows of a step's tokens, given `[N]` tickets, adjacent for a request.

        Returns `[N]` rows (NO_ROW for tickets not in use, NEW for those without a row), the most
        tokens of a row, and whether any row is NEW.
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


_DRAFTED, _SAMPLED = int(Provenance.DRAFTED), int(Provenance.SAMPLED)

_ARRAYS = ("_ids", "_logprobs", "_provenance", "_accepted", "_state", "count", "begun", "finite")

Flags = NDArray[np.bool_]


class Tokens(NamedTuple):
    """n tokens of one request with everything that is reported about them."""

    tokens: IntArray
    """`[n]`"""
    logprobs: FloatArray
    """`[n]`"""
    topk_ids: IntArray
    topk_logprobs: FloatArray
    provenance: ByteArray
    """`[n]`"""


class Unreported:
    """The rows of requests that generate: R rows of C tokens with the top K; all three grow.

    A step of n tokens accepted n - 1 drafts and drew one token. If the response ended inside the
    accepted drafts, all its tokens are drafts (`correct_last`). A row is due once it has
    `chunk_tokens` tokens; at first, once it has any.
    """

    def __init__(self, chunk_tokens: int = 1) -> None:
        self._chunk_tokens = chunk_tokens
        self._some_due = False
        self._free: list[int] = []
        self._most = 0  # tokens of a row, at most
        self._rules: dict[int, StopRule] = {}
        self._ids: IntArray = np.empty((0, 0, 1), np.int32)
        self._logprobs: FloatArray = np.empty((0, 0, 1), np.float32)
        self._provenance: ByteArray = np.empty((0, 0), np.uint8)
        self._accepted: Index = np.empty(0, np.int64)
        self._state: IntArray = np.empty(0, np.int32)
        self.count: Index = np.empty(0, np.int64)
        """`[R]` number of tokens to report."""
        self.begun: Flags = np.empty(0, np.bool_)
        """`[R]` whether the request has reported anything."""
        self.finite: Flags = np.empty(0, np.bool_)
        """`[R]` whether the log-probabilities of its tokens are finite."""
        self.recorded = 0

    def open(self, rule: StopRule | None = None, state: int = 0) -> int:
        """Take a row for a request, with its stop rule and the rule's state after its prefix."""
        if not self._free:
            have = len(self.count)
            self._resize(max(16, 2 * have), *self._ids.shape[1:])
            self._free = list(range(len(self.count) - 1, have - 1, -1))
        row = self._free.pop()
        self.count[row] = self._accepted[row] = 0
        self.begun[row], self.finite[row] = False, True
        if rule is not None:
            self._rules[row], self._state[row] = rule, state
        return row

    def close(self, row: int) -> None:
        """Free a row, dropping what it holds."""
        self._rules.pop(row, None)
        self.count[row] = 0
        self._free.append(row)

    def record(self, rows: Index, table: StepTable, longest: int) -> list[int]:
        """Append a step's tokens to `rows` `[N]` (NO_ROW: not wanted), at most `longest` a row.

        Returns the rows whose response was ended by a stop string; later tokens are dropped.
        """
        kept: Index = rows
        ended: list[int] = []
        if self._rules:
            kept, ended = self._cut(rows, table.ids[:, 0])
        self._make_room(longest, table.ids.shape[1])
        recorded, self._most, self._some_due = _record(
            rows, kept, table.ids, table.logprobs, self._ids, self._logprobs, self._provenance,
            self.count, self._accepted, self.begun, self.finite, self._most, self._chunk_tokens,
        )  # fmt: skip
        self.recorded += recorded
        return ended

    def _cut(self, rows: Index, tokens: IntArray) -> tuple[Index, list[int]]:
        """Cut steps after the token that completes a stop string.

        Returns `[N]` rows, with NO_ROW for tokens that were cut off, and the rows that have ended.
        """
        begins = np.flatnonzero(np.diff(rows, prepend=NO_ROW - 1))
        drawn = np.diff(begins, append=len(rows))
        of = np.repeat(np.arange(len(begins)), drawn)
        place = np.arange(len(rows)) - begins[of]
        kept, ended = drawn.astype(np.int32), np.zeros(len(begins), np.bool_)
        given, wanted = rows[begins], rows[begins] >= 0
        states = self._state[given]
        rules = [self._rules.get(row) for row in given.tolist()]
        for rule in {id(rule): rule for rule in rules if rule is not None}.values():
            mine = np.array([other is rule for other in rules])
            own = tokens.astype(np.int64)
            cut_rows(rule.table, rule.classes, mine, states, of, place, own, kept, ended)
        self._state[given[wanted]] = states[wanted]
        return np.where(place < kept[of], rows, NO_ROW), given[ended].tolist()

    def correct_last(self, row: int, accepted: int) -> None:
        """Settle if the last token of an ended response was one of its `accepted` drafts."""
        if accepted > self._accepted[row] and self.count[row]:
            self._provenance[row, self.count[row] - 1] = _DRAFTED

    def due(self) -> list[int]:
        """Return the rows that are due after the last step."""
        if not self._some_due:
            return []
        due = (self.count >= self._chunk_tokens) | (~self.begun & (self.count > 0))
        rows: list[int] = np.flatnonzero(due).tolist()
        return rows

    def take(self, row: int, top_k: int) -> Tokens:
        """Take what is to be reported, with the first K entries of each list."""
        n = int(self.count[row])
        self.count[row] = 0
        self.begun[row] = True
        ids = self._ids[row, :n, : 1 + top_k].copy()
        logprobs = self._logprobs[row, :n, : 1 + top_k].copy()
        provenance = self._provenance[row, :n].copy()
        return Tokens(ids[:, 0], logprobs[:, 0], ids[:, 1:], logprobs[:, 1:], provenance)

    def _make_room(self, tokens: int, width: int) -> None:
        """Ensure that every row has room for this many more tokens of a table of this width."""
        have, wide = self._ids.shape[1:]
        if self._most + tokens > have:
            self._most = int(self.count.max(initial=0))
        needed = self._most + tokens
        if needed > have or width > wide:
            grown = have if needed <= have else max(2 * have, needed)
            self._resize(len(self.count), grown, max(wide, width))

    def _resize(self, rows: int, tokens: int, width: int) -> None:
        """Enlarge the arrays to `[rows, tokens, width]`, keeping their content."""
        for name in _ARRAYS:
            array = getattr(self, name)
            larger = np.zeros((rows, tokens, width)[: array.ndim], array.dtype)
            larger[tuple(map(slice, array.shape))] = array
            setattr(self, name, larger)


@kernel
def _record(
    rows: Index,
    kept: Index,
    ids: IntArray,
    logprobs: FloatArray,
    to_ids: IntArray,
    to_logprobs: FloatArray,
    provenance: ByteArray,
    count: Index,
    accepted: Index,
    begun: Flags,
    finite: Flags,
    most: int,
    chunk_tokens: int,
) -> tuple[int, int, bool]:
    """Append token i of a table to `kept[i]`; `rows[i]` is its row if nothing were cut off.

    Returns the number of appended tokens, the most tokens of a row (`most` before), and whether one
    of these rows is due.
    """
    width, total, due = ids.shape[1], 0, False
    for i in range(len(rows)):
        row = kept[i]
        if row < 0:
            continue
        at = count[row]
        for k in range(width):
            to_logprobs[row, at, k] = logprobs[i, k]
            to_ids[row, at, k] = ids[i, k]
        finite[row] &= np.isfinite(logprobs[i, 0])
        drafted = i + 1 < len(rows) and rows[i + 1] == row
        provenance[row, at] = _DRAFTED if drafted else _SAMPLED
        accepted[row] += drafted
        count[row] = at + 1
        total += 1
        most = max(most, count[row])
        due |= not begun[row] or count[row] >= chunk_tokens
    return total, most, due


def warm_up() -> None:
    """Compile what a step calls, or load the compiled code."""
    table = StepTable(
        np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32), np.array([NO_TICKET], np.int64)
    )
    for array in table:
        array.setflags(write=False)
    rows, longest, _ = Tickets().rows_of(table.tickets)
    Unreported().record(rows, table, longest)
