"""One real `asyncrl run` as a child process, and the numbers that its files hold."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.run_config import load_config
from asyncrl.errors import ConfigError
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.monitoring.records.spans import (
    Span,
    SpanKind,
    clip,
    flatten,
    idle_by_cause,
    read_timelines,
)
from benchmarks.harness import RunError, output_of, run_command

CONFIG = Path(__file__).with_name("pipeline.yaml")
RUNAHEAD_STEPS = 3
"""Whole steps that `verify + run-ahead` may run ahead. `verify` has the default, two."""

SYNC, KEEP_4, VERIFY, RUN_AHEAD = "sync", "keep(4)", "verify", "verify + run-ahead"


@dataclass(frozen=True)
class Mode:
    """One way to overlap generation and training."""

    name: str
    settings: tuple[str, ...]
    """`--set` values on top of `CONFIG`."""

    @property
    def slug(self) -> str:
        """The name as it appears in the names of runs."""
        kept = "".join(c if c.isalnum() else "-" for c in self.name)
        return "-".join(part for part in kept.split("-") if part)

    def missing(self) -> str | None:
        """Why the mode is not supported, None if it is."""
        try:
            load_config(CONFIG, self.settings)
        except ConfigError as error:
            return str(error).splitlines()[-1].strip()
        return None


def _mode(name: str, on_update: str, bound: int, *more: str) -> Mode:
    common = (f"scheduler.on_update={on_update}", f"scheduler.max_off_policy_steps={bound}")
    return Mode(name, (*common, *more))


def modes() -> tuple[Mode, ...]:
    """All modes, in the order in which they run."""
    groups = load_config(CONFIG).scheduler.groups_per_step
    return (
        _mode(SYNC, "keep", 0),
        _mode("keep(1)", "keep", 1),
        _mode(KEEP_4, "keep", 4),
        _mode("recompute(1)", "recompute", 1),
        _mode(VERIFY, "verify", 0),
        _mode(RUN_AHEAD, "verify", 0, f"scheduler.max_runahead_groups={RUNAHEAD_STEPS * groups}"),
    )


@dataclass(frozen=True)
class Effort:
    steps: int
    seeds: tuple[int, ...]
    intermediate_size: int
    """Size of the MLPs of the widened model."""
    evaluated: int
    """Held-out prompts of an evaluation, one sample each."""
    left_out_first: int = 10
    """Steps at the start that are not timed, while the pipeline and the caches fill."""
    left_out_last: int = 5
    """Steps at the end that are not timed: nothing runs ahead for steps that do not exist."""
    more: tuple[str, ...] = ()
    """Further settings of all runs."""
    prompts: int = 24
    """With whose samples the costs of decoding and scoring are measured."""
    turn_seconds: float = 0.5
    """Of a turn in which two processes slow each other down."""
    timeout_seconds: float = 1800.0
    """Longest time of one run."""

    @property
    def window(self) -> tuple[int, int]:
        """The first timed step and the first step after the timed ones."""
        return self.left_out_first, self.steps - self.left_out_last


SMOKE = Effort(
    steps=3, seeds=(0,), intermediate_size=320, evaluated=4, left_out_first=1, left_out_last=1,
    prompts=2, turn_seconds=0.01,
    more=("sampling.max_tokens=8", "scheduler.groups_per_step=2", "scheduler.group_size=4"),
)  # fmt: skip
QUICK = Effort(steps=50, seeds=(0,), intermediate_size=12_000, evaluated=256)
FULL = Effort(steps=160, seeds=(0, 1, 2), intermediate_size=12_000, evaluated=512)


GENERATOR, TRAINER = "generator-0", "trainer"


@dataclass(frozen=True)
class RunNumbers:
    """Means over the timed steps of one run."""

    mode: str
    seed: int
    step_seconds: float
    """Wall time per step."""
    tokens_per_second: float
    """Response tokens trained on per second."""
    tokens_per_step: float
    """Response tokens trained on per step."""
    generated_per_step: float
    """Tokens that the engine generated per step, including regenerated and not yet trained ones."""
    staleness_mean: float
    """Mean age of the trained tokens, in optimizer steps."""
    staleness_max: float
    """Largest age of a trained token, in optimizer steps."""
    verified: float
    """Tokens of older policies per step that verification kept."""
    rejected: float
    """Tokens of older policies per step that were rejected and regenerated."""
    busy: dict[str, dict[str, float]]
    """Process to kind of work to seconds per step."""
    idle: dict[str, dict[str, float]]
    """Process to cause of idleness to share of the time."""
    rewards: list[tuple[float, float]] = field(default_factory=list)
    """(wall seconds since the start of training, mean reward) of every step, timed or not."""
    accuracy: float | None = None
    """Held-out accuracy of the last checkpoint, sampled as in training."""

    @property
    def regenerated_share(self) -> float:
        return self.rejected / self.tokens_per_step

    @property
    def survival(self) -> float | None:
        """Share of the verified tokens that were kept."""
        total = self.verified + self.rejected
        return self.verified / total if total else None

    def idle_share(self, process: str) -> float:
        """Share of the time in which a process was idle, over all causes."""
        return min(1.0, sum(self.idle[process].values()))

    def busy_seconds(self, process: str) -> float:
        """Seconds of work of a process per step."""
        return sum(self.busy[process].values())


def carry_out(mode: Mode, seed: int, *, model: Path, effort: Effort, folder: Path) -> Path:
    """Train with the command line, as a user does. Returns the run's folder."""
    name = f"{mode.slug}-seed{seed}"
    settings = (
        *(f"run.name={name}", f"run.directory={folder}", f"run.steps={effort.steps}"),
        *(f"run.seed={seed}", f"model.path={model}"),
        *mode.settings,
        *effort.more,
    )
    output_of(run_command(CONFIG, settings), name, effort.timeout_seconds)
    return folder / name


