"""How much is drafted inside vLLM: what pays, or a fixed number of tokens a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.budget import draft_budgets
from engine.drafting.planner import DraftPlanner
from rollout.trajectory import FloatArray, IntArray


def planner_of(settings: dict[str, Any], max_draft_tokens: int) -> DraftPlanner:
    """As the settings that `engine.vllm.client.launch` hands over say."""
    fixed = settings["max_step_tokens"]
    if fixed is not None:
        return FixedBudget(step_tokens=fixed, max_draft_tokens=max_draft_tokens)
    most = settings["most_step_tokens"]
    return DraftPlanner(max_step_tokens=most, max_draft_tokens=max_draft_tokens)


class FixedBudget(DraftPlanner):
    """Fills every step up to a number of tokens, whatever that costs: for tests and comparisons."""

    def __init__(self, *, step_tokens: int, max_draft_tokens: int) -> None:
        super().__init__(max_step_tokens=step_tokens, max_draft_tokens=max_draft_tokens)
        self._step = step_tokens
        self._row = max_draft_tokens

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """An equal share for each row."""
        spare = max(self._step - other_tokens, 0)
        budgets = draft_budgets(left, max_step_tokens=spare, max_draft_tokens=self._row)
        return budgets, 0.0

    def choose(
        self,
        path_probabilities: FloatArray,  # noqa: ARG002
        offsets: IntArray,
        *,
        rows: int,  # noqa: ARG002
        other_tokens: int = 0,  # noqa: ARG002
    ) -> IntArray:
        """All of it."""
        return np.diff(offsets).astype(np.int32)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Learns nothing."""

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        """Learns nothing."""
