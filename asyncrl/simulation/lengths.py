"""How long answers are, and how far a kept prefix of one reaches under a newer policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

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


def survivors(
    segments: Sequence[tuple[int, float]], version: int, drift: float, rng: random.Random
) -> float:
    """Tokens of an answer that a verification keeps.

    Each token is accepted with 1 - TV, the total variation between the policy that drew it and the
    one that verifies it. Policies drift by `drift` per step, in one direction: the worst case.

    Args:
        segments: (policy version, tokens) in order.
        version: of the policy that verifies.
        drift: total variation per token and optimizer step.
        rng: for this draw.
    """
    kept = 0.0
    for drawn, tokens in segments:
        distance = min(1.0, drift * (version - drawn))
        if distance > 0.0:
            until = math.log(1.0 - rng.random()) / math.log1p(-distance) if distance < 1 else 0.0
            if until < tokens:
                return kept + math.floor(until)
        kept += tokens
    return kept
