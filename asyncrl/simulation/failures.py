"""What goes wrong in a simulated run: lost generators, lost trainers, and slow generators."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Scope = Literal["generator", "node"]


@dataclass(frozen=True, slots=True)
class Failures:
    """How often something is lost, and when it is back. The default loses nothing.

    Losses are a Poisson process. A lost generator loses its samples, finished or not; what was on
    its way to the trainer arrives. What is generated again gets the length that it had, since short
    answers are lost less often. It comes back under a new name and without weights. A lost
    trainer loses every step since its last checkpoint.
    """

    per_node_hour: float = 0.0
    """Losses of a generator, or of a node with all its generators, per node and hour."""
    scope: Scope = "node"
    """What one loss takes: one `generator`, or all of a `node`."""
    restart_seconds: float = 120.0
    """From a loss until the replacement has joined, in seconds."""
    trainer_per_hour: float = 0.0
    """Losses of the trainer, per hour."""
    checkpoint_every: int = 1
    """Steps between two checkpoints, to which a lost trainer returns."""

    @property
    def any(self) -> bool:
        """Whether anything is ever lost."""
        return self.per_node_hour > 0 or self.trainer_per_hour > 0


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Generators that are slower than the others, for the whole run. By default there are none."""

    share: float = 0.0
    """Of all generators, 0 to 1; rounded to whole generators."""
    factor: float = 2.0
    """How many times as long everything takes that they compute."""

    def slowness(self, generators: int, seed: int) -> list[float]:
        """The factor of each generator."""
        slow = round(self.share * generators)
        rng = random.Random(f"stragglers {seed}")  # noqa: S311 - a simulation
        chosen = set(rng.sample(range(generators), slow))
        return [self.factor if index in chosen else 1.0 for index in range(generators)]
