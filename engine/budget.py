"""How many tokens a decoding step may draft: one pure function for every engine.

A step that verifies drafts feeds more tokens through the model. Below some number of tokens a
forward pass costs the same whatever it carries (it waits for weights from memory), above it each
token costs its share of arithmetic: measured here, some 16 tokens on one CPU core and some 200-300
on a GPU. Drafting beyond that point is paid for and often lost, so the budget is what is left of
it after every running row has its one ordinary token. At large batch it is 0.
"""

from __future__ import annotations

import numpy as np

from rollout.trajectory import IntArray


def draft_budgets(left: IntArray, *, max_step_tokens: int, max_draft_tokens: int) -> IntArray:
    """Most draft tokens of each row in the next step.

    Args:
        left: `[n]` tokens that each running row may still write before its limit, at least 1.
        max_step_tokens: tokens that a step may feed, drafts and ordinary ones together.
        max_draft_tokens: most draft tokens of one row.

    Returns:
        `[n]` budgets. Their sum with n is at most `max_step_tokens` (or all are 0), and no row
        drafts its last token: the draw after the last draft writes that one for nothing.
    """
    n = len(left)
    spare = max_step_tokens - n
    if n == 0 or spare <= 0 or max_draft_tokens <= 0:
        return np.zeros(n, np.int32)
    share, extra = divmod(spare, n)
    budgets = np.full(n, share, np.int32)
    budgets[:extra] += 1
    most: IntArray = np.minimum(left - 1, max_draft_tokens).astype(np.int32)
    return np.minimum(budgets, most)
