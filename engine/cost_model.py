"""What a step costs, learned from the steps of this run: seconds by tokens, rows and context.

    seconds = scale x (table[asked, tokens] + slopes . (context, rows))

- The **table** has a cell for each number of tokens up to 32 and eight to an octave above; each
  holds decayed means. Steps for which the cache was asked for drafts have cells of their own: what
  proposing costs is the difference. Read as a rising curve: noise makes no false cheap spot.
- The **slopes** are fitted within cells (steps of equal tokens that differ in the rest), so they
  say only what the table cannot; one that is not clearly there is 0.
- The **scale** follows what all steps have in common: another program on this machine.

One stalled step must not poison anything: a difference counts at most three times the usual one,
and of a cell's first two steps the quicker counts. Pure: no clock, no randomness.
"""

from __future__ import annotations

import numpy as np

from engine.calibration import Floats, rising

_EXACT = 32
_CELLS = _EXACT + 8 * 12
_WEIGHT, _SECONDS, _TOKENS, _SEEN = 0, 1, 2, 3
_MEANS = slice(1, 3)
_FEATURES = slice(4, 6)
_ROWS = 5
_MEMORY = 24.0
"""Steps that a cell's mean remembers."""
_HALF_LIFE = 2000.0
"""Steps after which what a cell knows counts half."""
_STALE = 600
"""Steps after which a cell is worth a second look."""
_SCALE_STEP = 0.04
_FIT_EVERY = 16
_FADE = 0.998
"""Per step, of the evidence for the slopes."""
_FAR = 64.0


def cell_of(tokens: int) -> int:
    """The table's cell for a step of so many tokens; bounds lie just above multiples of 4, 8, ..

    (kernels work in tiles: 64 tokens cost what 57 cost, 65 what 72 cost).
    """
    value = tokens - 1
    if value < _EXACT:
        return value
    octave = value.bit_length() - 1
    return min(_EXACT + (octave - 5) * 8 + ((value >> (octave - 3)) & 7), _CELLS - 1)


