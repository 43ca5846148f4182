"""Chooses how far to run ahead (`scheduler.max_runahead_groups: auto`), by what a token costs.

The cost of a depth is seconds per token trained on, over a window of steps. Where generators and
the trainer share their processors, run-ahead takes from the work that is due, so a run begins
there without it; on separate ones it begins two steps ahead (docs/decisions/0098). From
then on neighbouring depths are tried for a window each, and one that is cheaper is kept. A trial
that costs more ends early. Trials are paid from a budget: what they have cost and may cost is at
most `BUDGET` of the run so far, and what better depths have gained. So the choice is never slower
than the depth that it began with by more than that.

Depths are whole steps. A change holds from the first step of which no group was issued. What is
started depends on times and on samples that were drawn before, never on a sample that is still to
be drawn; verification is exact whenever a sample was begun. No I/O, clock or randomness.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

DEPTHS = (0, 1, 2, 3, 4, 6, 8)
"""Whole steps of run-ahead that are chosen among."""
OWN, SHARED = 2, 0
"""Steps with which a run begins: trainer and generators have separate processors, or share."""
BUDGET = 0.01
"""Largest share of the run's steps that trials may lose."""
WINDOW = 8
"""Steps of a first measurement; a comparison that was too close doubles them for the next."""
MAX_WINDOW = 64
ENOUGH = 0.01
"""Smallest gain for which a depth is changed."""
_LONGER = 4
"""Windows that a trial which seems faster may take until that is sure, and that it is compared
with."""
_EARLY = 3
"""Steps after which a trial that is clearly slower ends."""
_CLEAR = 2.5
"""Standard errors by which it must be slower."""
_OUTLIER = 4.0
"""Steps that took longer than this many medians, such as those of an evaluation, count as that."""
_TOWARDS, _AWAY = 0.02, 0.2
"""Shares that a trial is expected to lose before any was made: deeper on separate devices, where
slots are idle; and less deep there, or deeper on shared ones."""


