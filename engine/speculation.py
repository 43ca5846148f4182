"""DraftPlanner: how much a decode step shall draft, from measured step times. One for all engines.

A step that verifies drafts feeds more tokens through the model. Below some number of tokens a
forward pass costs the same whatever it carries (it waits for weights from memory), above it each
token costs its share of arithmetic. The planner is told what each step cost and what each draft
was worth, and picks the number of draft tokens that makes most tokens a second; at large batch
that is none.

A step, as an engine uses it:

    budgets, least = planner.ask(left, other_tokens=...)          # what to ask the cache for
    drafts = cache.draft(rows, budgets, least_probability=least)
    keep = planner.choose(drafts.path_probabilities, drafts.offsets, rows=n, other_tokens=...)
    ...forward pass of the first keep[i] nodes of each row...
    planner.observe(tokens=..., rows=n, context=..., seconds=...)
    planner.judge(path_probabilities_of_fed_nodes, accepted_flags)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cache.trajectory import FloatArray, IntArray
from engine.budget import draft_budgets


class DraftPlanner:
    """Chooses draft lengths for one engine. Pure: no clock of its own, no randomness."""

    def __init__(self, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_draft_tokens = max_draft_tokens

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        """What is worth asking the cache for.

        Args:
            left: `[n]` tokens that each running row may still write before its limit.
            other_tokens: tokens of the same step that belong to no decoding row (prompts).

        Returns:
            `[n]` most draft tokens of each row, and the least path probability worth drafting.
        """
        budgets = draft_budgets(
            left,
            max_step_tokens=max(self._max_step_tokens - other_tokens, 0),
            max_draft_tokens=self._max_draft_tokens,
        )
        return budgets, 0.0

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
        return np.diff(offsets).astype(np.int32)

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        """A step that fed `tokens` (drafts and prompts included) for `rows` rows took so long.

        Args:
            tokens: fed through the model.
            rows: decoding rows.
            context: keys that they attended to, summed over the rows.
            seconds: from this step's beginning to the next one's, with nothing idle in between.
        """

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        """What became of the nodes fed in a step: `[N]` their estimates, and whether accepted."""

    def continuation(self, length: int) -> FloatArray:
        """Path probabilities for a chain that continues an old text in step with the response."""
        return np.power(np.float32(0.95), np.arange(1, length + 1, dtype=np.float32))
