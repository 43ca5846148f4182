"""The seconds of a step by tokens, rows and context, learned from the steps of this run.

    seconds = scale x (table[asked, tokens] + slopes . (context, rows))

- The **table** has a cell for each number of tokens up to 32, and eight cells per octave above,
  each with decayed means. Steps for which the cache was asked for drafts have separate cells.
  The table is read as a rising curve, so that noise makes no false cheap spot.
- The **slopes** are fitted within cells, from steps of equal tokens that differ in context or
  rows. A slope that is not clearly there is 0.
- The **scale** follows what all steps have in common, such as another program on this machine.

A difference is cut to three times the usual one, and the quicker of a cell's first two steps
counts, so a stalled step does little harm. The cells are one array for compiled code, because they
are read after almost every step in which rows have ended (decision 0032).
"""

import math
from typing import Any

import numpy as np

from asyncrl.engine.drafting.calibration import Floats, rising
from asyncrl.rollout.jit import kernels_of

kernel = kernels_of("engine")

CELLS = 256
"""Enough for the largest number of tokens that an int32 holds."""
CELL = np.dtype(
    [(name, np.float64) for name in ("seconds", "tokens", "context", "rows", "weight", "seen")]
)
"""Decayed means of steps of about one size. `seconds` is divided by the scale; `context` is keys
attended to; `weight`: steps in the mean, 0 if none; `seen`: number of the last step."""
COMMON = np.dtype(
    [
        (name, np.float64)
        for name in (
            "scale", "spread", "drift", "upset", "per_row", "steps", "max_tokens", "read_at",
            "by_context", "by_rows", "cc", "cr", "rr", "cy", "ry", "noise", "evidence",
        )
    ]
)  # fmt: skip
"""State that all cells share. `upset`: the last step at which costs were found to have changed.
`per_row`: unscaled seconds of asking the cache about one row. `read_at`: step of the last fit.
`by_context` and `by_rows`: the slopes; `cc` to `evidence`: sums of their least squares."""
PLAIN, ASKED = 0, 1
"""Kinds of steps: rows of the table."""

_EXACT = 32
"""Largest number of tokens that has a separate cell."""
_MEMORY = 24.0
"""Steps that a cell's mean remembers."""
_HALF_LIFE = 2000.0
"""Steps after which a cell's weight is halved."""
_STALE = 600
"""Steps after which a cell is stale. A cell from before the last upset is stale, too."""
_UPSET = 0.08
"""An upset is a lasting difference of steps from their expectation by this share."""
_YOUNG = 4.0
"""Below this weight a cell learns fast, and what it learns is used at once."""
_SCALE_STEP = 0.02
"""Share of a step's difference by which the scale moves."""
_SCALE_LEAP = 0.1
"""Additional share per usual difference by which recent steps differ in one direction."""
_REFRESH = 16
_SUPERLINEAR = 1.25
"""A larger step costs at most this many times as much per token as a smaller one."""
_FADE = 0.998
"""Decay of the evidence for the slopes, per step."""
_FAR = 64.0
"""The curve is extrapolated to this many times the tokens seen."""
_SHORTEST, _LONGEST = 1e-9, 1e6
"""Bounds for the seconds of a step: sums of squares stay finite on any clock."""


