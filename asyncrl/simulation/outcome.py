"""The outcome of a simulated run: counts at the beginning of each step, and their differences."""

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.simulation.sim_request import Tally


@dataclass(slots=True)
class Outcome:
    """Results of a simulated run, over the steps after the first `warm_up` ones."""

    step_seconds: float
    tokens_per_second: float
    generator_idle: float
    """Share of the generators' time without decoding or scoring, 0 to 1, lost ones included."""
    trainer_idle: float
    """Share of the trainer's time without a group to process, 0 to 1."""
    staleness_mean: float
    """Mean over the tokens trained on, in steps."""
    staleness_max: int
    """Largest staleness of a token trained on, in steps."""
    regenerated: float
    """Tokens rejected by verification over tokens trained on."""
    mean_length: float
    events: int
    run_ahead: str = ""
    """Depth that `max_runahead_groups: auto` chose last, and why."""
    told: dict[str, float] = field(default_factory=dict)
    """Scheduler events per second, by type."""
    commanded: dict[str, float] = field(default_factory=dict)
    """Scheduler commands per second, by type."""
    data_bytes_per_second: float = 0.0
    weights_seconds_mean: float = 0.0
    """Seconds from a version's publication until a generator has installed it: the mean over
    generators and versions, in the whole run, without generators that join later."""
    weights_seconds_max: float = 0.0
    generators_lost: int = 0
    """Number of generators lost in the whole run. All that follows is for the whole run, too."""
    trainers_lost: int = 0
    groups_failed: int = 0
    """Groups that no step trained on, because `max_attempts` generators were lost with them."""
    without_signal: float = 0.0
    """Groups that dynamic sampling left out, over those that it looked at."""
    left_over: float = 0.0
    """Groups that were begun for a step and taken by a later one, per step."""
    lost: float = 0.0
    """Tokens lost with generators over tokens trained on, in the whole run."""
    environment_idle: float = 0.0
    """Share of the generators' time in which nothing decodes while samples wait for environments;
    part of `generator_idle`. 0 without environments, like all that follows."""
    slots_used: float = 0.0
    turns_discarded: float = 0.0
    """Actions behind a rejection over all actions given to environments."""
    prefilled_again: float = 0.0
    """Samples that came back without their KV, over all actions."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Counts when a step began."""

    seconds: float
    trained: float
    told: Counter[type]
    commanded: Counter[type]
    data_bytes: float
    tally: Tally


def rates(before: Counter[type], after: Counter[type], seconds: float) -> dict[str, float]:
    """Return events per second between two counts, by type name."""
    counts = {kind.__name__: count for kind, count in (after - before).items()}
    return {name: counts[name] / seconds for name in sorted(counts)}


@dataclass(slots=True)
class Installs:
    """Times of weights from their publication to their install."""

    published: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def installed(self, version: int, now: float) -> None:
        """Record that a generator has installed a version."""
        if version in self.published:
            self.seconds.append(now - self.published[version])
