"""Counts of a run, across resumes: rewards, generation, staleness and groups."""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.config.run_config import RunConfig
from asyncrl.environments.protocol import LABEL
from asyncrl.monitoring.records.group_account import totals_of
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.view import SchedulerView
from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import (
    EngineStats,
    GroupTotals,
    OnPolicySteps,
    SignalTotals,
    StalenessMetrics,
    StepGroups,
    StepMetrics,
    TokenCounts,
    is_on_policy,
)

RATE_SECONDS = 3.0
"""Shortest time over which rates are taken: steps may be shorter than generators' reports."""


class RewardTotals:
    """Adds up the reward failures of all generators; `before` was counted before a resume."""

    def __init__(self, config: RunConfig, say: Callable[[str], None], before: RewardCounts) -> None:
        self._labels = config.reward_labels
        self._counts_as_zero = config.rewards.on_error == "zero"
        self._say = say
        self._before = before
        self._now = RewardCounts()
        self._told: set[tuple[str, str]] = set()

    @property
    def counts(self) -> RewardCounts:
        """Counts since the run began."""
        return self._before + self._now

    def update(self, reports: Iterable[RewardCounts]) -> None:
        """Add up the last report of every generator, lost ones included; print what is new."""
        self._now = sum(reports, start=RewardCounts())
        for function, reasons in self._now.failed.items():
            for reason in reasons:
                what = f"reward {function!r} gave no reward"
                if function == LABEL:
                    what = "the environment gave no answer"
                if self._counts_as_zero:
                    self._tell(
                        (function, reason),
                        f"WARNING: {what} ({reason.replace('_', ' ')}); that counts as 0 "
                        "(rewards.on_error: zero). The generators' logs show the first cases; "
                        "reward_failures in metrics.jsonl counts them",
                    )
        for function, value in self._now.largest.items():
            self._tell(
                (function, "large"),
                f"WARNING: reward {function!r} returned {value:.3g} (absolute value). Rewards this "
                "large dominate every advantage; check the function, or lower its weight",
            )

    def named(self, terms: tuple[float | None, ...]) -> dict[str, float | None]:
        """Mean of each term of a step by its function's label; empty without terms."""
        return dict(zip(self._labels, terms, strict=False))

    def summarize(self) -> None:
        """Print how many rewards failed, at the end of training."""
        counts = self.counts
        if counts.failures and self._counts_as_zero:
            self._say(
                f"WARNING: {counts.failures} rewards failed and counted as 0: "
                f"{counts.describe_failures()}"
            )

    def _tell(self, kind: tuple[str, str], text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._say(text)


class _Work(NamedTuple):
    tokens: TokenCounts = TokenCounts()
    busy_seconds: float = 0.0


class RecentWork(NamedTuple):
    """The work of the last steps, all in the same time."""

    seconds: float
    tokens: TokenCounts
    busy_share: float
    """Engine time inside steps, in seconds per second, summed over generators."""
    wait_share: float
    """The trainer's waits, in seconds per second."""
    reward_share: float
    """Waits of steps for nothing but rewards, in seconds per second."""


@dataclass(slots=True)
class GenerationTotals:
    """Adds up the counters of all generators, lost ones included. Times are monotonic seconds."""

    began: float
    _now: _Work = field(default_factory=_Work)
    _base: _Work = field(default_factory=_Work)
    _waits: tuple[float, float] = 0.0, 0.0
    """Seconds that the trainer waited, and that steps waited for rewards."""
    _history: deque[tuple[float, _Work, tuple[float, float]]] = field(default_factory=deque)

    def update(self, engines: Iterable[EngineStats]) -> None:
        """Take the last report of every generator, lost ones included."""
        engines = list(engines)
        tokens = sum((one.tokens for one in engines), start=TokenCounts())
        self._now = _Work(tokens, sum(one.busy_seconds for one in engines))

    def begin(self, now: float) -> None:
        """Begin the training phase: count from here."""
        self.began, self._base = now, self._now
        self._history = deque([(now, self._now, self._waits)])

    @property
    def tokens(self) -> TokenCounts:
        """Counts of the training phase."""
        return self._now.tokens - self._base.tokens

    @property
    def busy_seconds(self) -> float:
        """Engine time inside steps in the training phase."""
        return self._now.busy_seconds - self._base.busy_seconds

    def recent(self, now: float, waits: float, reward_waits: float) -> RecentWork:
        """Return the work of the step that ends now and of those before it.

        They last `RATE_SECONDS` at least, if that much has passed. `waits` are the trainer's in
        this step, `reward_waits` those for nothing but rewards, both in seconds.
        """
        history = self._history
        self._waits = self._waits[0] + waits, self._waits[1] + reward_waits
        history.append((now, self._now, self._waits))
        while len(history) > 2 and history[1][0] <= now - RATE_SECONDS:
            history.popleft()
        began, before, before_waits = history[0]
        seconds = max(1e-9, now - began)
        busy = (self._now.busy_seconds - before.busy_seconds) / seconds
        waited = zip(self._waits, before_waits, strict=True)
        shares = [(total - then) / seconds for total, then in waited]
        return RecentWork(seconds, self._now.tokens - before.tokens, busy, *shares)


class StepTotals:
    """Keeps a few numbers of each step, for totals; `earlier` are those before a resume."""

    def __init__(self, earlier: Iterable[StepMetrics]) -> None:
        self._steps: dict[int, tuple[StalenessMetrics, bool | None, SignalTotals]] = {}
        self._flags: Counter[bool | None] = Counter()
        for one in earlier:
            self.add(one)

    def add(self, step: StepMetrics) -> None:
        """Add a step, in place of an earlier record of it."""
        if (replaced := self._steps.get(step.step)) is not None:
            self._flags[replaced[1]] -= 1
        self._steps[step.step] = step.staleness, is_on_policy(step), SignalTotals.of(step)
        self._flags[is_on_policy(step)] += 1

    def rewind(self, step: int) -> None:
        """Forget this step and all later ones, which are trained again."""
        self._steps = {index: one for index, one in self._steps.items() if index < step}
        self._flags = Counter(flag for _, flag, _ in self._steps.values())

    def staleness(self) -> StalenessMetrics:
        """Mean of the steps' means, and maximum over all steps."""
        ages = [age for age, _, _ in self._steps.values()]
        return StalenessMetrics(
            mean=statistics.fmean(one.mean for one in ages) if ages else 0.0,
            max=max((one.max for one in ages), default=0),
        )

    def signal(self) -> SignalTotals:
        """Count what the steps could learn from."""
        return sum((signal for _, _, signal in self._steps.values()), start=SignalTotals())

    def on_policy(self, steps: int) -> OnPolicySteps:
        """Count the exactly on-policy steps of a run of this many steps."""
        return OnPolicySteps.of(self._flags, steps)


def too_few_groups(step: StepMetrics, settings: SchedulerConfig) -> str | None:
    """Warn if dynamic sampling found too few groups with signal for a step."""
    groups, most = step.groups, settings.max_groups_of_step
    if most is None or len(groups.trained) >= settings.groups_per_step:
        return None
    return (
        f"step {step.step} trained on {len(groups.trained)} groups instead of "
        f"{settings.groups_per_step}: of the {most} that it may look at "
        f"(scheduler.dynamic_sampling.max_batches), {len(groups.without_signal)} carry no signal "
        f"and {len(groups.failed)} failed"
    )


class RunGroups:
    """Counts the fates of a run's groups.

    The scheduler's ledger has those of this process; `earlier`, the records of steps, the others.
    """

    def __init__(self, earlier: Sequence[StepMetrics], per_step: int) -> None:
        self._first_step = earlier[-1].step + 1 if earlier else 0
        self._before = totals_of(earlier)
        self._ends = {0: 0} | {one.step + 1: one.groups.end for one in earlier if one.groups.end}
        self._per_step = per_step
        self._failed: set[int] = set()
        self._without_signal: set[int] = set()

    def first_groups(self, step: int) -> dict[int, int]:
        """First group of each step up to this one, with dynamic sampling."""
        return {at: group for at, group in self._ends.items() if at <= step}

    def without_signal(self, group: int) -> None:
        """Count a group that the scheduler leaves out because it carries no signal."""
        self._without_signal.add(group)

    def failed(self, group: int) -> None:
        """Count a group that the scheduler leaves out."""
        self._failed.add(group)

    def rewind(self, earlier: Sequence[StepMetrics] | None) -> None:
        """Return to these steps (None: unknown), as the scheduler's ledger did."""
        self._failed.clear()  # the groups of later steps are tried again
        self._without_signal.clear()
        if earlier is None:
            return
        self._before = totals_of([one for one in earlier if one.step < self._first_step])

    def of_step(self, step: int, trained: Sequence[int], end: int | None = None) -> StepGroups:
        """Return what trainer and scheduler reported of a step's groups.

        `end` is the first group of the next step, if steps differ in size. Nothing is inferred, so
        `monitoring.records.group_account` finds groups that were lost or trained on twice.
        """
        below = (step + 1) * self._per_step if end is None else end
        failed = {group for group in self._failed if group < below}
        without = {group for group in self._without_signal if group < below}
        self._failed -= failed
        self._without_signal -= without
        left_out = {"failed": tuple(sorted(failed)), "without_signal": tuple(sorted(without))}
        return StepGroups(trained=tuple(trained), **left_out)

    def settled(self, snapshot: SchedulerView | None) -> GroupTotals:
        """Groups settled by the whole run; before training those of earlier processes."""
        if snapshot is None:
            return self._before
        return self._before + GroupTotals(
            trained=snapshot.groups_consumed,
            failed=snapshot.groups_failed,
            without_signal=snapshot.groups_without_signal,
        )


def in_flight(snapshot: SchedulerView) -> int:
    """Count groups issued and not settled."""
    settled = snapshot.groups_consumed + snapshot.groups_failed + snapshot.groups_without_signal
    return snapshot.groups_issued - settled
