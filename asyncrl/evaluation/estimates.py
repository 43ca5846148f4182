"""What the rewards of held-out samples say: accuracy, mean reward and pass@k, with errors.

>>> right = np.array([[1, 0], [1, 1]])  # two prompts, two samples each
>>> one = estimate(right, threshold=0.5)
>>> one.accuracy, one.pass_at
(0.75, {1: 0.75, 2: 1.0})
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.wire.records.evaluations import SetEvaluation, Verdict


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
    rewards: ArrayLike,
    *,
    threshold: float,
    lengths: ArrayLike | None = None,
    verdicts: Sequence[Sequence[Verdict]] | None = None,
    max_unscored_share: float = 0.0,
) -> SetEvaluation:
    """The estimates of one set.

    Unscored samples are left out. A prompt's mean is that of its other samples, and a prompt
    without any is left out as well; so is one with fewer than k of pass@k. No estimate is given if
    too many samples are unscored, or if the reward of every single one has failed.

    Args:
        rewards: `[P, n]` of n samples of each of P prompts.
        threshold: a sample is right if its reward is above this.
        lengths: `[P, n]` response tokens.
        verdicts: `[P, n]` what is known of each; None: all are scored.
        max_unscored_share: largest share of unscored samples.
    """
    values = np.atleast_2d(np.asarray(rewards, dtype=np.float64))
    prompts, samples = values.shape if values.size else (0, 0)
    if not prompts:
        return SetEvaluation(prompts=0, samples=0, accuracy=None)
    known = np.full((prompts, samples), "scored") if verdicts is None else np.array(verdicts)
    counted = known != "unscored"
    found = SetEvaluation(
        prompts=prompts,
        samples=int(counted.sum()),
        unscored=int((~counted).sum()),
        failed=int((known == "failed").sum()),
        accuracy=None,
        tokens=0.0 if lengths is None else float(np.mean(np.asarray(lengths, dtype=np.float64))),
    )
    if found.unscored > max_unscored_share * known.size or not (known == "scored").any():
        return found
    right = values > threshold
    accuracies, mean_rewards = _by_prompt(right, counted), _by_prompt(values, counted)
    of_prompts = list(zip((right & counted).sum(axis=1), counted.sum(axis=1), strict=True))
    passes = {
        k: np.array([pass_at_k(int(c), int(n), k) for c, n in of_prompts if n >= k])
        for k in ks_of(samples)
    }
    errors = {k: _error(each) for k, each in passes.items()}
    return msgspec.structs.replace(
        found,
        accuracy=float(accuracies.mean() if found.unscored else right.mean()),
        accuracy_error=_error(accuracies),
        reward=float(mean_rewards.mean() if found.unscored else values.mean()),
        reward_error=_error(mean_rewards),
        pass_at={k: float(each.mean()) for k, each in passes.items() if len(each)},
        pass_at_error={k: error for k, error in errors.items() if error is not None},
    )


def _by_prompt(values: NDArray[Any], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean over each prompt's samples that count; prompts without any are left out."""
    kept = counted.any(axis=1)
    means: NDArray[np.float64] = values[kept].mean(axis=1, where=counted[kept])
    return means


def _error(per_prompt: NDArray[np.float64]) -> float | None:
    """Standard error of the mean over prompts."""
    if len(per_prompt) < 2:
        return None
    return float(per_prompt.std(ddof=1) / math.sqrt(len(per_prompt)))
