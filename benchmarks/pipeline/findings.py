"""Results of benchmarks.pipeline: means over seeds, and the ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.harness import table, targets_table
from benchmarks.pipeline.costs import Costs
from benchmarks.pipeline.overlap import bound
from benchmarks.pipeline.run import GENERATOR, KEEP_4, RUN_AHEAD, SYNC, TRAINER, Effort, RunNumbers


def tables(findings: Findings) -> list[Table]:
    """Costs, modes, and targets."""
    ran = list(dict.fromkeys(run.mode for run in findings.runs))
    printed = [_costs(findings)]
    if ran:
        printed.append(_modes(findings, ran))
    return [*printed, _targets(findings)]


def _costs(findings: Findings) -> Table:
    costs = findings.costs
    median, p90, longest = costs.lengths
    values = {
        "parameters": f"{findings.parameters / 1e6:.1f} M",
        "response tokens: median, 90%, longest": f"{median:.0f}, {p90:.0f}, {longest:.0f}",
        f"decoded tokens/s, {costs.slots} rows, one core": f"{costs.decoded:.0f}",
        "the same, drafting from siblings": f"{costs.decoded_with_cache:.0f}",
        "scored (verified) tokens/s, one core": f"{costs.scored:.0f}",
        "cost of a decoded token in scored tokens": f"{costs.ratio:.1f}",
    }
    return table("model and costs", "quantity,value", values.items())


def _modes(findings: Findings, ran: list[str]) -> Table:
    def mean(mode: str, name: str) -> float:
        return findings.mean(mode, lambda run: float(getattr(run, name)))

    def idle(mode: str, process: str) -> str:
        """Seconds of work in a step, and the share of the time without any."""
        busy = findings.mean(mode, lambda run: run.busy_seconds(process))
        return f"{busy:.3f}, {findings.mean(mode, lambda run: run.idle_share(process)):.1%}"

    first, end = findings.effort.window
    rows = [
        (
            mode, f"{findings.step_seconds(mode):.3f}", f"{mean(mode, 'tokens_per_second'):.0f}",
            idle(mode, GENERATOR), idle(mode, TRAINER), f"{mean(mode, 'staleness_mean'):.2f}",
            f"{max(run.staleness_max for run in findings.of(mode)):.0f}",
            f"{mean(mode, 'regenerated_share'):.1%}",
            None if findings.of(mode)[0].accuracy is None else f"{mean(mode, 'accuracy'):.3f}",
        )
        for mode in ran
    ]  # fmt: skip
    missing = [(mode, escape(why)) for mode, why in findings.missing.items()]
    return table(
        f"steps {first} to {end - 1} of {findings.effort.steps}, {len(findings.effort.seeds)} seed",
        "mode,s / step,tokens/s,generator: work idle,trainer: work idle,staleness,max,regenerated,"
        "accuracy",
        rows,
        caption=f"accuracy before training: {findings.accuracy_before}"
        + "".join(f"\n[bold red]{mode} is MISSING:[/] {why}" for mode, why in missing),
    )


def _targets(findings: Findings) -> Table:
    made = targets_table(findings.ratios(), TARGETS, FLOORS)
    difference, found = findings.accuracy_difference(RUN_AHEAD), "[bold red]MISSING[/]"
    if difference is not None:
        colour = "green" if difference.within_noise else "bold red"
        interval = f"{difference.low:+.3f} to {difference.high:+.3f}, {difference.of}"
        found = f"[{colour}]{difference.mean:+.3f} ({interval})[/]"
    made.add_row("accuracy_difference", "interval contains 0", found)
    return made


TARGETS = {
    "sync_over_verify": 1.5,
    "verify_over_keep4": 1.15,
    "generator_idle": 0.05,
    "regenerated_share": 0.15,
}
"""`sync_over_verify` must be at least this, the others at most. The interval of
`accuracy_difference` must contain 0."""
FLOORS = frozenset({"sync_over_verify"})

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95%, from 1 degree of freedom on."""


@dataclass(frozen=True)
class Difference:
    """A mean difference and its 95% confidence interval."""

    mean: float
    low: float
    high: float
    of: str
    """What varied, which is what the interval covers."""

    @property
    def within_noise(self) -> bool:
        return self.low <= 0 <= self.high


