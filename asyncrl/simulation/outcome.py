"""What a simulated run comes to: counts at the beginning of each step, and their differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from asyncrl.simulation.sim_request import Tally


@dataclass(slots=True)
class Outcome:
    """Results of a simulated run, over the steps after the first `warm_up` ones."""

    step_seconds: float
    """Mean seconds of a step."""
    tokens_per_second: float
    """Response tokens trained on."""
    generator_idle: float
    """Share of the generators' time in which they neither decode nor score, 0 to 1; a lost
    generator is idle until it is back."""
    trainer_idle: float
    """Share of the trainer's time in which it processes no group, 0 to 1."""
    staleness_mean: float
    """Mean over the tokens trained on, in steps."""
    staleness_max: int
    """Largest staleness of a token trained on, in steps."""
    regenerated: float
    """Tokens rejected by verification over tokens trained on."""
    mean_length: float
    """Response tokens of a sample."""
    events: int
    """Events that the scheduler was told, in the whole run."""
    told: dict[str, float] = field(default_factory=dict)
    """Events that the scheduler was told, per second, by type."""
    commanded: dict[str, float] = field(default_factory=dict)
    """Commands that it issued, per second, by type."""
    data_bytes_per_second: float = 0.0
    """Bytes of trajectories into the trainer."""
    weights_seconds_mean: float = 0.0
    """From the publication of a version until a generator has installed it: the mean over
    generators and versions, in the whole run. Generators that join later do not count."""
    weights_seconds_max: float = 0.0
    """The longest of these."""
    generators_lost: int = 0
    """In the whole run, like all that follows."""
    trainers_lost: int = 0
    groups_failed: int = 0
    """Groups that no step trained on, because `max_attempts` generators were lost with them."""
    without_signal: float = 0.0
    """Groups that dynamic sampling left out, over those that it looked at."""
    left_over: float = 0.0
    """Groups that were begun for a step and taken by a later one, per step."""
    lost: float = 0.0
    """Tokens lost with generators, in the whole run, over tokens trained on in the whole run."""
    environment_idle: float = 0.0
    """Share of the generators' time in which nothing decodes while samples wait for environments;
    part of `generator_idle`. 0 without environments, like all that follows."""
    slots_used: float = 0.0
    """Share of the slots' time in which a sample decodes."""
    turns_discarded: float = 0.0
    """Actions behind a rejection over all actions that environments were given."""
    prefilled_again: float = 0.0
    """Samples that came back without their KV, over all actions."""


def mean(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of each number, over at least one outcome; a type that is missing counts 0."""
    count = len(outcomes)
    numbers: dict[str, Any] = {}
    for one in fields(Outcome):
        values = [getattr(outcome, one.name) for outcome in outcomes]
        if one.name in ("told", "commanded"):
            names = sorted({name for value in values for name in value})
            numbers[one.name] = {n: sum(v.get(n, 0.0) for v in values) / count for n in names}
        else:
            numbers[one.name] = sum(values) / count
    return Outcome(**numbers)


@dataclass(frozen=True, slots=True)
class Mark:
    """Counts when a step began."""

    seconds: float
    busy: float
    """Seconds in which generators computed, all together."""
    trained: float
    """Seconds in which the trainer computed."""
    rejected: float
    """Tokens rejected by verification."""
    told: Counter[type]
    """Events, by type."""
    commanded: Counter[type]
    """Commands, by type."""
    data_bytes: float
    """Of trajectories."""
    tally: Tally
    """All that generators count."""

    def rates(self, later: Mark) -> tuple[dict[str, float], dict[str, float]]:
        """Events and commands per second from here to a later mark, by the names of their types."""
        seconds = max(1e-9, later.seconds - self.seconds)
        told, commanded = later.told - self.told, later.commanded - self.commanded
        return _named(told, seconds), _named(commanded, seconds)


def _named(counts: Counter[type], seconds: float) -> dict[str, float]:
    return {kind.__name__: count / seconds for kind, count in sorted_by_name(counts)}


def sorted_by_name(counts: Counter[type]) -> list[tuple[type, int]]:
    """The counts of types, in the order of their names."""
    return sorted(counts.items(), key=lambda entry: entry[0].__name__)


@dataclass(slots=True)
class Installs:
    """How long weights took from their publication to the generators."""

    published: dict[int, float] = field(default_factory=dict)
    """Time at which each version was published."""
    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def installed(self, version: int, now: float) -> None:
        """A generator has installed a version."""
        if version in self.published:
            seconds = now - self.published[version]
            self.count += 1
            self.total += seconds
            self.longest = max(self.longest, seconds)

    @property
    def mean(self) -> float:
        """Seconds; 0 if nothing was installed."""
        return self.total / self.count if self.count else 0.0
