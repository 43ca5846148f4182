"""How tokens are weighed within a step, and what the step's sums are divided by.

    loss_normalization   weight of a token   denominator
    token                1                   trained tokens of the step (DAPO, 2503.14476, eq. 8)
    sequence             1 / L               samples of the step (GRPO, 2402.03300, eq. 3)
    sample               1                   samples of the step (Dr. GRPO, 2503.20783)

L and the denominators count trained tokens alone, not those of an environment
(`Trajectory.trained`). Only with `sample` is the gradient of a sample that of its log-probability,
divided by a number that does not depend on what was drawn: it is the one that is unbiased.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Normalization = Literal["token", "sequence", "sample"]


def token_weights(kind: Normalization, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """`[B]` lengths of samples to the `[B]` weight of each of their tokens."""
    return 1.0 / lengths if kind == "sequence" else np.ones(len(lengths))


def denominator(kind: Normalization, *, tokens: int, samples: int) -> float:
    """Of a step with so many response tokens and samples; at least 1."""
    return float(max(1, tokens if kind == "token" else samples))
