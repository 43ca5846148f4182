"""A planner that drafts as much as it may, for comparisons and tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import FloatArray, IntArray


class FixedBudget:
    """Fills every step with drafts up to a fixed number of tokens; learns nothing.

    What is drafted then never depends on how long steps take. It satisfies
    `asyncrl.engine.drafting.planner.Planner`.

    Args:
        max_step_tokens: most tokens of a step.
        max_draft_tokens: most draft tokens of one row.
    """

    def __init__(self, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_draft_tokens = max_draft_tokens

    def declines(self, rows: int) -> bool:
        """Whether a step of so many rows has no room for a draft."""
        return min(self._max_step_tokens - rows, self._max_draft_tokens) <= 0

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """An equal share of the step's tokens for each row, however improbable its drafts are.

        Args:
            left: `[n]` tokens that each running row may still generate before its limit, at least
                1. No row drafts its last token: the draw after its last draft generates it anyway.
            other_tokens: tokens of the same step that belong to no decoding row (prompts).
        """
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
        """Ignore what a step cost."""

    def judge(
        self, path_probabilities: NDArray[np.floating[Any]], accepted: NDArray[np.bool_]
    ) -> None:
        """Ignore what was accepted."""
