"""Failures of a simulated run: lost generators, lost trainers, and slow generators."""

import random
from dataclasses import dataclass
from typing import Literal

Scope = Literal["generator", "node"]


@dataclass(frozen=True, slots=True)
class Failures:
    """Rates and durations of losses, which are a Poisson process. The default loses nothing.

    A lost generator loses its samples, but messages under way to the trainer arrive. A regenerated
    sample keeps its length, since short answers are lost less often. The generator comes back under
    a new name and without weights. A lost trainer loses every step since its last checkpoint.
    """

    per_node_hour: float = 0.0
    """Losses of a generator, or of a node with all its generators, per node and hour."""
    scope: Scope = "node"
    """The extent of one loss: one `generator`, or all of a `node`."""
    restart_seconds: float = 120.0
    """Seconds from a loss until the replacement has joined."""
    trainer_per_hour: float = 0.0
    checkpoint_every: int = 1
    """Steps between two checkpoints, to which a lost trainer returns."""

    @property
    def any(self) -> bool:
        """True if losses occur."""
        return self.per_node_hour > 0 or self.trainer_per_hour > 0


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Generators that are slower than the others for the whole run; none by default."""

    share: float = 0.0
    """Share of all generators, 0 to 1; rounded to whole generators."""
    factor: float = 2.0
    """Factor of the time of all their computation."""

    def slowness(self, generators: int, seed: int) -> list[float]:
        """Return each generator's factor."""
        slow = round(self.share * generators)
        rng = random.Random(f"stragglers {seed}")  # noqa: S311 - a simulation
        chosen = set(rng.sample(range(generators), slow))
        return [self.factor if index in chosen else 1.0 for index in range(generators)]
