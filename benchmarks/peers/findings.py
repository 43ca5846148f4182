"""Results of benchmarks.peers: seconds to an accuracy, medians over repeats, ratios."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.contestants import TRL, VERIFY
from benchmarks.peers.measured_run import Usage
from benchmarks.peers.shared_data import Step
from benchmarks.peers.workloads import Workload

TARGETS = {"peers_example": 2.0, "peers_uneven": 2.5, "peers_epochs": 3.0}
"""TRL's seconds to the accuracy over those of asyncrl's `verify`: at least these."""


def step_of_accuracy(rewards: Sequence[float], threshold: float, window: int) -> int | None:
    """Index of the first step at whose end the mean reward of `window` steps is high enough.

    >>> step_of_accuracy([0.5, 0.9, 0.7, 0.9], threshold=0.8, window=2)
    1
    """
    for end in range(window, len(rewards) + 1):
        if statistics.fmean(rewards[end - window : end]) >= threshold:
            return end - 1
    return None


@dataclass(frozen=True)
class Run:
    """One training of one contestant."""

    workload: str
    contestant: str
    seed: int
    threads: int
    steps: list[Step]
    usage: Usage

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.steps[-1].seconds

    @property
    def step_seconds(self) -> float:
        """Median length of a step without the first, which includes all warming up."""
        ends = [step.seconds for step in self.steps]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    @property
    def tokens_per_second(self) -> float:
        """Response tokens trained on per second."""
        return sum(step.tokens for step in self.steps) / self.seconds

    def reward(self, window: int) -> float:
        """Mean reward of the last `window` steps."""
        return statistics.fmean(step.reward for step in self.steps[-window:])

    def seconds_to(self, workload: Workload) -> float | None:
        """Seconds of training until the workload's accuracy; None: it was not reached."""
        rewards = [step.reward for step in self.steps]
        at = step_of_accuracy(rewards, workload.accuracy, workload.window)
        return None if at is None else self.steps[at].seconds


@dataclass
class Findings:
    """All runs of all workloads."""

    workloads: Sequence[Workload]
    runs: list[Run] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """`workload, contestant` to the reason why there is no result."""

    def of(self, workload: Workload, contestant: str) -> list[Run]:
        """The runs of one contestant on one workload."""
        return [
            run
            for run in self.runs
            if (run.workload, run.contestant) == (workload.name, contestant)
        ]

    def ratios(self) -> dict[str, float]:
        """Every contestant's medians over those of `verify`; TRL's have names of their own."""
        found: dict[str, float] = {}
        for workload in self.workloads:
            names = dict.fromkeys(run.contestant for run in self.runs)
            for name in names:
                if name == VERIFY:
                    continue
                base = f"peers_{workload.name}"
                prefix = base if name == TRL else f"{base}_{_slug(name)}"
                for suffix, of in (("", _to(workload)), ("_steps", lambda run: run.seconds)):
                    theirs, ours = (
                        self._median(workload, name, of),
                        self._median(workload, VERIFY, of),
                    )
                    if theirs is not None and ours is not None:
                        found[prefix + suffix] = theirs / ours
        return found

    def _median(
        self, workload: Workload, contestant: str, of: Callable[[Run], float | None]
    ) -> float | None:
        values = [of(run) for run in self.of(workload, contestant)]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known and len(known) == len(values) else None

    def raw(self) -> dict[str, Any]:
        """Everything as measured."""
        return {
            "workloads": [asdict(workload) for workload in self.workloads],
            "runs": [
                asdict(run)
                | {
                    "seconds_to_accuracy": run.seconds_to(self.workload(run.workload)),
                    "step_seconds": run.step_seconds,
                    "tokens_per_second": run.tokens_per_second,
                    "disturbed": run.usage.disturbed,
                }
                for run in self.runs
            ],
            "missing": self.missing,
        }

    def workload(self, name: str) -> Workload:
        """The workload of this name."""
        return next(workload for workload in self.workloads if workload.name == name)


def _to(workload: Workload) -> Callable[[Run], float | None]:
    return lambda run: run.seconds_to(workload)


def _slug(name: str) -> str:
    return "_".join(
        part for part in "".join(c if c.isalnum() else " " for c in name).split()
    ).lower()