@dataclass
class Findings:
    effort: Effort
    costs: Costs
    parameters: int
    """Parameters of the model."""
    accuracy_before: float | None = None
    """Held-out accuracy before training."""
    slowdown: float | None = None
    """How much two busy processes slow each other down here (`overlap`); None: not measured."""
    runs: list[RunNumbers] = field(default_factory=list)
    """In the order in which they were made."""
    missing: dict[str, str] = field(default_factory=dict)
    """Mode to the reason why it has no runs."""
    failed: bool = False
    """Whether a run failed. A mode that is not supported is missing, but has not failed."""

    def of(self, mode: str) -> list[RunNumbers]:
        """The runs of a mode, sorted by seed."""
        return sorted((run for run in self.runs if run.mode == mode), key=lambda run: run.seed)

    def mean(self, mode: str, value: Callable[[RunNumbers], float]) -> float:
        """Mean over the seeds of a mode, which must have runs."""
        return statistics.fmean(value(run) for run in self.of(mode))

    def step_seconds(self, mode: str) -> float:
        return self.mean(mode, lambda run: run.step_seconds)

    def tokens_per_second(self, mode: str) -> float:
        """Mean of the tokens trained on per second."""
        return self.mean(mode, lambda run: run.tokens_per_second)

    def accuracy_difference(self, mode: str, other: str = SYNC) -> Difference | None:
        """Accuracy of one mode minus another's after equally many steps; None unless both ran.

        With several seeds, the interval is Student's t over the seeds' differences. With one seed
        it covers the sampling noise of the evaluation only, not that of training.
        """
        theirs = {run.seed: run.accuracy for run in self.of(other)}
        pairs = [
            (run.accuracy, theirs[run.seed])
            for run in self.of(mode)
            if run.accuracy is not None and theirs.get(run.seed) is not None
        ]
        if not pairs:
            return None
        return _difference([(a, b) for a, b in pairs if b is not None], self.effort.evaluated)

    def ratios(self) -> dict[str, float]:
        """Name to number. A name is missing if its modes did not run.

        `..._per_token` are the same ratios per token trained on: the modes generate different
        texts, and the mean length of a step's few samples varies by some per cent.
        """
        found: dict[str, float] = {"score_over_decode": self.costs.ratio}
        verified = self.of(RUN_AHEAD)
        if not verified:
            return found
        seconds, rate = self.step_seconds(RUN_AHEAD), self.tokens_per_second(RUN_AHEAD)
        if self.of(SYNC):
            found["sync_over_verify"] = self.step_seconds(SYNC) / seconds
            found["sync_over_verify_per_token"] = rate / self.tokens_per_second(SYNC)
        if self.of(KEEP_4):
            found["verify_over_keep4"] = seconds / self.step_seconds(KEEP_4)
            found["verify_over_keep4_per_token"] = self.tokens_per_second(KEEP_4) / rate
        found["generator_idle"] = self.mean(RUN_AHEAD, lambda run: run.idle_share(GENERATOR))
        found["regenerated_share"] = self.mean(RUN_AHEAD, lambda run: run.regenerated_share)
        found["staleness_max"] = max(run.staleness_max for run in verified)
        difference = self.accuracy_difference(RUN_AHEAD)
        if difference is not None:
            found["accuracy_difference"] = difference.mean
            found["accuracy_difference_low"] = difference.low
            found["accuracy_difference_high"] = difference.high
        if self.of(SYNC):
            training = self.mean(SYNC, lambda run: run.busy_seconds(TRAINER))
            generation = self.mean(SYNC, lambda run: run.busy_seconds(GENERATOR))
            found["training_over_generation"] = training / generation
            if self.slowdown is not None:
                found["overlap_slowdown"] = self.slowdown
                found["overlap_bound"] = bound(
                    self.slowdown, self.step_seconds(SYNC), generation, training
                )
        return found

    def raw(self) -> dict[str, Any]:
        """Everything that was measured, for the JSON file."""
        return {
            "effort": asdict(self.effort),
            "parameters": self.parameters,
            "costs": {**asdict(self.costs), "ratio": self.costs.ratio},
            "accuracy_before": self.accuracy_before,
            "slowdown": self.slowdown,
            "missing": self.missing,
            "runs": [
                {
                    **asdict(run),
                    "regenerated_share": run.regenerated_share,
                    "survival": run.survival,
                    "idle_share": {p: run.idle_share(p) for p in run.idle},
                }
                for run in self.runs
            ],
        }


def _difference(pairs: Sequence[tuple[float, float]], evaluated: int) -> Difference:
    differences = [a - b for a, b in pairs]
    mean = statistics.fmean(differences)
    if len(differences) > 1:
        t = _T_95[min(len(differences) - 1, len(_T_95)) - 1]
        margin = t * statistics.stdev(differences) / math.sqrt(len(differences))
        return Difference(mean, mean - margin, mean + margin, f"{len(differences)} seeds")
    (a, b) = pairs[0]
    margin = 1.96 * math.sqrt((a * (1 - a) + b * (1 - b)) / evaluated)
    return Difference(mean, mean - margin, mean + margin, "evaluation samples, one seed")
