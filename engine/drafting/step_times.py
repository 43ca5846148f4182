"""The seconds of a step by tokens, rows and context, learned from the steps of this run.

    seconds = scale x (table[asked, tokens] + slopes . (context, rows))

- The **table** has a cell for each number of tokens up to 32, and eight cells per octave above.
  Each holds decayed means. Steps for which the cache was asked for drafts have cells of their own;
  the difference is the cost of proposing. The table is read as a rising curve, so that noise makes
  no false cheap spot.
- The **slopes** are fitted within cells, from steps of equal tokens that differ in context or rows,
  so they hold only what the table cannot. A slope that is not clearly there is 0.
- The **scale** follows what all steps have in common, such as another program on this machine.

A single stalled step does little harm: a difference is cut to three times the usual one, and of a
cell's first two steps the quicker counts. There is no clock and no randomness in this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from engine.drafting.calibration import Floats, rising

_EXACT = 32
"""Up to this many tokens each number has a cell of its own."""
_MEMORY = 24.0
"""Steps that a cell's mean remembers."""
_HALF_LIFE = 2000.0
"""Steps after which a cell's weight is halved."""
_STALE = 600
"""Steps after which a cell is stale. A cell from before the last upset is stale, too."""
_UPSET = 0.08
"""An upset is when steps differ from what was expected by this share for a while."""
_YOUNG = 4.0
"""Below this weight a cell learns fast, and what it learns is used at once."""
_SCALE_STEP = 0.02
"""Share of a step's difference by which the scale moves."""
_SCALE_LEAP = 0.1
"""Additional share per usual difference by which recent steps differ in one direction."""
_REFRESH = 16
"""Steps between two fits of the slopes and readings of the table."""
_SUPERLINEAR = 1.25
"""A larger step costs at most this many times as much per token as a smaller one."""
_FADE = 0.998
"""Decay of the evidence for the slopes, per step."""
_FAR = 64.0
"""The curve is extrapolated to this many times the tokens seen."""


def cell_of(tokens: int) -> int:
    """The table's cell for a step of so many tokens.

    Bounds lie just above multiples of 4, 8, .. because kernels work in tiles: 64 tokens cost as
    much as 57, and 65 as much as 72.
    """
    value = tokens - 1
    if value < _EXACT:
        return value
    octave = value.bit_length() - 1
    return _EXACT + (octave - 5) * 8 + ((value >> (octave - 3)) & 7)


@dataclass(slots=True)
class _Cell:
    """Decayed means of steps of about one size. Seconds are divided by the scale."""

    seconds: float
    tokens: float
    context: float
    rows: float
    seen: int
    """Number of the last of these steps."""
    weight: float = 1.0


@dataclass(slots=True)
class _Slopes:
    """Least squares of the differences within cells on two features: context and rows."""

    context: float = 0.0
    rows: float = 0.0
    cc: float = 0.0
    cr: float = 0.0
    rr: float = 0.0
    cy: float = 0.0
    ry: float = 0.0
    noise: float = 0.0
    evidence: float = 0.0

    def add(self, context: float, rows: float, difference: float, share: float) -> None:
        """Add a step by how it differed from its cell's means, `difference` in seconds."""
        left = difference - context * self.context - rows * self.rows
        self.cc = self.cc * _FADE + share * context * context
        self.cr = self.cr * _FADE + share * context * rows
        self.rr = self.rr * _FADE + share * rows * rows
        self.cy = self.cy * _FADE + share * context * difference
        self.ry = self.ry * _FADE + share * rows * difference
        self.noise = self.noise * _FADE + share * left * left
        self.evidence = self.evidence * _FADE + share

    def fit(self, context: float, rows: float) -> None:
        """Solve for the slopes; `context` and `rows` are typical values of the features."""
        if self.evidence < 8.0:
            return
        # A small ridge: two features that always move together share what they explain.
        cc = 1.02 * self.cc + 1e-6 * context * context + 1e-12
        rr = 1.02 * self.rr + 1e-6 * rows * rows + 1e-12
        determinant = cc * rr - self.cr * self.cr
        variance = self.noise / self.evidence
        self.context = max(
            _clear((rr * self.cy - self.cr * self.ry) / determinant, variance * rr / determinant),
            0.0,  # more keys never cost less
        )
        self.rows = _clear(
            (cc * self.ry - self.cr * self.cy) / determinant, variance * cc / determinant
        )


