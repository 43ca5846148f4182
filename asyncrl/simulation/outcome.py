"""What a simulated run comes to: counts at the beginning of each step, and their differences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Mark:
    """Counts when a step began."""

    seconds: float
    trained: float
    """Seconds in which the trainer computed."""
    told: Counter[type]
    """Events, by type."""
    commanded: Counter[type]
    """Commands, by type."""
    data_bytes: float
    """Of trajectories."""
    tally: Tally
    """All that generators count."""


def rates(before: Counter[type], after: Counter[type], seconds: float) -> dict[str, float]:
    """How many of each type came per second between two counts, by the types' names."""
    counts = {kind.__name__: count for kind, count in (after - before).items()}
    return {name: counts[name] / seconds for name in sorted(counts)}


@dataclass(slots=True)
class Installs:
    """How long weights took from their publication to the generators."""

    published: dict[int, float] = field(default_factory=dict)
    """Time at which each version was published."""
    seconds: list[float] = field(default_factory=list)
    """Of each install."""

    def installed(self, version: int, now: float) -> None:
        """A generator has installed a version."""
        if version in self.published:
            self.seconds.append(now - self.published[version])
