"""DraftPlanner: how much a decode step shall draft, from measured step times. One for all engines.

A step that verifies drafts feeds more tokens through the model. Below some number of tokens a
forward pass costs the same whatever it carries (it waits for weights from memory), above it each
token costs its share of arithmetic. The planner is told what each step cost and what each draft
was worth, and picks the number of draft tokens that makes most tokens a second; at large batch
that is none.

A step, as an engine uses it:

    budgets, least = planner.ask(left, other_tokens=...)          # what to ask the cache for
    drafts = cache.draft(rows, budgets, min_probability=least)
    keep = planner.choose(drafts.path_probabilities, drafts.offsets, rows=n, other_tokens=...)
    ...forward pass of the first keep[i] nodes of each row...
    planner.observe(tokens=..., rows=n, context=..., seconds=...)
    planner.judge(path_probabilities_of_fed_nodes, accepted_flags)

With S(m) the expected tokens of a step that feeds the m best nodes and T(m) its seconds, the step
takes the m with the largest S - rate x T, where `rate` is what steps yield lately. What is not
known (a batch size never drafted for, a cost measured long ago) is tried from a bank of seconds
that fills with a small share of the time: that share bounds what trying can cost.
Reasons and alternatives: docs/decisions/0006.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.drafting.calibration import Calibration, Floats
from engine.drafting.step_times import StepTimes, cell_of
from rollout.trajectory import FloatArray, IntArray

TRYING = 0.004
"""Share of the time that may be spent on trying what does not look best."""
_BANK_STEPS = 4.0
"""The bank holds at most this many ordinary steps."""
_ADVANCE_STEPS = 8.0
"""What it holds at first."""
_WORTH = 0.003
"""Least relative gain that counts as one."""
_PAUSE = 6
"""Steps between two tries."""
_GROWTH = 2
"""A step feeds at most this many times the tokens of the largest step seen (and 16 more)."""


class Planner(Protocol):
    """Decides how much to draft, step by step. `DraftPlanner` is the one that learns."""

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """Decide what to ask the cache for: budgets `[n]` and the least path probability."""

    def choose(
        self, path_probabilities: FloatArray, offsets: IntArray, *, rows: int, other_tokens: int = 0
    ) -> IntArray:
        """Decide how many of each row's proposed nodes to feed: `[n]`."""

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Learn what a step cost."""

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        """Learn which of the nodes that were fed were accepted."""


@dataclass(slots=True)
class _Scale:
    """What is remembered for batches of about one size."""

    gain: float = 0.1
    """Relative gain in rate by drafting, mean of the last asks. Positive: ask."""
    cut: float = 0.0
    """Path probability of the best node that was not worth feeding, mean of the last asks."""


class DraftPlanner:
    """Chooses draft lengths for one engine. Pure: no clock of its own, no randomness.

    Args:
        max_step_tokens: most tokens of a step.
        max_draft_tokens: most draft tokens of one row.
    """

    def __init__(self, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_draft_tokens = max_draft_tokens
        self.times = StepTimes()
        self.calibration = Calibration()
        self._scales: dict[int, _Scale] = {}
        self._asked = 0
        self._context_per_row = 0.0
        self._speedup = 1.0
        self._bank = 0.0
        self._banked = False
        self._since_try = 0

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """What is worth asking the cache for. Budgets of 0 throughout: do not ask it at all.

        Args:
            left: `[n]` tokens that each running row may still write before its limit.
            other_tokens: tokens of the same step that belong to no decoding row (prompts).

        Returns:
            `[n]` most draft tokens of each row, and the least path probability worth drafting.
            No row is given its last token: the draw after the last draft writes it for nothing.
        """
        rows = len(left)
        self._asked = 0
        spare = self._max_step_tokens - rows - other_tokens
        nothing = np.zeros(rows, np.int32), 1.0
        if rows == 0 or min(spare, self._max_draft_tokens) <= 0:
            return nothing
        base = rows + other_tokens
        if not self.times.knows(base) or not self._asking_pays(rows, base):
            return nothing
        self._asked = rows
        most = min(self._max_draft_tokens, spare)
        budgets = np.minimum(np.maximum(left - 1, 0), most).astype(np.int32)
        return budgets, self._least(rows)

    def choose(
        self, path_probabilities: FloatArray, offsets: IntArray, *, rows: int, other_tokens: int = 0
    ) -> IntArray:
        """How many of each row's proposed nodes to feed: the first `keep[i]` of row i.

        Args:
            path_probabilities: `[N]` as in `cache.tree.Drafts`, falling within a row.
            offsets: `[n+1]`
            rows: n, decoding rows, each of which feeds one ordinary token.
            other_tokens: as in `ask`.
        """
        base = rows + other_tokens
        lengths = np.diff(offsets)
        spare = min(self._max_step_tokens - base, len(path_probabilities))
        spare = min(spare, int(_GROWTH * self.times.most_tokens) + 16 - base)
        if rows == 0 or not self.times.knows(base):
            return np.zeros(len(lengths), np.int32)
        keys = _keys(path_probabilities, offsets, lengths)
        ranked = np.sort(keys)[::-1][: max(spare, 0)]
        best = self._best(ranked, rows, base)
        return _prefixes(keys, ranked, best, offsets, self._max_draft_tokens)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """A step that fed `tokens` (drafts and prompts included) for `rows` rows took so long.

        Args:
            tokens: fed through the model.
            rows: decoding rows.
            context: keys that they attended to, summed over the rows.
            seconds: from this step's beginning to the next one's, with nothing idle in between.
        """
        self.times.observe(
            tokens=tokens, rows=rows, context=context, asked=self._asked > 0, seconds=seconds
        )
        if rows:
            per_row = context / rows
            share = 0.1 if self._context_per_row else 1.0
            self._context_per_row += share * (per_row - self._context_per_row)
            plain = self._plain(rows, rows)
            if not self._banked:
                self._banked = True
                self._bank = _ADVANCE_STEPS * plain
            elif self._bank < _BANK_STEPS * plain:
                self._bank += TRYING * min(seconds, 2.0 * plain)
            self._since_try += 1

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        """What became of the nodes fed in a step: `[N]` their estimates, and whether accepted."""
        if len(path_probabilities):
            self.calibration.judge(path_probabilities, accepted)

    def _best(self, ranked: Floats, rows: int, base: int) -> int:
        """How many of the ranked nodes to feed; learns what drafting is worth at this size."""
        scale = self._scale_of(rows)
        plain = self._plain(rows, base)
        seconds = self._drafted(rows, base, len(ranked))
        yields = _yields(rows, self.calibration.apply(ranked))
        rate = rows / plain
        top = float((yields / seconds).max())
        worth = max(min(self._speedup * rate, top), rate)
        values = yields - worth * seconds
        best = int(values.argmax())
        gain = float(yields[best] / seconds[best]) / rate - 1.0
        if self._asked:
            scale.gain += 0.1 * (gain - scale.gain)
            cut = float(ranked[best]) if best < len(ranked) else 0.8 * scale.cut
            scale.cut += 0.2 * (cut - scale.cut)
        tried = self._try(ranked, rows, base, best, values, worth)
        self._speedup += 0.02 * (float(yields[tried] / seconds[tried]) / rate - self._speedup)
        return tried

    def _try(
        self, ranked: Floats, rows: int, base: int, best: int, values: Floats, worth: float
    ) -> int:
        """Another number of nodes, if it may be better and the bank can pay for being wrong."""
        if self._since_try < _PAUSE or len(ranked) == 0:
            return best
        self._since_try = 0
        limit = len(ranked)
        hoped = _yields(rows, self.calibration.hopeful(ranked))
        seconds = self._drafted(rows, base, limit, hopeful=True)
        merit = hoped - worth * seconds
        allowed = values[best] - values <= self._bank * worth
        most = max(int(1.25 * (base + best)) + 8 - base, 0)
        allowed[most + 1 :] = False
        merit[~allowed] = -np.inf
        other = int(merit.argmax())
        if merit[other] <= merit[best] + _WORTH * rows or cell_of(base + other) == cell_of(
            base + best
        ):
            return best
        self._bank -= float(values[best] - values[other]) / worth
        return other

    def _asking_pays(self, rows: int, base: int) -> bool:
        """Whether drafting paid lately at this size; if not, now and then from the bank."""
        scale = self._scale_of(rows)
        plain = self._plain(rows, base)
        if scale.gain > _WORTH:
            if self.times.stale(base) and self._since_try >= _PAUSE:
                price = plain * scale.gain / (1.0 + scale.gain)
                if price <= self._bank:
                    self._bank -= price
                    self._since_try = 0
                    return False
            return True
        price = max(self.times.asking(rows), _WORTH * plain)
        if self._since_try < _PAUSE or price > self._bank:
            return False
        self._bank -= price
        return True

    def _least(self, rows: int) -> float:
        scale = self._scale_of(rows)
        return min(0.75 * scale.cut, 0.9)

    def _plain(self, rows: int, base: int) -> float:
        return float(self._curve(rows, base, 0, asked=False, hopeful=False)[0])

    def _drafted(self, rows: int, base: int, count: int, *, hopeful: bool = False) -> Floats:
        return self._curve(rows, base, count, asked=self._asked > 0, hopeful=hopeful)

    def _curve(self, rows: int, base: int, count: int, *, asked: bool, hopeful: bool) -> Floats:
        context = int(self._context_per_row * rows)
        return self.times.curve(
            base, count, rows=rows, context=context, asked=asked, hopeful=hopeful
        )

    def _scale_of(self, rows: int) -> _Scale:
        return self._scales.setdefault(rows if rows < 8 else 8 + cell_of(rows) // 2, _Scale())


def _yields(rows: int, probabilities: Floats) -> Floats:
    """Expected tokens of steps that feed the first 0, 1, .. nodes: `[m+1]`."""
    yields = np.empty(len(probabilities) + 1)
    yields[0] = 0.0
    np.cumsum(probabilities, out=yields[1:])
    yields += rows
    return yields


def _keys(path_probabilities: FloatArray, offsets: IntArray, lengths: NDArray[np.int_]) -> Floats:
    """What nodes are ranked by: their probability, and among equals the shallow before the deep."""
    place = np.arange(len(path_probabilities)) - np.repeat(offsets[:-1], lengths)
    keys = path_probabilities.astype(np.float64)
    keys[~(keys >= 0.0)] = 0.0  # whatever a broken drafter says
    np.minimum(keys, 1.0, out=keys)
    keys -= 1e-9 * place
    return keys


def _prefixes(keys: Floats, ranked: Floats, count: int, offsets: IntArray, most: int) -> IntArray:
    """The rows' shares `[n]` of the `count` best nodes."""
    rows = len(offsets) - 1
    if count == 0:
        return np.zeros(rows, np.int32)
    least = ranked[count - 1]
    keep = _per_row(keys >= least, offsets)
    surplus = int(keep.sum()) - count
    if surplus > 0:
        # Nodes as good as the last one: the first rows have it.
        equal = _per_row(keys == least, offsets)
        dropped = np.minimum(np.cumsum(equal[::-1]), surplus)
        keep -= np.diff(dropped, prepend=0)[::-1]
    return np.minimum(keep, most).astype(np.int32)


def _per_row(flags: NDArray[np.bool_], offsets: IntArray) -> NDArray[np.int64]:
    total = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=total[1:])
    flagged: NDArray[np.int64] = total[offsets[1:]] - total[offsets[:-1]]
    return flagged
