"""Simulated environments: the turns of each sample, and the latency of its environment.

Plans depend on the seed and the sample alone, so every mode and every attempt has the same ones.
"""

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from asyncrl.rollout.trajectory import SampleId

GoBack = Literal["restore", "replay", "start over"]
"""Return to before a changed turn: from a snapshot, by repeating accepted turns, or not at all."""
_LONGEST = 100.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one sample."""

    ends: tuple[int, ...]
    """Generated tokens at the end of each turn; the last number is the sample's length."""
    observations: tuple[int, ...]
    latencies: tuple[float, ...]

    @property
    def length(self) -> int:
        """Generated tokens."""
        return self.ends[-1]


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments of a simulated run."""

    latency: float
    """Median seconds of a step of an environment; log-normal."""
    latency_sigma: float = 1.0
    turns: float = 8.0
    """Median turns of a sample; log-normal, at least 1."""
    turns_sigma: float = 0.5
    max_turns: int = 64
    turn_tokens: float = 200.0
    """Median generated tokens of a turn; log-normal."""
    turn_sigma: float = 0.7
    observation_tokens: float = 200.0
    """Median tokens of an observation; log-normal with the same standard deviation."""
    go_back: GoBack = "replay"

    def plan(self, sample: SampleId, seed: int) -> Plan:
        """Draw the turns of a sample."""
        rng = random.Random(f"{seed} {sample.group} {sample.sample}")  # noqa: S311 - a simulation
        turns = max(1, min(self.max_turns, round(_draw(rng, self.turns, self.turns_sigma))))

        def draws(count: int, median: float, sigma: float) -> list[float]:
            return [_draw(rng, median, sigma) for _ in range(count)]

        tokens = [max(1, round(one)) for one in draws(turns, self.turn_tokens, self.turn_sigma)]
        observations = map(round, draws(turns - 1, self.observation_tokens, self.turn_sigma))
        observed, longest = tuple(observations), _LONGEST * self.latency
        waits = draws(turns - 1, self.latency, self.latency_sigma)
        latencies = tuple(min(longest, one) for one in waits)
        return Plan(tuple(accumulate(tokens)), observed, latencies)

    def mean_length(self, seed: int = 0, samples: int = 4000) -> tuple[float, float]:
        """Return the mean generated and observed tokens of a sample."""
        plans = [self.plan(SampleId(-1 - i, 0), seed) for i in range(samples)]
        generated = sum(plan.length for plan in plans)
        return generated / samples, sum(sum(plan.observations) for plan in plans) / samples

    @property
    def described(self) -> str:
        """Return a short description."""
        return (
            f"environments that take {self.latency:g} s a turn (median), {self.turns:g} turns of "
            f"{self.turn_tokens:g} tokens with observations of {self.observation_tokens:g} "
            f"(medians), {self.go_back} after a rejection"
        )


def _draw(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))
