"""Parts of every engine's drafter: the planner, the times of its steps, warm code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.drafting.planner import DraftPlanner, Planner
from asyncrl.engine.drafting.proposals import warm_up as warm_up_proposals
from asyncrl.engine.drafting.step_times import warm_up as warm_up_step_times
from asyncrl.engine.remote.extras import DrafterSettings
from asyncrl.engine.remote.worker.rows import warm_up as warm_up_rows
from asyncrl.rollout.trajectory import FloatArray, IntArray


class FixedBudget:
    """A `Planner` that fills every step up to a fixed number of tokens; learns nothing."""

    def __init__(self, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_draft_tokens = max_draft_tokens

    def declines(self, rows: int) -> bool:
        """Return True if a step of this many rows has no room for a draft."""
        return min(self._max_step_tokens - rows, self._max_draft_tokens) <= 0

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """Give each row an equal share of the step's tokens, but never draft its last token."""
        n = len(left)
        spare = self._max_step_tokens - other_tokens - n
        if n == 0 or spare <= 0 or self._max_draft_tokens <= 0:
            return np.zeros(n, np.int32), 0.0
        share, extra = divmod(spare, n)
        budgets = np.full(n, share, np.int32)
        budgets[:extra] += 1
        longest = np.minimum(left - 1, self._max_draft_tokens).astype(np.int32)
        return np.minimum(budgets, longest), 0.0

    def choose(
        self,
        path_probabilities: FloatArray,  # noqa: ARG002
        offsets: IntArray,
        *,
        rows: int,  # noqa: ARG002
        other_tokens: int = 0,  # noqa: ARG002
    ) -> IntArray:
        """Feed all that was proposed."""
        return np.diff(offsets).astype(np.int32)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Ignore the cost of a step."""

    def judge(
        self, path_probabilities: NDArray[np.floating[Any]], accepted: NDArray[np.bool_]
    ) -> None:
        """Ignore acceptance."""


_GAP = 0.002
"""Seconds between two steps that a scheduler may need, however short the step."""


@dataclass(slots=True)
class _Step:
    began: float
    tokens: int
    rows: int
    context: int = 0
    ended: float = 0.0
    """0: no tokens were drawn in it."""


class StepTimer:
    """Reports to a planner how long steps took, with all that the engine does until the next one.

    A step ends when the next one begins, or at a break (no work, a pause, prompts to take in).
    Steps that mostly took in prompts are not reported. If `guess_breaks`, `rest` is not called
    before breaks, and a step that is followed by a gap longer than itself plus 2 ms is left out.
    """

    def __init__(
        self,
        planner: Planner,
        clock: Callable[[], float] = time.perf_counter,
        *,
        guess_breaks: bool = False,
    ) -> None:
        self.planner = planner
        self.clock = clock
        self._guess_breaks = guess_breaks
        self._step: _Step | None = None

    def begin(self, now: float) -> None:
        """Begin a step, which ends the previous one."""
        last = self._step
        if last is not None and self._guess_breaks:
            gap = now - last.ended
            if gap > last.ended - last.began + _GAP:
                self._step = None
        self.rest(now)

    def rest(self, now: float) -> None:
        """End the previous step; what follows is not timed."""
        last, self._step = self._step, None
        if last is not None and last.ended:
            self.planner.observe(
                tokens=last.tokens, rows=last.rows, context=last.context, seconds=now - last.began
            )

    def note(self, began: float, *, tokens: int, rows: int, drafted: int) -> None:
        """Time the step that has begun, unless it mostly takes in prompts.

        `began` was given to `begin`; `tokens` include prompts and the `drafted` ones.
        """
        if rows and tokens <= 2 * (rows + drafted):
            self._step = _Step(began, tokens, rows)

    @property
    def noted(self) -> bool:
        """True if the step that has begun is timed."""
        return self._step is not None

    def drawn(self, context: int) -> None:
        """Note that the step's tokens are drawn, over `context` keys."""
        if self._step is not None:
            self._step.context = context
            self._step.ended = self.clock()


def planner_of(settings: DrafterSettings, max_draft_tokens: int, vocab_size: int) -> Planner:
    """Return the planner that the settings ask for, bounded by the memory for logits."""
    fixed = settings.fixed_step_tokens
    if fixed is not None:
        return FixedBudget(max_step_tokens=fixed, max_draft_tokens=max_draft_tokens)
    affordable = settings.logits_bytes // (4 * vocab_size)
    return DraftPlanner(
        max_step_tokens=min(settings.max_step_tokens, affordable), max_draft_tokens=max_draft_tokens
    )


def warm_up() -> None:
    """Compile what drafting calls, or load the compiled code."""
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
    context = np.arange(8, dtype=np.int32)
    cache.insert("warm-up", context, context)
    row = cache.open("warm-up", context)
    cache.draft(np.array([row], np.int32), np.array([2], np.int32))
    cache.close(row)
    warm_up_rows()
    warm_up_proposals()
    warm_up_step_times()
