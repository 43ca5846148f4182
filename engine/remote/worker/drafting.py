"""What every engine's drafter is made of: the planner, the times of its steps, warm code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.drafting.fixed_budget import FixedBudget
from asyncrl.engine.drafting.planner import DraftPlanner, Planner
from asyncrl.engine.drafting.proposals import warm_up as warm_up_proposals
from asyncrl.engine.drafting.step_times import warm_up as warm_up_step_times
from asyncrl.engine.remote.extras import DrafterSettings
from asyncrl.engine.remote.worker.rows import warm_up as warm_up_rows

_GAP = 0.002
"""Seconds between two steps that a scheduler may need, whatever the step took."""


@dataclass(slots=True)
class _Step:
    """The current step, or the last one."""

    began: float
    tokens: int
    rows: int
    context: int = 0
    ended: float = 0.0
    """0: no tokens were drawn in it."""


class StepTimer:
    """Tells a planner how long steps took, with all that the engine does until the next one.

    A step ends when the next one begins, or at a break (no work, a pause, prompts to take in). The
    planner is not told of steps that mostly took in prompts.

    Args:
        planner: to tell.
        clock: gives seconds.
        guess_breaks: `rest` is not called before breaks. A step that is followed by a longer gap
            than it took itself, and 2 ms, is left out.
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
        """A step begins: the one before is over, and its time is known."""
        last = self._step
        if last is not None and self._guess_breaks:
            gap = now - last.ended
            if gap > last.ended - last.began + _GAP:
                self._step = None
        self.rest(now)

    def rest(self, now: float) -> None:
        """The step before is over, and what comes next belongs to no step that is timed."""
        last, self._step = self._step, None
        if last is not None and last.ended:
            self.planner.observe(
                tokens=last.tokens, rows=last.rows, context=last.context, seconds=now - last.began
            )

    def note(self, began: float, *, tokens: int, rows: int, drafted: int) -> None:
        """Time the step that has begun, unless it mostly takes in prompts.

        Args:
            began: as given to `begin`.
            tokens: fed to the model, drafts and prompts included.
            rows: that decode.
            drafted: draft tokens among these.
        """
        if rows and tokens <= 2 * (rows + drafted):
            self._step = _Step(began, tokens, rows)

    @property
    def noted(self) -> bool:
        """Whether the step that has begun is timed."""
        return self._step is not None

    def drawn(self, context: int) -> None:
        """The tokens of the step that has begun are drawn, over so many tokens of context."""
        if self._step is not None:
            self._step.context = context
            self._step.ended = self.clock()


def planner_of(settings: DrafterSettings, max_draft_tokens: int, vocab_size: int) -> Planner:
    """The planner that the settings ask for; it never exceeds the memory for logits by drafts."""
    fixed = settings.fixed_step_tokens
    if fixed is not None:
        return FixedBudget(max_step_tokens=fixed, max_draft_tokens=max_draft_tokens)
    affordable = settings.logits_bytes // (4 * vocab_size)
    return DraftPlanner(
        max_step_tokens=min(settings.max_step_tokens, affordable), max_draft_tokens=max_draft_tokens
    )


def warm_up() -> None:
    """Compile what drafting calls, or load it compiled."""
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
    context = np.arange(8, dtype=np.int32)
    cache.insert("warm-up", context, context)
    row = cache.open("warm-up", context)
    cache.draft(np.array([row], np.int32), np.array([2], np.int32))
    cache.close(row)
    warm_up_rows()
    warm_up_proposals()
    warm_up_step_times()