class StepTimes:
    """The fitted cost of a step. Fed by `observe`, read by `curve`."""

    def __init__(self) -> None:
        self._cells = np.zeros((2, CELLS), CELL)
        self._common = np.zeros(1, COMMON)
        self._common["scale"], self._common["spread"] = 1.0, 0.1
        self._curves: dict[tuple[int, int, bool, bool], Floats] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step seen."""
        return int(self._common["max_tokens"][0])

    def knows(self, tokens: int) -> bool:
        """Return True if a step of half to twice as many tokens was seen."""
        return seen_near(self._cells, tokens)

    def stale(self, tokens: int) -> bool:
        """Return True if too few plain steps of about this many tokens were seen recently."""
        return fresh_plain_steps(self._cells, self._common, tokens) < 3.0

    def observe(self, *, tokens: int, rows: int, context: int, asked: bool, seconds: float) -> None:
        """Learn the seconds of a step of `rows` rows that attended to `context` keys."""
        if not (tokens > 0 and 0.0 < seconds < math.inf):
            return
        kind = ASKED if asked else PLAIN
        seconds = min(max(seconds, _SHORTEST), _LONGEST)
        if observe(self._cells, self._common, kind, tokens, rows, context, seconds):
            self._curves.clear()

    def curve(
        self,
        first: int,
        count: int,
        *,
        rows: int,
        context: int,
        asked: bool,
        optimistic: bool = False,
    ) -> Floats:
        """Return the seconds of steps of first .. first + count tokens, `[count + 1]`, rising.

        If `optimistic`, stale cells are ignored and more tokens than seen cost little.
        """
        if not self._curves:
            learn_asking(self._cells, self._common)
        shift = max(context.bit_length() - 4, 0)
        context = (context >> shift << shift) if self._common["by_context"][0] else 0
        key = rows if self._common["by_rows"][0] else 0, context, asked, optimistic
        last = first + count
        dense = self._curves.get(key)
        if dense is None or len(dense) <= last:
            dense = np.empty(max(2 * last, 256) + 1)
            kind = ASKED if asked else PLAIN
            read(self._cells, self._common, kind, rows, context, optimistic, dense)
            self._curves[key] = dense
        return dense[first : last + 1]

    def asking(self, rows: int) -> float:
        """Return the cost, in seconds, of asking the cache about this many rows."""
        return float(self._common["per_row"][0] * rows * self._common["scale"][0])


def warm_up() -> None:
    """Compile what `StepTimes` calls, or load the compiled code."""
    times = StepTimes()
    times.observe(tokens=2, rows=2, context=4, asked=False, seconds=1.0)
    times.curve(2, 1, rows=2, context=4, asked=True, optimistic=True)
    times.knows(2)
    times.stale(2)


@kernel
def cell_of(tokens: int) -> int:
    """Return the table's cell for a step of this many tokens.

    Bounds lie just above multiples of 4, 8, .. because kernels work in tiles: 57 cost as much as
    64.
    """
    value = tokens - 1
    if value < _EXACT:
        return value
    octave = 5
    while value >> (octave + 1):
        octave += 1
    return _EXACT + (octave - 5) * 8 + ((value >> (octave - 3)) & 7)


@kernel
def seen_near(cells: Any, tokens: int) -> bool:
    """Return True if a step of half to twice as many tokens was seen."""
    for index in range(cell_of(max(tokens // 2, 1)), cell_of(tokens * 2) + 1):
        if cells[PLAIN, index].weight > 0.0 or cells[ASKED, index].weight > 0.0:
            return True
    return False


@kernel
def fresh_plain_steps(cells: Any, common: Any, tokens: int) -> float:
    """Return the weight of recent plain steps of about this many tokens."""
    total = 0.0
    for index in range(cell_of(max(tokens * 7 // 8, 1)), cell_of(tokens * 9 // 8) + 1):
        cell = cells[PLAIN, index]
        if cell.weight > 0.0 and _fresh(cell, common[0]):
            total += cell.weight
    return total


@kernel
def observe(
    cells: Any, common: Any, kind: int, tokens: int, rows: int, context: int, seconds: float
) -> bool:
    """Learn from a step. Returns True if the table has to be read again."""
    own = common[0]
    own.steps += 1
    own.max_tokens = max(own.max_tokens, tokens)
    cell = cells[kind, cell_of(tokens)]
    value = seconds / own.scale
    if cell.weight == 0.0:
        cell.seconds = min(value, _max_first(cells, tokens))
        cell.tokens, cell.context, cell.rows = tokens, context, rows
        cell.seen, cell.weight = own.steps, 1.0
        return True
    weight = cell.weight * 0.5 ** ((own.steps - cell.seen) / _HALF_LIFE)
    if not _fresh(cell, own):
        weight = 1.0
    young = weight < _YOUNG
    more_context, more_rows = context - cell.context, rows - cell.rows
    slope = more_context * own.by_context + more_rows * own.by_rows
    expected = max(cell.seconds + slope, 0.2 * cell.seconds)
    if weight <= 1.0:
        # The quicker of the first two counts: the other may include a stall or a compilation.
        quicker = cell.seconds + min(value, expected) - expected
        cell.seconds = max(quicker, min(value, cell.seconds))
    else:
        value = expected + _bounded(own, value - expected, expected, young)
        _add(own, more_context, more_rows, value - cell.seconds, weight / (weight + 1.0))
        cell.seconds += (value - cell.seconds) / (weight + 1.0)
    share = 1.0 / (weight + 1.0)
    cell.tokens += share * (tokens - cell.tokens)
    cell.context += share * more_context
    cell.rows += share * more_rows
    cell.weight = min(weight + 1.0, _MEMORY)
    cell.seen = own.steps
    if not young and own.steps - own.read_at < _REFRESH:
        return False
    _fit(own, cell.context, cell.rows)
    own.read_at = own.steps
    return True


@kernel
def learn_asking(cells: Any, common: Any) -> None:
    """Update the unscaled cost of asking about one row, from sizes with steps of both kinds."""
    own = common[0]
    more = rows = 0.0
    for index in range(CELLS):
        plain, asked = cells[PLAIN, index], cells[ASKED, index]
        if _trusted(plain, own) and _trusted(asked, own):
            weight = min(plain.weight, asked.weight)
            at = _at(plain, own, asked.rows, asked.context, plain.seconds)
            more += weight * (asked.seconds - at)
            rows += weight * asked.rows
    if rows:
        own.per_row = 0.5 * own.per_row + 0.5 * max(more / rows, 0.0)


@kernel
def read(
    cells: Any, common: Any, kind: int, rows: int, context: int, optimistic: bool, dense: Floats
) -> None:
    """Set `dense` `[n]` to the seconds of steps of 0 .. n - 1 tokens of one kind, filling gaps."""
    own = common[0]
    at, value, weight = np.empty(CELLS + 1), np.empty(CELLS + 1), np.empty(CELLS)
    count = _cells_of(cells, own, kind, rows, context, optimistic, at, value, weight)
    if not count and optimistic:
        count = _cells_of(cells, own, kind, rows, context, False, at, value, weight)
    if not count:
        dense[:] = 0.0
        return
    value[:count] = rising(value[:count], weight[:count])
    # Beyond the largest step seen: the slope so far, and at least half of proportional cost.
    end, last = at[count - 1], value[count - 1]
    before = 0
    while at[before] < end / 1.5:
        before += 1
    slope = max((last - value[before]) / max(end - at[before], 1.0), 0.5 * last / end)
    if optimistic:
        slope *= 0.25
    at[count] = end * _FAR
    value[count] = last + slope * end * (_FAR - 1.0)
    dense[:] = np.interp(
        np.arange(len(dense)).astype(np.float64), at[: count + 1], value[: count + 1]
    )
    dense *= own.scale


@kernel
def _cells_of(
    cells: Any, own: Any, kind: int, rows: int, context: int, trusted: bool, at: Floats,
    value: Floats, weight: Floats,
) -> int:  # fmt: skip
    """Fill in tokens, seconds and weights of the cells by size; return their number."""
    sign = own.per_row if kind == ASKED else -own.per_row
    per_token = math.inf
    count = 0
    for index in range(CELLS):
        cell = cells[kind, index]
        seconds = cell.seconds
        if cell.weight == 0.0:
            cell = cells[1 - kind, index]
            if cell.weight == 0.0:
                continue
            seconds = max(cell.seconds + sign * cell.rows, 0.2 * cell.seconds)
        if trusted and not _trusted(cell, own):
            continue
        fresh = _fresh(cell, own)
        now = _at(cell, own, rows, context, seconds)
        if fresh:  # bounds the cost per token of larger stale ones
            per_token = _SUPERLINEAR * now / cell.tokens
        at[count], value[count] = cell.tokens, min(now, per_token * cell.tokens)
        # Stale cells yield to what was just explored.
        weight[count] = cell.weight if fresh else 0.02 * cell.weight
        count += 1
    return count


@kernel
def _fresh(cell: Any, own: Any) -> bool:
    return bool(cell.seen > own.upset and own.steps - cell.seen <= _STALE)


@kernel
def _trusted(cell: Any, own: Any) -> bool:
    """Return True if a cell is fresh and has more than one step, since one may have stalled."""
    return bool(cell.weight > 1.0 and _fresh(cell, own))


@kernel
def _at(cell: Any, own: Any, rows: float, context: float, seconds: float) -> float:
    """Return a cell's `seconds` for another number of rows and another context."""
    moved = (context - cell.context) * own.by_context + (rows - cell.rows) * own.by_rows
    return float(max(seconds + moved, 0.2 * seconds))


