"""Overlong shaping of rewards (DAPO, arXiv 2503.14476, eq. 13).

With the longest response L_max (`sampling.max_tokens`), the buffer B (`trainer.overlong_buffer`)
and a response of L tokens, observed ones included, as `sampling.max_tokens` counts them:

    0                            L <= L_max - B
    (L_max - B - L) / B          L_max - B < L <= L_max
    -1                           L = L_max and not finished (in the paper: L > L_max)

is added to its reward before advantages are computed. Metrics and samples keep the task's rewards.
A response that reaches L_max has -1 by either line.
"""

from __future__ import annotations

import numpy as np

from asyncrl.trainer.algorithms.base import Rewards


def overlong_penalties(lengths: Rewards, *, longest: int, buffer: int) -> Rewards:
    """`[G]` lengths in tokens to `[G]` numbers from -1 to 0; 0 everywhere if `buffer` is 0."""
    if buffer == 0:
        return np.zeros(len(lengths))
    return np.clip((longest - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)
