"""What runs with kills show against a run that was left alone, and the test of response lengths."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from asyncrl.wire.records.step import StepMetrics
from benchmarks.chaos.campaign import STEPS_AFTER, Outcome
from benchmarks.harness import table

FALSE_ALARM = 0.001
"""Probability, at most, of calling two equal distributions different. The test is conservative
here: lengths are discrete, and both runs draw for the same prompts with the same seeds, so that
most of their responses are alike."""


def lengths_of(steps: Sequence[StepMetrics]) -> Counter[int]:
    """Samples trained on by response length, over these steps."""
    total: Counter[int] = Counter()
    for step in steps:
        total.update(step.batch.response_lengths)
    return total


def p_value(one: Counter[int], other: Counter[int]) -> float:
    """The asymptotic p-value of the two-sample Kolmogorov-Smirnov test.

    With D the largest distance of the two distribution functions and n, m samples, it is
    2 * sum over k of (-1)^(k-1) exp(-2 k^2 D^2 n m / (n + m)).
    """
    n, m = one.total(), other.total()
    if not n or not m:
        raise ValueError("a distribution of lengths has no sample")
    distance, below, below_other = 0.0, 0, 0
    for length in sorted(one.keys() | other.keys()):
        below += one[length]
        below_other += other[length]
        distance = max(distance, abs(below / n - below_other / m))
    x = 2 * distance**2 * n * m / (n + m)
    if x < 0.05:  # the series converges slowly, to 1
        return 1.0
    total = math.fsum((1 if k % 2 else -1) * math.exp(-x * k * k) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


@dataclass(frozen=True)
class Comparison:
    """A run with kills against the run left alone, over the steps that both have."""

    same_groups: bool
    """Whether each step trained on the same groups."""
    length_p_value: float
    """Of the hypothesis that the lengths trained on have one distribution."""

    @property
    def same_lengths(self) -> bool:
        """Whether the test finds no difference; it errs with probability FALSE_ALARM at most."""
        return self.length_p_value >= FALSE_ALARM


def compare(outcome: Outcome, alone: Sequence[StepMetrics]) -> Comparison | None:
    """The comparison; None where a run has no step."""
    both = min(len(outcome.steps), len(alone))
    if not both:
        return None
    same = [one.groups.trained for one in outcome.steps[:both]] == [
        one.groups.trained for one in alone[:both]
    ]
    return Comparison(same, p_value(lengths_of(outcome.steps[:both]), lengths_of(alone[:both])))


@dataclass
class Findings:
    wanted: int
    """Kills of each type that were to be made."""
    outcomes: dict[str, Outcome]
    """By type of process."""
    alone: list[StepMetrics]
    """The steps of the run left alone."""

    def ratios(self) -> dict[str, float]:
        """One number per name, over all types."""
        outcomes = list(self.outcomes.values())
        kills = [kill for outcome in outcomes for kill in outcome.kills]
        compared = [compare(outcome, self.alone) for outcome in outcomes]
        return {
            "kills": len(kills),
            "not_recovered": sum(one.wanted or self.wanted for one in outcomes) - len(kills),
            "groups_lost": sum(len(outcome.account.lost) for outcome in outcomes),
            "groups_twice": sum(len(outcome.account.twice) for outcome in outcomes),
            "groups_failed": sum(len(outcome.account.failed) for outcome in outcomes),
            "seconds_to_next_step_max": max((k.seconds_to_next_step for k in kills), default=0.0),
            "engine_start_seconds_max": max((k.engine_start_seconds for k in kills), default=0.0),
            "end_seconds_max": max(
                (outcome.slowest_end() or 0.0 for outcome in outcomes), default=0.0
            ),
            "seconds_beyond_start_max": max((k.seconds_beyond_start for k in kills), default=0.0),
            "staleness_max": max((outcome.staleness_max for outcome in outcomes), default=0),
            "runs_with_other_groups": sum(one is None or not one.same_groups for one in compared),
            "runs_with_other_lengths": sum(one is None or not one.same_lengths for one in compared),
            "leftovers": sum(sum(outcome.leftovers.values()) for outcome in outcomes),
        }

    def raw(self) -> dict[str, Any]:
        return {
            "wanted_kills_by_type": self.wanted,
            "steps_after_a_kill": STEPS_AFTER,
            "length_test_false_alarm": FALSE_ALARM,
            "by_type": {name: self._raw_of(outcome) for name, outcome in self.outcomes.items()},
        }

    def _raw_of(self, outcome: Outcome) -> dict[str, Any]:
        comparison = compare(outcome, self.alone)
        return {
            "wanted": outcome.wanted or self.wanted,
            "kills": [dataclasses.asdict(kill) for kill in outcome.kills],
            "failure": outcome.failure,
            "exit_code": outcome.exit_code,
            "steps": len(outcome.steps),
            "steps_in_order": [one.step for one in outcome.steps]
            == list(range(len(outcome.steps))),
            "groups_trained": outcome.account.trained,
            "groups_failed": len(outcome.account.failed),
            "groups_lost": len(outcome.account.lost),
            "groups_twice": len(outcome.account.twice),
            "staleness_max": outcome.staleness_max,
            "leftovers": outcome.leftovers,
            "same_groups": None if comparison is None else comparison.same_groups,
            "length_p_value": None if comparison is None else comparison.length_p_value,
        }

    @property
    def failed(self) -> bool:
        """Whether something that must hold does not."""
        ratios = self.ratios()
        zeros = (
            *("not_recovered", "groups_lost", "groups_twice", "staleness_max", "leftovers"),
            *("runs_with_other_groups", "runs_with_other_lengths"),
        )
        return any(ratios[name] for name in zeros)

    def table(self) -> Table:
        """One line per type; "named": from a fault that ends the run to the end of the command."""
        rows = []
        for name, one in self.outcomes.items():
            comparison, account = compare(one, self.alone), one.account
            rows.append([
                one.about or name, one.wanted or self.wanted, len(one.kills), one.median(),
                one.slowest(), max((kill.engine_start_seconds for kill in one.kills), default=None),
                one.slowest_end(), len(account.lost), len(account.twice), len(account.failed),
                comparison and ("yes" if comparison.same_groups else "NO"),
                comparison and comparison.length_p_value, one.staleness_max,
                sum(one.leftovers.values()),
            ])  # fmt: skip
        return table(
            f"{self.wanted} random SIGKILLs of each type of process",
            "killed,kills,recovered,next step s,max,starts max,named max,groups lost,twice,failed,"
            "same ids,lengths p,staleness,left over",
            rows,
        )
