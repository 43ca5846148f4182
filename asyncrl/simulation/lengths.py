"""Lengths of answers, and how much of an answer verification accepts under a newer policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Rule = Literal["token", "block"]
_NORMAL = NormalDist()

Lengths = Callable[[random.Random], int]
"""Draws the number of tokens of one answer."""


def lognormal(median: float, sigma: float, longest: int) -> Lengths:
    """Log-normal lengths, at most `longest`; `sigma` is the standard deviation of the logarithm."""

    def draw(rng: random.Random) -> int:
        return max(1, min(longest, round(median * math.exp(sigma * rng.gauss(0.0, 1.0)))))

    return draw


def empirical(lengths: Sequence[int]) -> Lengths:
    """Lengths drawn from those of a run."""
    observed = tuple(lengths)
    return lambda rng: rng.choice(observed)


@dataclass(frozen=True, slots=True)
class Survival:
    """How long a prefix verification accepts, given the distance between two policies.

    `token`: each token is accepted with probability 1 - TV. This is the token-by-token rule, and a
    lower bound for every rule.

    `block`: the rule that is used (docs/exactness.md). A prefix survives with probability E[w],
    where w is the running min(1, w p/q): a random walk of log-ratios, reflected at 0. A share
    `decisive` of the tokens carries all of the drift, each with log p/q ~ N(-s^2/2, s^2), where s
    is such that the total variation of the token is TV / decisive. With many small steps the walk
    is Brownian, and a prefix with the accumulated standard deviation v survives with probability
    (2 + v^2/2) Phi(-v/2) - v phi(v/2).
    """

    rule: Rule = "token"
    decisive: float = 0.25
    """Share of tokens that carry the drift. Measured: 0.27 to 0.85 (docs/simulation.md)."""

    def kept(
        self, segments: Sequence[tuple[int, float]], version: int, drift: float, rng: random.Random
    ) -> float:
        """Draw the number of tokens of an answer that verification accepts.

        Policies drift by `drift` per step, always in the same direction, which is the worst case.

        Args:
            segments: (policy version, number of tokens), in order.
            version: version of the policy that verifies.
            drift: total variation per token and optimizer step.
            rng: source of randomness.
        """
        hazard = self._by_token if self.rule == "token" else self._by_block
        left = -math.log(1.0 - rng.random())
        if self.rule == "block":
            left = survival_inverse(math.exp(-left)) ** 2
        kept = 0.0
        for drawn, tokens in segments:
            rate = hazard(drift * (version - drawn))
            if rate * tokens > left:
                return kept + math.floor(left / rate)
            left -= rate * tokens
            kept += tokens
        return kept

    @staticmethod
    def _by_token(distance: float) -> float:
        """Hazard of a token: -log of the probability that it is accepted."""
        return -math.log1p(-distance) if distance < 1.0 else math.inf

    def _by_block(self, distance: float) -> float:
        """Variance that a token adds to log p/q, averaged over all tokens."""
        apart = distance / self.decisive
        if apart >= 1.0:
            return math.inf
        return self.decisive * (2.0 * _NORMAL.inv_cdf((1.0 + apart) / 2.0)) ** 2


def survival(v: float) -> float:
    """Probability that a prefix with accumulated standard deviation v survives, rule `block`."""
    tail = _NORMAL.cdf(-v / 2.0)
    return (2.0 + v * v / 2.0) * tail - v * _NORMAL.pdf(v / 2.0)


def survival_inverse(probability: float) -> float:
    """The v with `survival(v) == probability`, by bisection; `survival` is decreasing."""
    low, high = 0.0, 40.0
    for _ in range(50):
        middle = (low + high) / 2.0
        if survival(middle) > probability:
            low = middle
        else:
            high = middle
    return low