@kernel
def _max_first(cells: Any, tokens: int) -> float:
    """Upper bound for the first step of a cell, which may include a compilation."""
    bound, apart = math.inf, math.inf
    for kind in range(2):
        for index in range(CELLS):
            cell = cells[kind, index]
            if cell.weight > 0.0 and abs(cell.tokens - tokens) < apart:
                apart = abs(cell.tokens - tokens)
                bound = 2.0 * cell.seconds * max(tokens / cell.tokens, 1.0)
    return bound


@kernel
def _bounded(own: Any, difference: float, expected: float, young: bool) -> float:
    """Return the difference with outliers cut; update spread and scale."""
    if expected <= 0.0:  # steps that took no time by the clock
        return difference
    relative = difference / expected
    bound = 3.0 * float(own.spread)
    if young:
        return min(max(relative, -0.6), max(bound, 0.3)) * expected
    relative = min(max(relative, -bound), bound)
    own.spread = max(own.spread + 0.05 * (abs(relative) - own.spread), 0.01)
    own.drift += 0.1 * (relative - own.drift)
    if abs(own.drift) > max(own.spread, _UPSET):
        own.upset = own.steps - 1
    leap = max(abs(own.drift) / own.spread - 0.6, 0.0)
    own.scale *= 1.0 + min(_SCALE_STEP + _SCALE_LEAP * leap, 0.3) * relative
    return relative * expected


