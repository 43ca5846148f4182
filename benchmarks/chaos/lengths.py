"""Whether two sets of response lengths come from one distribution: the Kolmogorov-Smirnov test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from asyncrl.wire.records.step import StepMetrics

FALSE_ALARM = 0.001
"""Probability, at most, of calling two equal distributions different. The test is conservative
here: lengths are discrete, and both runs draw for the same prompts with the same seeds, so that
most of their responses are alike."""


def lengths_of(steps: Sequence[StepMetrics]) -> Counter[int]:
    """Samples trained on by response length, over these steps."""
    total: Counter[int] = Counter()
    for step in steps:
        total.update(step.batch.response_lengths)
    return total


def p_value(one: Counter[int], other: Counter[int]) -> float:
    """The asymptotic p-value of the two-sample Kolmogorov-Smirnov test.

    With D the largest distance of the two distribution functions and n, m samples, it is
    2 * sum over k of (-1)^(k-1) exp(-2 k^2 D^2 n m / (n + m)).
    """
    n, m = one.total(), other.total()
    if not n or not m:
        raise ValueError("a distribution of lengths has no sample")
    distance, below, below_other = 0.0, 0, 0
    for length in sorted(one.keys() | other.keys()):
        below += one[length]
        below_other += other[length]
        distance = max(distance, abs(below / n - below_other / m))
    x = 2 * distance**2 * n * m / (n + m)
    if x < 0.05:  # the series converges slowly, to 1
        return 1.0
    total = math.fsum((1 if k % 2 else -1) * math.exp(-x * k * k) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))