def read_run(run: Path, mode: str, seed: int, window: tuple[int, int]) -> RunNumbers:
    """The numbers of the steps of `window`, from a finished run's metrics and time lines."""
    steps = read_metrics(run / "metrics.jsonl")
    first, end = window
    if not 1 <= first < end <= len(steps):
        raise RunError(f"{run.name} has {len(steps)} steps; {first} to {end} were to be timed")
    before, timed = steps[first - 1], steps[first:end]
    begins, ends = before.time, timed[-1].time
    count = len(timed)
    grown = timed[-1].tokens - before.tokens
    tokens = statistics.fmean(step.batch.tokens for step in timed)
    timelines = read_timelines(run / "timeline")
    missing = {GENERATOR, TRAINER} - timelines.keys()
    if missing:
        raise RunError(f"{run.name} has no time line of {', '.join(sorted(missing))}")
    watched = {process: timelines[process] for process in (GENERATOR, TRAINER)}
    return RunNumbers(
        mode=mode,
        seed=seed,
        step_seconds=(ends - begins) / count,
        tokens_per_second=tokens * count / (ends - begins),
        tokens_per_step=tokens,
        generated_per_step=grown.generated / count,
        staleness_mean=statistics.fmean(step.staleness.mean for step in timed),
        staleness_max=max(step.staleness.max for step in timed),
        verified=grown.verified / count,
        rejected=grown.rejected / count,
        busy={p: busy_by_kind(spans, begins, ends, count) for p, spans in watched.items()},
        idle={p: idle_by_cause(spans, begins, ends) for p, spans in watched.items()},
        rewards=[(step.wall_seconds, step.learning.reward_mean) for step in steps],
    )


def busy_by_kind(spans: Sequence[Span], start: float, end: float, steps: int) -> dict[str, float]:
    """Seconds per step by kind of work, largest first."""
    seconds: dict[str, float] = {}
    for span in flatten(clip(spans, start, end)):
        if span.kind != SpanKind.WAITING:
            seconds[span.kind] = seconds.get(span.kind, 0.0) + span.seconds / steps
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
