"""Do draws repeat old ones more often than chance? A sharp test of fresh random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def p_value(again: int, chances: Sequence[float]) -> float:
    """Chance that so many or more of independent events of these probabilities happen."""
    distribution = np.ones(1)
    for chance in chances:
        distribution = np.convolve(distribution, [1 - chance, chance])
    return float(distribution[again:].sum())