class Cost(NamedTuple):
    """Seconds per token of some steps, with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, steps: list[tuple[float, int]]) -> Cost:
        """Return the cost of (seconds, tokens) of at least two steps."""
        most = _OUTLIER * statistics.median(seconds for seconds, _ in steps)
        times = [min(seconds, most) for seconds, _ in steps]
        tokens = sum(count for _, count in steps)
        mean = sum(times) / tokens
        off = [time - mean * count for time, (_, count) in zip(times, steps, strict=True)]
        square = sum(one * one for one in off) / (len(steps) - 1)
        return cls(mean, math.sqrt(square * len(steps)) / tokens)

    def gain_over(self, other: Cost) -> Cost:
        """Return the share by which this is cheaper than the other, with its standard error."""
        ratio = self.mean / other.mean
        parts = self.error / self.mean, other.error / other.mean
        return Cost(1.0 - ratio, ratio * math.hypot(*parts))


@dataclass(slots=True)
class _Neighbour:
    """Knowledge of a depth that may be tried."""

    loss: float
    """Share that it is expected to lose."""
    window: int = WINDOW
    not_before: int = 0
    """Step before which it is not tried again."""


@dataclass(slots=True)
class RunAhead:
    """The chosen depth, from what `on_step` hears of each trained step.

    >>> ahead = RunAhead(shared=False, groups_per_step=16)
    >>> ahead.groups, ahead.why
    (32, 'a run on separate devices begins with 2 steps')
    """

    shared: bool
    """True if the trainer and a generator compute on the same processors."""
    groups_per_step: int
    steps: int = -1
    """Chosen depth, in whole steps; -1: that with which such a run begins."""
    why: str = field(init=False)
    trying: int | None = field(default=None, init=False)
    """Depth that is in force for a trial, in steps; None: the chosen one is."""
    _base: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, tokens) of the last steps at the chosen depth."""
    _trial: list[tuple[float, int]] = field(default_factory=list)
    _first: int | None = 0
    """First step that measures the depth in force; None: the next one that is free."""
    _count: int = 0
    """Steps that were trained."""
    _allowed: float = 0.0
    """Steps that trials may lose: `BUDGET` of each step, and what better depths have gained."""
    _lost: float = 0.0
    """Steps that trials have lost."""
    _gain: float = 0.0
    """Share by which the chosen depth is cheaper than the first one, at least."""
    _known: dict[tuple[int, int], _Neighbour] = field(default_factory=dict)
    """Neighbours by (depth, tried depth)."""

    def __post_init__(self) -> None:
        if self.steps in DEPTHS:
            self.why = f"{_counted(self.steps)}, as before the run was resumed"
            return
        self.steps = SHARED if self.shared else OWN
        about = "on shared devices" if self.shared else "on separate devices"
        self.why = f"a run {about} begins with {_counted(self.steps)}"

    @property
    def groups(self) -> int:
        """Groups that may be started ahead of their version: of the trial, if there is one."""
        steps = self.steps if self.trying is None else self.trying
        return steps * self.groups_per_step

    def restart(self) -> None:
        """Measure anew: the generators, the settings or the trainer have changed."""
        self._base, self._trial, self._first = [], [], None

    def on_step(self, step: int, *, seconds: float, tokens: int, next_free: int, last: int) -> None:
        """Take the measurements of a trained step, after which `groups` may differ.

        Args:
            step: its index.
            seconds: since the previous step ended.
            tokens: response tokens that it trained on.
            next_free: first step of which no group was issued, from which a change holds.
            last: last step of the run.
        """
        self._count += 1
        self._allowed += BUDGET + self._gain
        if self._first is None:  # what was measured counts no more; a trial is given up
            self.trying, self._first = None, next_free + 1
        if step < self._first or tokens <= 0 or not seconds > 0:
            return
        if self.trying is not None:
            self._trial.append((seconds, tokens))
            self._judge(self.trying, next_free, next_free - step)
            return
        self._base = [*self._base[-MAX_WINDOW + 1 :], (seconds, tokens)]
        self._begin(next_free, last, next_free - step)

    def _begin(self, next_free: int, last: int, begun: int) -> None:
        """Try a neighbour if the budget allows one that can be measured before the run ends.

        `begun` steps have the depth that is in force, whatever is decided now.
        """
        place = DEPTHS.index(self.steps)
        chances = []
        for depth in (*DEPTHS[place + 1 : place + 2], *DEPTHS[max(0, place - 1) : place]):
            one = self._neighbour(depth)
            fits = next_free + one.window + 1 <= last and len(self._base) >= one.window
            lost = self._lost + one.loss * (one.window + begun)
            if fits and self._count >= one.not_before and lost <= self._allowed:
                chances.append((one.loss, depth))
        if chances:
            self.trying = min(chances)[1]
            self._trial, self._first = [], next_free + 1

    def _judge(self, tried: int, next_free: int, begun: int) -> None:
        """Keep the tried depth if it was cheaper, return from it if it was not."""
        one = self._neighbour(tried)
        if len(self._trial) < _EARLY:
            return
        base, length = self._base[-_LONGER * one.window :], len(self._trial)
        gain = Cost.of(self._trial).gain_over(Cost.of(base))
        is_slower = gain.mean < -max(ENOUGH, _CLEAR * gain.error)
        is_faster = gain.mean > max(ENOUGH, gain.error)
        may_be_faster = gain.mean > 0 and length < _LONGER * one.window  # going on costs nothing
        if not is_slower and (length < one.window or (may_be_faster and not is_faster)):
            return
        is_faster |= gain.mean > ENOUGH
        self.trying = None
        self._lost += max(0.0, -gain.mean) * (len(self._trial) + begun)
        seen = f"{_counted(tried)} took {abs(gain.mean):.0%} {'less' if gain.mean > 0 else 'more'}"
        if is_faster:
            before, self.steps = self.steps, tried
            surely = max(0.0, gain.mean - gain.error)
            self._gain = max(0.0, 1.0 - (1.0 - self._gain) * (1.0 - surely))
            self.why = f"{seen} time a token than {_counted(before)}"
            back = self._neighbour(before)
            back.loss, back.not_before = gain.mean, self._count + 8 * one.window
            self._base, self._trial = self._trial, []
            return
        self.why = f"{seen} time a token than {_counted(self.steps)}, which stay"
        one.loss, one.not_before = max(0.0, -gain.mean), self._count + 4 * one.window
        if abs(gain.mean) < 2 * gain.error:
            one.window = min(MAX_WINDOW, 2 * one.window)
        self._trial, self._first = [], next_free + 1

    def _neighbour(self, depth: int) -> _Neighbour:
        towards = depth > self.steps and not self.shared
        return self._known.setdefault(
            (self.steps, depth), _Neighbour(_TOWARDS if towards else _AWAY)
        )


def _counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps or 'no'} steps"
