"""What goes wrong in a simulated run: lost generators, lost trainers, and slow generators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import UserError

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

    def __post_init__(self) -> None:
        """Raise UserError for a setting that cannot be."""
        if not 0 <= self.per_node_hour < math.inf or not 0 <= self.trainer_per_hour < math.inf:
            raise UserError("failures per hour must be >= 0 and finite")
        if self.scope not in ("generator", "node"):
            raise UserError(f"a failure loses a generator or a node, not {self.scope!r}")
        if not 0 < self.restart_seconds < math.inf:
            raise UserError("the seconds of a restart must be > 0 and finite")
        if self.checkpoint_every < 1:
            raise UserError("a checkpoint must be written every 1 step or more")


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Generators that are slower than the others, for the whole run. By default there are none."""

    share: float = 0.0
    """Of all generators, 0 to 1; rounded to whole generators."""
    factor: float = 2.0
    """How many times as long everything takes that they compute."""

    def __post_init__(self) -> None:
        """Raise UserError for a setting that cannot be."""
        if not 0 <= self.share <= 1:
            raise UserError("the share of slow generators must be from 0 to 1")
        if not 1 <= self.factor < math.inf:
            raise UserError("slow generators must take at least 1 times as long, and finite")

    def slowness(self, generators: int, seed: int) -> list[float]:
        """The factor of each generator."""
        slow = round(self.share * generators)
        rng = random.Random(f"stragglers {seed}")  # noqa: S311 - a simulation
        chosen = set(rng.sample(range(generators), slow))
        return [self.factor if index in chosen else 1.0 for index in range(generators)]


class LossTimes:
    """Draws when something is lost, and what.

    Args:
        failures: the rates.
        units: number of generators or nodes, whichever are lost.
        nodes: number of nodes.
        seed: of the simulation; other draws do not depend on these.
    """

    def __init__(self, failures: Failures, units: int, nodes: int, seed: int) -> None:
        self._units = units
        self._rate = failures.per_node_hour * nodes / 3600
        self._trainer_rate = failures.trainer_per_hour / 3600
        self._rng = random.Random(f"failures {seed}")  # noqa: S311 - a simulation
        self._trainer_rng = random.Random(f"trainer failures {seed}")  # noqa: S311

    def begin(self, unit: Callable[[float], None], trainer: Callable[[float], None]) -> None:
        """Schedule the first losses, by their seconds from now."""
        if self._rate:
            unit(self.until_unit())
        if self._trainer_rate:
            trainer(self.until_trainer())

    def until_unit(self) -> float:
        """Seconds until the next loss of a generator or node."""
        return self._rng.expovariate(self._rate)

    def unit(self) -> int:
        """Which one is lost."""
        return self._rng.randrange(self._units)

    def until_trainer(self) -> float:
        """Seconds until the next loss of the trainer."""
        return self._trainer_rng.expovariate(self._trainer_rate)
