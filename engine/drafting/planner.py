"""Decides from measured step times how much a decode step drafts, for every engine.

Up to some number of tokens a forward pass costs the same, because it waits for the weights from
memory; beyond it each token costs its share of arithmetic. An engine uses the planner so:

    budgets, min_probability = planner.ask(left, other_tokens=...)     # what to ask the cache for
    drafts = cache.draft(rows, budgets, min_probability=min_probability)
    keep = planner.choose(drafts.path_probabilities, drafts.offsets, rows=n, worth=...)
    ...forward pass of the first keep[i] nodes of each row...
    planner.observe(tokens=..., rows=n, context=..., seconds=...)
    planner.judge(path_probabilities_of_fed_nodes, accepted_flags)

With S(m) the expected tokens of a step that feeds the m best nodes, and T(m) its seconds, the step
takes the m with the largest S - rate x T, where `rate` is what recent steps yield. A small share of
the time, the bank, pays for exploration. Where tokens of some rows are worth more (`worth_of`), the
step takes what is worth most a second, at the cost of at most `MOST_LOSS` of the tokens a second.
Reasons and alternatives: docs/decisions/0006 and 0099.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.drafting.calibration import Calibration, Floats
from asyncrl.engine.drafting.step_times import StepTimes, cell_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

TRYING = 0.004
"""Share of the time that may be spent on exploration."""
_BANK_STEPS = 4.0
"""Capacity of the bank, in ordinary steps."""
_ADVANCE_STEPS = 8.0
"""Initial balance of the bank, in ordinary steps."""
MOST_LOSS = 0.02
"""Largest share of the tokens a second that is given up for rows that are worth more."""
_MIN_GAIN = 0.003
"""Smallest relative gain that counts."""
_POWERS = (1.0, 0.5, 0.25, 0.0)
"""Powers of the worth by which nodes are ranked: a smaller one costs fewer tokens a second."""
_PAUSE = 6
"""Steps between two explorations."""
_UNLEARNED = 64
"""Steps that are learned from together, if no decision needs them earlier; this is cheaper."""
_GROWTH = 2
"""A step feeds at most this many times the tokens of the largest step seen (and 16 more)."""


class Planner(Protocol):
    """Decides step by step how much to draft; `DraftPlanner` is the one that learns."""

    def declines(self, rows: int) -> bool:
        """Return True if a step of this many rows drafts nothing; `ask` is then not called."""

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """Decide what to ask the cache for: budgets `[n]` and the least path probability."""

    def choose(
        self,
        path_probabilities: FloatArray,
        offsets: IntArray,
        *,
        rows: int,
        other_tokens: int = 0,
        worth: Floats | None = None,
    ) -> IntArray:
        """Decide how many of each row's proposed nodes to feed: `[n]`."""

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Learn the cost of a step; see `DraftPlanner.observe`."""

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        """Learn which of the nodes that were fed were accepted."""


class _Step(NamedTuple):
    tokens: int
    rows: int
    context: int
    asked: bool
    seconds: float


@dataclass(slots=True)
class _Scale:
    """State learned at batches of about one size."""

    gain: float = 0.1
    """Mean relative gain in tokens per second from drafting, over recent steps."""
    cut: float = 0.0
    """Mean path probability of the best node not worth feeding, over recent steps."""


class DraftPlanner:
    """Chooses draft lengths for one engine, without a clock or randomness."""

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
        self._since_exploring = 0
        self._unlearned: list[_Step] = []

    def declines(self, rows: int) -> bool:
        """Return True if `ask` would decline, judged without arrays."""
        self._asked = 0
        if min(self._max_step_tokens - rows, self._max_draft_tokens) <= 0:
            return True
        exploring = self._since_exploring + len(self._unlearned) >= _PAUSE
        return not exploring and self._scale_of(rows).gain <= _MIN_GAIN

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """Decide what to ask the cache for; each row may generate `left` `[n]` more tokens.

        Returns `[n]` most draft tokens of each row (all 0: do not ask), and the smallest path
        probability worth drafting. The draw after a row's last draft generates its last token, so
        that is not drafted. `other_tokens` of the same step are prompts.
        """
        rows = len(left)
        self._asked = 0
        nothing = np.zeros(rows, np.int32), 1.0
        if not (left > 1).any():
            return nothing
        self._learn()
        spare = self._max_step_tokens - rows - other_tokens
        if min(spare, self._max_draft_tokens) <= 0:
            return nothing
        base = rows + other_tokens
        if not self.times.knows(base) or not self._asking_pays(rows, base):
            return nothing
        self._asked = rows
        longest = min(self._max_draft_tokens, spare)
        budgets = np.minimum(np.maximum(left - 1, 0), longest).astype(np.int32)
        return budgets, min(0.75 * self._scale_of(rows).cut, 0.9)

    def choose(
        self,
        path_probabilities: FloatArray,
        offsets: IntArray,
        *,
        rows: int,
        other_tokens: int = 0,
        worth: Floats | None = None,
    ) -> IntArray:
        """Decide how many of each row's proposed nodes to feed: the first `keep[i]` of row i.

        Arguments are those of `Drafts`. Each of the `rows` feeds one ordinary token besides its
        drafts. `worth` `[n]` is that of a token of each row (`worth_of`); None: they are alike.
        """
        base = rows + other_tokens
        lengths = np.diff(offsets)
        spare = min(self._max_step_tokens - base, len(path_probabilities))
        spare = min(spare, int(_GROWTH * self.times.max_tokens) + 16 - base)
        if rows == 0 or not self.times.knows(base):
            return np.zeros(len(lengths), np.int32)
        keys = _keys(path_probabilities, offsets, lengths)
        ranked = np.sort(keys)[::-1][: max(spare, 0)]
        best = self._best(ranked, rows, base)
        if worth is not None and len(ranked):
            order, count = self._by_worth(keys, ranked, best, worth, lengths, base)
            row_of = np.repeat(np.arange(len(lengths)), lengths)
            keep = np.bincount(row_of[order[:count]], minlength=len(lengths))
            return np.minimum(keep, self._max_draft_tokens).astype(np.int32)
        return _prefixes(keys, ranked, best, offsets, self._max_draft_tokens)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Learn the cost of a step that fed `tokens`, including drafts and prompts.

        `context` are the keys that its decoding rows attended to, summed; `seconds` last from the
        start of this step to the start of the next, without idle time.
        """
        self._unlearned.append(_Step(tokens, rows, context, self._asked > 0, seconds))
        if len(self._unlearned) >= _UNLEARNED:
            self._learn()

    def _learn(self) -> None:
        for step in self._unlearned:
            self.times.observe(**step._asdict())
        for step in self._unlearned:
            self._earn(step.rows, step.context, step.seconds)
        self._unlearned.clear()

    def _earn(self, rows: int, context: int, seconds: float) -> None:
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
            self._since_exploring += 1

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        """Learn which nodes of a step were accepted: `[N]` estimates and `[N]` flags."""
        if len(path_probabilities):
            self.calibration.judge(path_probabilities, accepted)

    def _best(self, ranked: Floats, rows: int, base: int) -> int:
        """Return how many ranked nodes to feed, and learn the gain from drafting at this size."""
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
        if not best:
            gain = min(gain, 0.0)  # asking without drafting gains nothing, whatever the curves say
        if self._asked:
            scale.gain += 0.1 * (gain - scale.gain)
            cut = float(ranked[best]) if best < len(ranked) else 0.8 * scale.cut
            scale.cut += 0.2 * (cut - scale.cut)
        chosen = self._explore(ranked, rows, base, best, values, worth)
        self._speedup += 0.02 * (float(yields[chosen] / seconds[chosen]) / rate - self._speedup)
        return chosen

    def _by_worth(
        self,
        keys: Floats,
        ranked: Floats,
        best: int,
        worth: Floats,
        lengths: NDArray[np.int_],
        base: int,
    ) -> tuple[NDArray[np.int_], int]:
        """Return nodes in an order, and how many of them to feed.

        Of all orders by probability times worth to a power from 0 to 1, the one that is worth most
        a second without costing more than `MOST_LOSS` of the tokens a second of the `best` nodes.
        """
        rows, limit = len(lengths), len(ranked)
        seconds = self._drafted(rows, base, limit)
        rates = _yields(rows, self.calibration.apply(ranked)) / seconds
        least = (1.0 - MOST_LOSS) * rates[best]
        chosen, most = (np.argsort(-keys, kind="stable"), best), -1.0
        of_nodes = np.repeat(worth, lengths)
        for power in _POWERS:
            order = np.argsort(-keys * of_nodes**power, kind="stable")[:limit]
            gains = self.calibration.apply(keys[order])
            values = np.cumsum(of_nodes[order] * gains) / seconds[1:]
            values += worth.sum() / seconds[1:]
            values[_yields(rows, gains)[1:] / seconds[1:] < least] = -1.0
            count = int(values.argmax())
            if values[count] > most:
                chosen, most = (order, count + 1), float(values[count])
        plain = float(worth.sum() / seconds[0]) if rates[0] >= least else -1.0
        return (chosen[0], 0) if plain > most else chosen

    def _explore(
        self, ranked: Floats, rows: int, base: int, best: int, values: Floats, worth: float
    ) -> int:
        """Return another number of nodes if it may be better and the bank can pay for a failure."""
        if self._since_exploring < _PAUSE:
            return best
        self._since_exploring = 0
        limit = len(ranked)
        if not limit:
            return best
        optimistic = _yields(rows, self.calibration.optimistic(ranked))
        seconds = self._drafted(rows, base, limit, optimistic=True)
        merit = optimistic - worth * seconds
        allowed = values[best] - values <= self._bank * worth
        largest = max(int(1.25 * (base + best)) + 8 - base, 0)
        allowed[largest + 1 :] = False
        merit[~allowed] = -np.inf
        other = int(merit.argmax())
        alike = cell_of(base + other) == cell_of(base + best)
        if alike or merit[other] <= merit[best] + _MIN_GAIN * rows:
            return best
        self._bank -= float(values[best] - values[other]) / worth
        return other

    def _asking_pays(self, rows: int, base: int) -> bool:
        """Return True if drafting paid recently at this size, or if the bank pays for asking."""
        scale = self._scale_of(rows)
        plain = self._plain(rows, base)
        if scale.gain > _MIN_GAIN:
            if self.times.stale(base) and self._since_exploring >= _PAUSE:
                price = plain * scale.gain / (1.0 + scale.gain)
                if price <= self._bank:
                    self._bank -= price
                    self._since_exploring = 0
                    return False
            return True
        price = max(self.times.asking(rows), _MIN_GAIN * plain)
        if self._since_exploring < _PAUSE:
            return False
        if price > self._bank:
            self._since_exploring = 0  # until then `declines` says so, which costs nothing
            return False
        self._bank -= price
        return True

    def _plain(self, rows: int, base: int) -> float:
        return float(self._curve(rows, base, 0, asked=False, optimistic=False)[0])

    def _drafted(self, rows: int, base: int, count: int, *, optimistic: bool = False) -> Floats:
        return self._curve(rows, base, count, asked=self._asked > 0, optimistic=optimistic)

    def _curve(self, rows: int, base: int, count: int, *, asked: bool, optimistic: bool) -> Floats:
        context = int(self._context_per_row * rows)
        return self.times.curve(
            base, count, rows=rows, context=context, asked=asked, optimistic=optimistic
        )

    def _scale_of(self, rows: int) -> _Scale:
        """Return what was learned at about this many rows; at first, a copy of the nearest size."""
        index = rows if rows < 8 else 8 + cell_of(rows) // 2
        scale = self._scales.get(index)
        if scale is None:
            near = min(self._scales, key=lambda other: abs(other - index), default=None)
            scale = _Scale() if near is None else replace(self._scales[near])
            self._scales[index] = scale
        return scale


