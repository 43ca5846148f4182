"""What the rewards of held-out samples say: accuracy, mean reward and pass@k, with errors.

>>> right = np.array([[1, 0], [1, 1]])  # two prompts, two samples each
>>> one = estimate(right, threshold=0.5)
>>> one.accuracy, one.pass_at
(0.75, {1: 0.75, 2: 1.0})
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wire.evaluations import SetEvaluation


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples of a prompt is right.

    1 − C(n − c, k) / C(n, k) of n samples, c of them right (2107.03374, equation 1). The plug-in
    1 − (1 − c/n)^k is too low.

    Raises:
        ValueError: k is not between 1 and the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples of a prompt")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def ks_of(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two, and the number of samples.

    >>> ks_of(12)
    [1, 2, 4, 8, 12]
    """
    powers = [1 << shift for shift in range(samples.bit_length())]
    return sorted({*powers, samples} if samples else set())


def estimate(
    rewards: ArrayLike, *, threshold: float, lengths: ArrayLike | None = None
) -> SetEvaluation:
    """The estimates of one set.

    Args:
        rewards: `[P, n]` of n samples of each of P prompts.
        threshold: a sample is right if its reward is above this.
        lengths: `[P, n]` response tokens.
    """
    values = np.atleast_2d(np.asarray(rewards, dtype=np.float64))
    prompts, samples = values.shape if values.size else (0, 0)
    if not prompts:
        return SetEvaluation(prompts=0, samples=0, accuracy=0.0)
    right = values > threshold
    counts = right.sum(axis=1)
    ks = ks_of(samples)
    passes = {k: np.array([pass_at_k(int(c), samples, k) for c in counts]) for k in ks}
    errors = {k: _error(each) for k, each in passes.items()}
    return SetEvaluation(
        prompts=prompts,
        samples=prompts * samples,
        accuracy=float(right.mean()),
        accuracy_error=_error(right.mean(axis=1)),
        reward=float(values.mean()),
        reward_error=_error(values.mean(axis=1)),
        pass_at={k: float(each.mean()) for k, each in passes.items()},
        pass_at_error={k: error for k, error in errors.items() if error is not None},
        tokens=0.0 if lengths is None else float(np.mean(np.asarray(lengths, dtype=np.float64))),
    )


def _error(per_prompt: NDArray[np.float64]) -> float | None:
    """Standard error of the mean over prompts."""
    if len(per_prompt) < 2:
        return None
    return float(per_prompt.std(ddof=1) / math.sqrt(len(per_prompt)))
