"""How long answers are, and how far a kept prefix of one reaches under a newer policy."""

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
"""Draws the tokens of one answer."""


def lognormal(median: float, sigma: float, longest: int) -> Lengths:
    """Log-normal with this median, cut at `longest`; sigma is that of the logarithm."""

    def draw(rng: random.Random) -> int:
        return max(1, min(longest, round(median * math.exp(sigma * rng.gauss(0.0, 1.0)))))

    return draw


def empirical(lengths: Sequence[int]) -> Lengths:
    """Those seen in a run."""
    seen = tuple(lengths)
    return lambda rng: rng.choice(seen)


@dataclass(frozen=True, slots=True)
class Survival:
    """How much of a kept text a verification keeps, from how far the policies are apart.

    `token`: each token is accepted with 1 - TV: the rule token by token, and the least that any
    rule keeps.

    `block`: the rule that is used (docs/exactness.md). A prefix survives with E[w], w the running
    min(1, w p/q): a random walk of log-ratios, reflected at 0. A share `decisive` of the tokens
    carries all of the drift, each with log p/q ~ N(-s^2/2, s^2), s so that the total variation is
    TV / decisive. With many small steps the walk is Brownian, and a prefix in which it has gathered
    the standard deviation v survives with (2 + v^2/2) Phi(-v/2) - v phi(v/2).
    """

    rule: Rule = "token"
    decisive: float = 0.25
    """Share of tokens that carry the drift; measured: 0.27 to 0.85 (docs/simulation.md)."""

    def kept(
        self, segments: Sequence[tuple[int, float]], version: int, drift: float, rng: random.Random
    ) -> float:
        """Tokens of an answer that a verification keeps.

        Policies drift by `drift` per step, in one direction: the worst case.

        Args:
            segments: (policy version, tokens) in order.
            version: of the policy that verifies.
            drift: total variation per token and optimizer step.
            rng: for this draw.
        """
        hazard = self._by_token if self.rule == "token" else self._by_block
        left = -math.log(1.0 - rng.random())
        if self.rule == "block":
            left = reach(math.exp(-left)) ** 2
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
        """Hazard of a token."""
        return -math.log1p(-distance) if distance < 1.0 else math.inf

    def _by_block(self, distance: float) -> float:
        """Variance of log p/q that a token adds."""
        apart = distance / self.decisive
        if apart >= 1.0:
            return math.inf
        return self.decisive * (2.0 * _NORMAL.inv_cdf((1.0 + apart) / 2.0)) ** 2


def survival(v: float) -> float:
    """Chance that a prefix survives by block: E[min over the walk] at standard deviation v."""
    tail = _NORMAL.cdf(-v / 2.0)
    return (2.0 + v * v / 2.0) * tail - v * _NORMAL.pdf(v / 2.0)


def reach(chance: float) -> float:
    """The v with `survival(v) == chance`; by bisection, `survival` falls."""
    low, high = 0.0, 40.0
    for _ in range(50):
        middle = (low + high) / 2.0
        if survival(middle) > chance:
            low = middle
        else:
            high = middle
    return low