@kernel
def _add(own: Any, context: float, rows: float, difference: float, share: float) -> None:
    """Add a step by its difference in seconds from its cell's means."""
    left = difference - context * own.by_context - rows * own.by_rows
    own.cc = own.cc * _FADE + share * context * context
    own.cr = own.cr * _FADE + share * context * rows
    own.rr = own.rr * _FADE + share * rows * rows
    own.cy = own.cy * _FADE + share * context * difference
    own.ry = own.ry * _FADE + share * rows * difference
    own.noise = own.noise * _FADE + share * left * left
    own.evidence = own.evidence * _FADE + share


@kernel
def _fit(own: Any, context: float, rows: float) -> None:
    """Solve for the slopes; `context` and `rows` are typical values of the features."""
    if own.evidence < 8.0:
        return
    # A small ridge: two features that always move together share what they explain.
    cc = 1.02 * own.cc + 1e-6 * context * context + 1e-12
    rr = 1.02 * own.rr + 1e-6 * rows * rows + 1e-12
    determinant = cc * rr - own.cr * own.cr
    variance = own.noise / own.evidence
    by_context = (rr * own.cy - own.cr * own.ry) / determinant
    by_rows = (cc * own.ry - own.cr * own.cy) / determinant
    # More keys never cost less.
    own.by_context = max(_clear(by_context, variance * rr / determinant), 0.0)
    own.by_rows = _clear(by_rows, variance * cc / determinant)


@kernel
def _clear(slope: float, variance: float) -> float:
    """Shrink the slope by its standard error; 0 below two of them."""
    square = slope * slope
    if square <= 4.0 * variance:
        return 0.0
    return slope * (1.0 - 4.0 * variance / square)