class StepTimes:
    """The fitted cost of a step. Fed by `observe`, read by `curve`."""

    def __init__(self) -> None:
        self._cells = np.zeros((2, _CELLS, 6))  # not asked, asked
        self._scale = 1.0
        self._spread = 0.1
        self._slopes = np.zeros(2)
        self._gram = np.zeros((2, 2))
        self._moment = np.zeros(2)
        self._noise = 0.0
        self._evidence = 0.0
        self.steps = 0
        self._curves: dict[tuple[int, int, bool, bool], tuple[Floats, Floats]] = {}
        self._curves_at = -1

    @property
    def most_tokens(self) -> float:
        """Of any step seen; 0: none was."""
        return float(self._cells[:, :, _TOKENS].max())

    def knows(self, tokens: int) -> bool:
        """Whether a step of about so many tokens was seen: half to twice as many."""
        near = self._cells[:, cell_of(max(tokens // 2, 1)) : cell_of(tokens * 2) + 1, _WEIGHT]
        return bool(near.any())

    def stale(self, tokens: int) -> bool:
        """Whether steps of about so many tokens without asking were few, or are long ago."""
        near = self._cells[0, cell_of(max(tokens * 7 // 8, 1)) : cell_of(tokens * 9 // 8) + 1]
        few = float(near[:, _WEIGHT].sum()) < 3.0
        return few or self.steps - float(near[:, _SEEN].max()) > _STALE

    def observe(self, *, tokens: int, rows: int, context: int, asked: bool, seconds: float) -> None:
        """A step of `tokens` for `rows` rows attending to `context` keys took `seconds`."""
        if not (tokens > 0 and 0.0 < seconds < float("inf")):
            return
        self.steps += 1
        cell = self._cells[int(asked), cell_of(tokens)]
        features = np.array((context, rows), np.float64)
        value = seconds / self._scale
        age = self.steps - cell[_SEEN]
        weight = cell[_WEIGHT] * 0.5 ** (age / _HALF_LIFE)
        if weight < 0.05:
            self._first(cell, tokens, features, value)
            return
        apart = features - cell[_FEATURES]
        expected = max(cell[_SECONDS] + float(apart @ self._slopes), 0.2 * cell[_SECONDS])
        if cell[_WEIGHT] == 1.0:
            # Of the first two the quicker: the other may have been a stall or a compilation.
            value = min(value, expected)
            step = 1.0 if value < expected else 0.0
        else:
            value = expected + self._bounded(value - expected, expected, weight)
            step = 1.0 / (weight + 1.0)
            self._learn_slopes(apart, value - cell[_SECONDS], weight)
        cell[_SECONDS] += step * (value - cell[_SECONDS])
        step = 1.0 / (weight + 1.0)
        cell[_TOKENS] += step * (tokens - cell[_TOKENS])
        cell[_FEATURES] += step * apart
        cell[_WEIGHT] = min(weight + 1.0, _MEMORY)
        cell[_SEEN] = self.steps
        if weight < 4.0:
            self._curves.clear()

    def curve(
        self, first: int, count: int, *, rows: int, context: int, asked: bool, hopeful: bool = False
    ) -> Floats:
        """Seconds of steps of first .. first + count tokens, `[count + 1]`, rising.

        Args:
            first: tokens of the cheapest step.
            count: how many more.
            rows: decoding rows.
            context: keys attended to.
            asked: whether the cache is asked about the rows.
            hopeful: forget what is stale, and hope that more tokens than seen cost little.
        """
        if self.steps - self._curves_at >= 8:
            self._curves.clear()
            self._curves_at = self.steps
        shift = max(context.bit_length() - 4, 0)
        context = context >> shift << shift  # within 1/8, so that curves can be kept
        key = rows, context, asked, hopeful
        if key not in self._curves:
            if len(self._curves) > 32:
                self._curves.clear()
            self._curves[key] = self._knots(rows, context, asked, hopeful)
        at, value = self._curves[key]
        tokens = np.arange(first, first + count + 1, dtype=np.float64)
        return np.interp(tokens, at, value) * self._scale

    def asking(self, rows: int) -> float:
        """Seconds that asking the cache about so many rows costs."""
        return self._per_row() * rows * self._scale

    def _per_row(self) -> float:
        """What asking about one row costs, unscaled: from cells that know steps of both kinds."""
        plain, asked = self._cells
        weight = np.minimum(plain[:, _WEIGHT], asked[:, _WEIGHT])
        if not weight.any():
            return 0.0
        apart = asked[:, _FEATURES] - plain[:, _FEATURES]
        more = asked[:, _SECONDS] - plain[:, _SECONDS] - apart @ self._slopes
        return max(float(weight @ more) / float(weight @ asked[:, _ROWS] + 1e-9), 0.0)

    def _merged(self, asked: bool) -> Floats:
        """Cells `[K, 6]` of one kind of step, completed by those of the other kind."""
        own, other = self._cells[int(asked)], self._cells[1 - int(asked)].copy()
        sign = 1.0 if asked else -1.0
        other[:, _SECONDS] += sign * self._per_row() * other[:, _ROWS]
        cells = np.where(own[:, _WEIGHT, None] > 0, own, other)
        kept: Floats = cells[(cells[:, _WEIGHT] > 0) & (cells[:, _SECONDS] > 0)]
        return kept

    def _knots(self, rows: int, context: int, asked: bool, hopeful: bool) -> tuple[Floats, Floats]:
        cells = self._merged(asked)
        age = self.steps - cells[:, _SEEN]
        if hopeful:
            fresh = (age <= _STALE) & (cells[:, _WEIGHT] > 1.0)
            if fresh.any():
                cells, age = cells[fresh], age[fresh]
        if not len(cells):
            return np.array([1.0]), np.array([0.0])
        now = np.array((context, rows), np.float64)
        value = cells[:, _SECONDS] + (now - cells[:, _FEATURES]) @ self._slopes
        value = np.maximum(value, 0.2 * cells[:, _SECONDS])
        weight = cells[:, _WEIGHT] * 0.5 ** (age / _HALF_LIFE)
        smooth = np.array(rising(value.tolist(), weight.tolist()))
        at = cells[:, _TOKENS]
        # Beyond what was seen: the slope so far, and at least a share of proportional cost.
        last, end = smooth[-1], at[-1]
        before = int(np.searchsorted(at, end / 1.5))
        slope = (last - smooth[before]) / max(end - at[before], 1.0)
        slope = max(slope, 0.5 * last / end)
        if hopeful:
            slope *= 0.25
        return (
            np.append(at, end * _FAR),
            np.append(smooth, last + slope * end * (_FAR - 1.0)),
        )

    def _first(self, cell: Floats, tokens: int, features: Floats, value: float) -> None:
        """A cell's first step. A compilation may hide in it, so it counts only so much."""
        known = self._cells[self._cells[:, :, _WEIGHT] > 0]
        if len(known):
            near = known[np.abs(known[:, _TOKENS] - tokens).argmin()]
            value = min(value, 2.0 * near[_SECONDS] * max(tokens / near[_TOKENS], 1.0))
        cell[_WEIGHT], cell[_SECONDS], cell[_TOKENS], cell[_SEEN] = 1.0, value, tokens, self.steps
        cell[_FEATURES] = features
        self._curves.clear()

    def _bounded(self, difference: float, expected: float, weight: float) -> float:
        """The difference with outliers cut; moves spread and scale."""
        relative = difference / expected
        bound = 3.0 * self._spread
        relative = min(max(relative, -bound), bound)
        if weight >= 3.0:
            self._spread += 0.05 * (abs(relative) - self._spread)
            self._spread = max(self._spread, 0.01)
            self._scale *= 1.0 + _SCALE_STEP * relative
        return relative * expected

    def _learn_slopes(self, apart: Floats, difference: float, weight: float) -> None:
        """Least squares within cells; a slope under two standard errors is taken as 0."""
        share = weight / (weight + 1.0)
        self._gram *= _FADE
        self._gram += share * np.outer(apart, apart)
        self._moment *= _FADE
        self._moment += share * difference * apart
        left = difference - float(apart @ self._slopes)
        self._noise = self._noise * _FADE + share * left * left
        self._evidence = self._evidence * _FADE + share
        if self.steps % _FIT_EVERY:
            return
        size = np.diag(self._gram)
        live = size > 1e-9 * (1.0 + self._cells[:, :, _FEATURES].max(axis=(0, 1))) ** 2
        if not live.any() or self._evidence < 8.0:
            return
        gram = self._gram[np.ix_(live, live)] + np.diag(0.02 * size[live])
        inverse = np.linalg.inv(gram)
        slope = inverse @ self._moment[live]
        error = np.sqrt(np.diag(inverse) * self._noise / self._evidence)
        clear = np.maximum(1.0 - (2.0 * error / np.maximum(np.abs(slope), 1e-30)) ** 2, 0.0)
        slopes = np.zeros(2)
        slopes[live] = slope * clear
        slopes[0] = max(slopes[0], 0.0)  # more keys never cost less
        self._slopes = slopes