def _clear(slope: float, variance: float) -> float:
    """The slope, shrunk by its standard error: 0 below two of them."""
    return slope * max(1.0 - 4.0 * variance / (slope * slope), 0.0) if slope else 0.0


class StepTimes:
    """The fitted cost of a step. Fed by `observe`, read by `curve`."""

    def __init__(self) -> None:
        self._plain: dict[int, _Cell] = {}
        self._asked: dict[int, _Cell] = {}
        self._scale = 1.0
        self._spread = 0.1
        self._drift = 0.0
        self._upset = 0
        """The last step at which costs were found to have changed."""
        self._slopes = _Slopes()
        self.steps = 0
        self.max_tokens = 0
        """Tokens of the largest step seen."""
        self._curves: dict[tuple[int, int, bool, bool], Floats] = {}
        self._read_at = 0
        self._per_row = 0.0

    def knows(self, tokens: int) -> bool:
        """Whether a step of about so many tokens was seen: half to twice as many."""
        near = range(cell_of(max(tokens // 2, 1)), cell_of(tokens * 2) + 1)
        return any(cell in self._plain or cell in self._asked for cell in near)

    def stale(self, tokens: int) -> bool:
        """Whether too few plain steps of about so many tokens were seen recently."""
        near = range(cell_of(max(tokens * 7 // 8, 1)), cell_of(tokens * 9 // 8) + 1)
        cells = [self._plain[cell] for cell in near if cell in self._plain]
        fresh = [cell.weight for cell in cells if self._fresh(cell)]
        return sum(fresh) < 3.0

    def observe(self, *, tokens: int, rows: int, context: int, asked: bool, seconds: float) -> None:
        """A step of `tokens` for `rows` rows attending to `context` keys took `seconds`."""
        if not (tokens > 0 and 0.0 < seconds < math.inf):
            return
        self.steps += 1
        self.max_tokens = max(self.max_tokens, tokens)
        cells = self._asked if asked else self._plain
        value = seconds / self._scale
        cell = cells.get(cell_of(tokens))
        if cell is None:
            value = min(value, self._max_first(tokens))
            cells[cell_of(tokens)] = _Cell(value, tokens, context, rows, self.steps)
            self._curves.clear()
            return
        weight = cell.weight * 0.5 ** ((self.steps - cell.seen) / _HALF_LIFE)
        if not self._fresh(cell):
            weight = 1.0
        young = weight < _YOUNG
        apart = context - cell.context, rows - cell.rows
        slope = apart[0] * self._slopes.context + apart[1] * self._slopes.rows
        expected = max(cell.seconds + slope, 0.2 * cell.seconds)
        if weight <= 1.0:
            # The quicker of the first two counts: the other may include a stall or a compilation.
            value = min(value, expected)
            cell.seconds += value - expected
        else:
            value = expected + self._bounded(value - expected, expected, young=young)
            self._slopes.add(*apart, value - cell.seconds, weight / (weight + 1.0))
            cell.seconds += (value - cell.seconds) / (weight + 1.0)
        share = 1.0 / (weight + 1.0)
        cell.tokens += share * (tokens - cell.tokens)
        cell.context += share * apart[0]
        cell.rows += share * apart[1]
        cell.weight = min(weight + 1.0, _MEMORY)
        cell.seen = self.steps
        if young or self.steps - self._read_at >= _REFRESH:
            self._slopes.fit(cell.context, cell.rows)
            self._curves.clear()
            self._read_at = self.steps

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
        """Seconds of steps of first .. first + count tokens, `[count + 1]`, rising.

        Args:
            first: tokens of the cheapest step.
            count: how many more.
            rows: decoding rows.
            context: keys attended to.
            asked: whether the cache is asked about the rows.
            optimistic: ignore stale cells, and assume that more tokens than seen cost little.
        """
        if not self._curves:
            self._per_row = self._asking_per_row()
        shift = max(context.bit_length() - 4, 0)
        context = (context >> shift << shift) if self._slopes.context else 0
        key = rows if self._slopes.rows else 0, context, asked, optimistic
        last = first + count
        dense = self._curves.get(key)
        if dense is None or len(dense) <= last:
            size = max(2 * last, 256)
            dense = self._dense(size, rows, context, asked=asked, optimistic=optimistic)
            self._curves[key] = dense
        return dense[first : last + 1]

    def asking(self, rows: int) -> float:
        """Seconds that asking the cache about so many rows costs."""
        return self._per_row * rows * self._scale

    def _fresh(self, cell: _Cell) -> bool:
        return cell.seen > self._upset and self.steps - cell.seen <= _STALE

    def _max_first(self, tokens: int) -> float:
        """Upper bound for the first step of a cell, which may include a compilation."""
        known = [*self._plain.values(), *self._asked.values()]
        if not known:
            return math.inf
        near = min(known, key=lambda cell: abs(cell.tokens - tokens))
        return 2.0 * near.seconds * max(tokens / near.tokens, 1.0)

    def _bounded(self, difference: float, expected: float, *, young: bool) -> float:
        """The difference with outliers cut. Updates spread and scale."""
        relative = difference / expected
        bound = 3.0 * self._spread
        if young:
            return min(max(relative, -0.6), max(bound, 0.3)) * expected
        relative = min(max(relative, -bound), bound)
        self._spread = max(self._spread + 0.05 * (abs(relative) - self._spread), 0.01)
        self._drift += 0.1 * (relative - self._drift)
        if abs(self._drift) > max(self._spread, _UPSET):
            self._upset = self.steps - 1
        leap = max(abs(self._drift) / self._spread - 0.6, 0.0)
        self._scale *= 1.0 + min(_SCALE_STEP + _SCALE_LEAP * leap, 0.3) * relative
        return relative * expected

    def _asking_per_row(self) -> float:
        """Unscaled cost of asking about one row, from sizes with steps of both kinds."""
        more = rows = 0.0
        for index, asked in self._asked.items():
            plain = self._plain.get(index)
            if plain is not None and self._trusted(plain) and self._trusted(asked):
                weight = min(plain.weight, asked.weight)
                more += weight * (asked.seconds - self._at(plain, asked.rows, asked.context))
                rows += weight * asked.rows
        if not rows:
            return self._per_row
        return 0.5 * self._per_row + 0.5 * max(more / rows, 0.0)

    def _trusted(self, cell: _Cell) -> bool:
        """Whether a cell is fresh and has more than one step, since one may have stalled."""
        return cell.weight > 1.0 and self._fresh(cell)

    def _at(self, cell: _Cell, rows: float, context: float) -> float:
        """A cell's seconds, moved to another number of rows and another context."""
        slopes = self._slopes
        moved = (context - cell.context) * slopes.context + (rows - cell.rows) * slopes.rows
        return max(cell.seconds + moved, 0.2 * cell.seconds)

    def _merged(self, *, asked: bool) -> Iterable[_Cell]:
        """Cells of one kind of step by size, completed by those of the other kind."""
        own, other = (self._asked, self._plain) if asked else (self._plain, self._asked)
        sign = self._per_row if asked else -self._per_row
        for index in sorted(own.keys() | other.keys()):
            cell = own.get(index)
            if cell is None:
                cell = other[index]
                seconds = max(cell.seconds + sign * cell.rows, 0.2 * cell.seconds)
                cell = replace(cell, seconds=seconds)
            yield cell

    def _believable(self, cells: list[_Cell], rows: int, context: int) -> list[float]:
        """The cells' seconds. Fresh cells bound the cost per token of larger stale ones."""
        seconds = []
        per_token = math.inf
        for cell in cells:
            value = self._at(cell, rows, context)
            if self._fresh(cell):
                per_token = _SUPERLINEAR * value / cell.tokens
            seconds.append(min(value, per_token * cell.tokens))
        return seconds

    def _dense(
        self, size: int, rows: int, context: int, *, asked: bool, optimistic: bool
    ) -> Floats:
        """Seconds of steps of 0 .. size tokens, `[size + 1]`."""
        cells = list(self._merged(asked=asked))
        if optimistic:
            cells = [cell for cell in cells if self._trusted(cell)] or cells
        if not cells:
            return np.zeros(size + 1)
        at = [cell.tokens for cell in cells]
        value = rising(
            self._believable(cells, rows, context),
            # Stale cells yield to what was just explored.
            [cell.weight if self._fresh(cell) else 0.02 * cell.weight for cell in cells],
        )
        # Beyond the largest step seen: the slope so far, and at least half of proportional cost.
        end, last = at[-1], value[-1]
        before = next(i for i, tokens in enumerate(at) if tokens >= end / 1.5)
        slope = max((last - value[before]) / max(end - at[before], 1.0), 0.5 * last / end)
        if optimistic:
            slope *= 0.25
        at.append(end * _FAR)
        value.append(last + slope * end * (_FAR - 1.0))
        dense: Floats = np.interp(np.arange(size + 1), at, value) * self._scale
        return dense
