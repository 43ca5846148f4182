"""Generalised advantage estimation (arXiv 1506.02438, eq. 11-16). Pure numpy, in float64.

For a sample of L trained tokens with reward r[t] of token t, and V[t] the critic's value of the
state in which token t was drawn (prompt and the tokens before it, observed ones included):

    delta[t] = r[t] + gamma V[t+1] - V[t]
    A[t]     = delta[t] + gamma lambda A[t+1]            A[L] = 0
    return   = A[t] + V[t]                               what V[t] is trained towards

V[L], the value after the last token, is 0 where the sample ended. It is the critic's value there
only if a cut-off response is bootstrapped.

    >>> import numpy as np
    >>> rewards, values, lengths = np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.array([2])
    >>> out = advantages_of(rewards, values, lengths, gae_lambda=0.5)
    >>> out.advantages.tolist(), out.returns.tolist()
    ([0.125, 0.75], [0.625, 1.0])
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Advantages(NamedTuple):
    """Advantages and value targets of N tokens."""

    advantages: Floats
    returns: Floats


def advantages_of(
    rewards: Floats,
    values: Floats,
    lengths: NDArray[np.int64],
    last_values: Floats | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> Advantages:
    """Estimate the advantages of B samples that lie one after another.

    `rewards` and `values` `[N]` are of each token and of the state before it; `lengths` `[B]`, at
    least 1, sum to N. `last_values` `[B]` are of the state after each sample, by default 0.
    """
    count, longest = len(lengths), int(lengths.max(initial=0))
    filled = np.arange(longest)[None, :] < lengths[:, None]
    # Right-aligned, so that all samples end in the last column and no step looks at padding.
    filled = filled[:, ::-1]
    reward, value = np.zeros((count, longest)), np.zeros((count, longest))
    reward[filled], value[filled] = rewards, values
    after = np.zeros(count) if last_values is None else np.asarray(last_values, np.float64)
    running, out = np.zeros(count), np.zeros((count, longest))
    for at in range(longest - 1, -1, -1):
        delta = reward[:, at] + gamma * after - value[:, at]
        running = delta + gamma * gae_lambda * running
        out[:, at] = running
        after = value[:, at]
    advantages = out[filled]
    return Advantages(advantages, advantages + values)


def token_rewards(
    rewards: Floats, lengths: NDArray[np.int64], penalties: Floats | None = None
) -> Floats:
    """Put `[B]` rewards of samples at their last tokens, `[N]`, and subtract `[N]` penalties."""
    out = np.zeros(int(lengths.sum())) if penalties is None else -np.asarray(penalties, np.float64)
    out[np.cumsum(lengths) - 1] += rewards
    return out
