"""The seconds of a step by tokens, rows and context, learned from the steps of this run.

    seconds = scale x (table[asked, tokens] + slopes . (context, rows))

- The **table** has a cell for each number of tokens up to 32, and eight cells per octave above,
  each with decayed means. Steps for which the cache was asked for drafts have separate cells.
  The table is read as a rising curve, so that noise makes no false cheap spot.
- The **slopes** are fitted within cells, from steps of equal tokens that differ in context or
  rows. A slope that is not clearly there is 0.
- The **scale** follows what all steps have in common, such as another program on this machine.

A difference is cut to three times the usual one, and the quicker of a cell's first two steps
counts, so a stalled step does little harm. The module uses no clock and no randomness.
"""

from __future__ import annotations

import math

import numpy as np

from asyncrl.engine.drafting.calibration import Floats
from asyncrl.engine.drafting.step_time_kernels import (
    ASKED,
    CELL,
    CELLS,
    COMMON,
    PLAIN,
    fresh_plain_steps,
    learn_asking,
    observe,
    read,
    seen_near,
)

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
