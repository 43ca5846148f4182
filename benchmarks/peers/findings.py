"""Results of benchmarks.peers: seconds to an accuracy, medians over repeats, ratios."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.harness import table
from benchmarks.peers.contestants import KEEP, ON_POLICY_MODES, TRL, Workload
from benchmarks.peers.measured_run import Usage
from benchmarks.peers.shared_data import Step


def tables(findings: Findings) -> list[Table]:
    """One table per workload, then the targets."""
    return [*(_workload(findings, one) for one in findings.workloads), _targets(findings)]


def _workload(findings: Findings, workload: Workload) -> Table:
    names = dict.fromkeys(run.contestant for run in findings.runs)
    rows = []
    for name in names:
        if runs := findings.of(workload, name):
            reached = findings.seconds_to_accuracy(workload, name)
            rows.append([
                name + (" *" if any(run.usage.disturbed for run in runs) else ""), runs[0].threads,
                _spread([run.step_seconds for run in runs], 3),
                _spread(reached, 1) if reached else "not reached",
                _steps(findings, workload, name),
                _spread([run.seconds for run in runs], 1),
                _spread([run.tokens_per_second for run in runs], 0),
                _spread([run.reward for run in runs], 3),
                _spread([run.usage.cpu_seconds for run in runs], 0),
                _spread([run.usage.peak_bytes / 1e6 for run in runs], 0),
            ])  # fmt: skip
    lines = [
        f"{len(findings.of(workload, next(iter(names), '')))} repeat(s) of {workload.steps} steps",
        "steps to it: of all on-policy runs together, keep(1)'s apart (each run alone)",
        "* disturbed: other processes took more than 3% of the machine",
    ]
    for key, reason in findings.missing.items():
        if key.startswith(f"{workload.name}, "):
            name = key.split(", ", 1)[1]
            lines.append(f"[bold red]{name} is MISSING:[/] {escape(reason)}")
    return table(
        f"{workload.title}\nmedian (smallest to largest)",
        f"contestant,threads,s / step,s to {workload.accuracy},steps to it,s in all,tokens/s,"
        "mean reward,CPU s,peak MB",
        rows,
        caption="\n".join(lines),
    )


def _steps(findings: Findings, workload: Workload, name: str) -> str:
    own = [run.own_step(workload.accuracy) for run in findings.of(workload, name)]
    together, *each = (
        "-" if at is None else str(at + 1)
        for at in (findings.step_of_accuracy(workload, name), *own)
    )
    return f"{together} ({', '.join(each)})"


def _targets(findings: Findings) -> Table:
    ratios, rows = findings.ratios(), []
    for workload in findings.workloads:
        name = f"peers_{workload.name}"
        found, target = ratios.get(name), TARGETS.get(name, 0.0)
        colour = "green" if found is not None and found >= target else "bold red"
        shown = f"[{colour}]{'MISSING' if found is None else f'{found:.2f}'}[/]"
        others = (ratios.get(f"{name}_steps"), ratios.get(f"{name}_median_step"))
        rows.append((name, f">= {target}", shown, *others, findings.fastest(workload)))
    return table(
        "TRL's seconds over those of asyncrl's fastest on-policy mode",
        "ratio,target,to the accuracy,all steps,median step,mode",
        rows,
    )


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


TARGETS = {"peers_example": 2.0, "peers_uneven": 2.5, "peers_epochs": 3.0}
"""TRL's seconds to the accuracy over those of asyncrl's fastest on-policy mode: at least these."""


def step_of_accuracy(rewards: Sequence[float], accuracy: float) -> int | None:
    """Index of the first step at which the rising fit of the rewards has reached an accuracy.

    The fit is the isotonic regression: the non-decreasing sequence next to the rewards in mean
    square. It reaches the accuracy where the sum of `reward - accuracy` over all earlier steps is
    smallest, so all steps count and no window has to be chosen. None: not before the end.

    >>> step_of_accuracy([0.5, 0.9, 0.6, 0.9, 0.8], accuracy=0.8)
    3
    """
    below = list(itertools.accumulate((reward - accuracy for reward in rewards), initial=0.0))
    at = below.index(min(below))
    return at if at < len(rewards) else None


@dataclass(frozen=True)
class Run:
    workload: str
    contestant: str
    seed: int
    threads: int
    steps: list[Step]
    usage: Usage

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds

    @property
    def step_seconds(self) -> float:
        """Median length of a step without the first, which includes all warming up."""
        ends = [step.seconds for step in self.steps]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def reward(self) -> float:
        """Mean reward of all samples: higher if it learned faster."""
        return statistics.fmean(step.reward for step in self.steps)

    def own_step(self, accuracy: float) -> int | None:
        """Index of the step at which this run alone reached the accuracy."""
        return step_of_accuracy([step.reward for step in self.steps], accuracy)


@dataclass
class Findings:
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

    def step_of_accuracy(self, workload: Workload, contestant: str) -> int | None:
        """Index of the step at which a contestant counts as having reached the accuracy.

        All exactly on-policy contestants make the same steps in distribution (same prompts, rewards
        and loss, tokens drawn by the policy in training), so their runs are averaged step by step.
        `keep(1)` trains on older tokens; its own runs are averaged.
        """
        runs = [
            run
            for run in self.runs
            if run.workload == workload.name and (run.contestant == KEEP) == (contestant == KEEP)
        ]
        rewards = zip(*([step.reward for step in run.steps] for run in runs), strict=True)
        return step_of_accuracy([statistics.fmean(values) for values in rewards], workload.accuracy)

    def seconds_to_accuracy(self, workload: Workload, contestant: str) -> list[float]:
        """Of each run of a contestant; empty if the accuracy was not reached."""
        at = self.step_of_accuracy(workload, contestant)
        if at is None:
            return []
        return [run.steps[at].seconds for run in self.of(workload, contestant)]

    def fastest(self, workload: Workload) -> str | None:
        """The exactly on-policy mode of asyncrl that a user would pick for this workload."""
        seconds = {
            name: found.get("", found["_steps"])
            for name in ON_POLICY_MODES
            for found in [self._medians(workload, name)]
            if found
        }
        return min(seconds, key=lambda name: seconds[name], default=None)

    def ratios(self) -> dict[str, float]:
        """TRL's seconds over those of every other contestant: how many times faster it is.

        `peers_W_CONTESTANT` compares seconds to the accuracy, with `_steps` seconds for the same
        number of steps, with `_median_step` median steps, which leaves warming up out. `peers_W` is
        that of the fastest exactly on-policy mode.
        """
        found: dict[str, float] = {}
        for workload in self.workloads:
            trl, base = self._medians(workload, TRL), f"peers_{workload.name}"
            rows = {
                _slug(name): name for name in dict.fromkeys(run.contestant for run in self.runs)
            }
            fastest = self.fastest(workload)
            if fastest is not None:
                rows[""] = fastest
            for slug, name in rows.items():
                if name != TRL:
                    other = self._medians(workload, name)
                    prefix = f"{base}_{slug}" if slug else base
                    both = trl.keys() & other.keys()
                    found |= {prefix + suffix: trl[suffix] / other[suffix] for suffix in both}
        return dict(sorted(found.items()))

    def _medians(self, workload: Workload, contestant: str) -> dict[str, float]:
        """A contestant's seconds by the suffix of the ratio that compares them."""
        runs = self.of(workload, contestant)
        values = {
            "": self.seconds_to_accuracy(workload, contestant),
            "_steps": [run.seconds for run in runs],
            "_median_step": [run.step_seconds for run in runs],
        }
        return {suffix: statistics.median(found) for suffix, found in values.items() if found}

    def raw(self) -> dict[str, Any]:
        return {
            "workloads": [asdict(workload) for workload in self.workloads],
            "runs": [
                asdict(run)
                | {
                    "seconds_to_accuracy": self._seconds_of(run),
                    "own_step_of_accuracy": run.own_step(self.workload(run.workload).accuracy),
                    "step_seconds": run.step_seconds,
                    "tokens_per_second": run.tokens_per_second,
                    "disturbed": run.usage.disturbed,
                }
                for run in self.runs
            ],
            "steps_to_accuracy": {
                f"{workload.name}, {name}": None if at is None else at + 1
                for workload in self.workloads
                for name in dict.fromkeys(run.contestant for run in self.runs)
                for at in [self.step_of_accuracy(workload, name)]
            },
            "fastest": {one.name: self.fastest(one) for one in self.workloads},
            "missing": self.missing,
        }

    def _seconds_of(self, run: Run) -> float | None:
        at = self.step_of_accuracy(self.workload(run.workload), run.contestant)
        return None if at is None else run.steps[at].seconds

    def workload(self, name: str) -> Workload:
        return next(workload for workload in self.workloads if workload.name == name)


def _slug(name: str) -> str:
    return "_".join(
        part for part in "".join(c if c.isalnum() else " " for c in name).split()
    ).lower()