def _yields(rows: int, probabilities: Floats) -> Floats:
    """Expected tokens of steps that feed the first 0, 1, .. nodes: `[m+1]`."""
    yields = np.zeros(len(probabilities) + 1)
    np.cumsum(probabilities, out=yields[1:])
    yields += rows
    return yields


def _keys(path_probabilities: FloatArray, offsets: IntArray, lengths: NDArray[np.int_]) -> Floats:
    """Rank nodes by probability; among equal ones shallow nodes come before deep ones."""
    place = np.arange(len(path_probabilities)) - np.repeat(offsets[:-1], lengths)
    keys = path_probabilities.astype(np.float64)
    keys[~(keys >= 0.0)] = 0.0  # negative or nan, from a broken source
    np.minimum(keys, 1.0, out=keys)
    keys -= 1e-9 * place
    return keys


def _prefixes(keys: Floats, ranked: Floats, count: int, offsets: IntArray, limit: int) -> IntArray:
    """Return how many of the `count` best nodes each row has, at most `limit`: `[n]`."""
    rows = len(offsets) - 1
    if count == 0:
        return np.zeros(rows, np.int32)
    threshold = ranked[count - 1]
    keep = _per_row(keys >= threshold, offsets)
    surplus = int(keep.sum()) - count
    if surplus > 0:
        # Several nodes are as good as the last one: the first rows get theirs.
        equal = _per_row(keys == threshold, offsets)
        dropped = np.minimum(np.cumsum(equal[::-1]), surplus)
        keep -= np.diff(dropped, prepend=0)[::-1]
    return np.minimum(keep, limit).astype(np.int32)


def _per_row(flags: NDArray[np.bool_], offsets: IntArray) -> NDArray[np.int64]:
    total = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=total[1:])
    return np.asarray(total[offsets[1:]] - total[offsets[:-1]])
