"""Worth of a token of each row: a step ends with the slowest of the samples that it waits for.

Samples that a step waits for (priority 0) count by the length that they are expected to have left,
squared: the longest decides when the step ends. Run-ahead counts little; it has a step's time or
more. What is expected depends on tokens that were drawn before only, so budgets change speed and
never what is sampled (docs/decisions/0099).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

AHEAD = 0.02
"""Worth of a token of run-ahead, over one of the row that has most left."""
SHORT = 64
"""Tokens below which lengths are not told apart."""


def worth_of(
    priority: NDArray[np.integer], generated: NDArray[np.integer], known: NDArray[np.integer]
) -> NDArray[np.float64] | None:
    """Return what a token of each row is worth, `[n]`, at most 1; None if all are worth the same.

    Args:
        priority: `[n]` of the rows' requests; 0: a step waits for them.
        generated: `[n]` tokens of their responses so far. Lengths have heavy tails: what has
            become long is expected to have as much left.
        known: `[n]` tokens that an earlier continuation still has; 0: there is none. A rejected
            response most often has about its old length.
    """
    due: NDArray[np.bool_] = priority == 0
    left = np.maximum(np.where(known > 0, known, generated), SHORT).astype(np.float64)
    if not due.any():
        return None
    worth: NDArray[np.float64] = np.minimum(left / left[due].max(), 1.0) ** 2
    worth[~due] = AHEAD
    return None if np.ptp(worth) == 0 else worth
