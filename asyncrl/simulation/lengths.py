"""Lengths of answers, and the share of an answer that verification accepts."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

Rule = Literal["token", "block"]
_NORMAL = NormalDist()
_POINTS = 256
"""Points at which the survival of the longest answer is evaluated."""

Lengths = Callable[[random.Random], int]


def lognormal(median: float, sigma: float, longest: int) -> Lengths:
    """Draw log-normal lengths up to `longest`; `sigma` is the deviation of the logarithm."""

    def draw(rng: random.Random) -> int:
        return max(1, min(longest, round(median * math.exp(sigma * rng.gauss(0.0, 1.0)))))

    return draw


def empirical(lengths: Sequence[int]) -> Lengths:
    """Draw lengths from those of a run."""
    observed = tuple(lengths)
    return lambda rng: rng.choice(observed)


@dataclass(frozen=True, slots=True)
class Survival:
    """The accepted prefix of a verification, given the distance between two policies.

    `token`: each token is accepted with probability 1 - TV, a lower bound for every rule.

    `block`: the rule that is used (docs/exactness.md). A prefix survives with probability E[w],
    where w is the running min(1, w p/q): a random walk of log-ratios, reflected at 0. A share
    `decisive` of the tokens carries all of the drift, each with log p/q ~ N(-s^2/2, s^2), where s
    is such that the total variation of the token is TV / decisive. With many small steps the walk
    is Brownian, and a prefix with the accumulated standard deviation v survives with probability
    (2 + v^2/2) Phi(-v/2) - v phi(v/2).

    By both rules a token outside the stored top K ends the prefix if its identity changes. Drawn
    with the same noise from two distributions whose log-ratios are N(0, s^2), it changes with
    probability E max(0, d) for d ~ N(0, 2 s^2), which is sqrt(2) times their total variation.
    Tokens outside count as decisive; they hardly move the walk, as their probability is a sum.
    """

    rule: Rule = "token"
    decisive: float = 0.25
    """Share of tokens that carry the drift. Measured: 0.27 to 0.85 (docs/modes.md)."""
    outside: float = 0.0
    """Share of tokens drawn outside the stored top K."""
    noise: float = 0.0
    """Total variation per token under unchanged weights: half of `noise_floor.abs_mean`."""

    def kept(
        self, segments: Sequence[tuple[int, float]], version: int, drift: float, rng: random.Random
    ) -> float:
        """Draw the number of tokens of an answer that verification accepts.

        `segments` are (policy version, number of tokens), in order; `version` verifies. Policies
        drift by `drift`, the total variation per token and optimizer step, always in the same
        direction, which is the worst case. The noise is independent: log-ratios add in variance.
        """
        left = _exponential(rng)
        if self.rule == "block":
            left = self._walk_left(math.exp(-left), segments, version, drift)
        uncut = _exponential(rng) if self.outside else math.inf
        kept = 0.0
        for drawn, tokens in segments:
            rate, cuts = self._rates(drift * (version - drawn))
            fits = min(left / rate if rate else math.inf, uncut / cuts if cuts else math.inf)
            if fits < tokens:
                return kept + math.floor(fits)
            left -= rate * tokens
            uncut -= cuts * tokens
            kept += tokens
        return kept

    def _walk_left(
        self, chance: float, segments: Sequence[tuple[int, float]], version: int, drift: float
    ) -> float:
        """Return the variance at which the walk of this probability ends, often infinity."""
        walked = sum(self._rates(drift * (version - drawn))[0] * count for drawn, count in segments)
        if not math.isinf(walked) and survival(math.sqrt(walked)) > chance * (1.0 + 1e-9):
            return math.inf
        return bisected(survival, chance, 40.0, 50) ** 2

    def expected(self, lengths: Sequence[int], distance: float) -> float:
        """Return the expected share of all tokens of whole answers that verification accepts.

        `distance` is the total variation per token between the two policies, without noise.
        """
        rate, cuts = self._rates(distance)
        if math.isinf(rate):
            return 0.0
        counts = Counter(lengths)
        width = max(1.0, max(counts) / _POINTS)
        kept = 0.0
        for i in range(math.ceil(max(counts) / width)):
            at = (i + 0.5) * width
            walked = rate * at
            chance = survival(math.sqrt(walked)) if self.rule == "block" else math.exp(-walked)
            reached = sum(
                count * min(width, max(0.0, length - i * width)) for length, count in counts.items()
            )
            kept += reached * chance * math.exp(-cuts * at)
        return kept / sum(lengths)

    def _rates(self, drifted: float) -> tuple[float, float]:
        """Return, per token, the hazard or variance of the walk, and the chance of a cut."""
        return _rates(self.rule, self.decisive, self.outside, self.noise, drifted)


@lru_cache(maxsize=1 << 12)
def _rates(
    rule: Rule, decisive: float, outside: float, noise: float, drifted: float
) -> tuple[float, float]:
    distance = math.hypot(drifted, noise)
    apart = distance / decisive
    cuts = outside * min(1.0, math.sqrt(2.0) * apart)
    if rule == "token":
        return (-math.log1p(-distance) if distance < 1.0 else math.inf), cuts
    if apart >= 1.0:
        return math.inf, cuts
    s = 2.0 * _NORMAL.inv_cdf((1.0 + apart) / 2.0)
    return (1.0 - outside) * decisive * s**2, cuts


def _exponential(rng: random.Random) -> float:
    return -math.log(1.0 - rng.random())


def survival(v: float) -> float:
    """Return the survival of a prefix with accumulated standard deviation v, rule `block`."""
    tail = _NORMAL.cdf(-v / 2.0)
    return (2.0 + v * v / 2.0) * tail - v * _NORMAL.pdf(v / 2.0)


def bisected(falling: Callable[[float], float], value: float, high: float, rounds: int) -> float:
    """Return the largest found x from 0 to `high` at which a falling function is above `value`."""
    low = 0.0
    for _ in range(rounds):
        middle = (low + high) / 2.0
        if falling(middle) > value:
            low = middle
        else:
            high = middle
    return low
