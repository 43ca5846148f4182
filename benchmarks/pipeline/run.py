"""One real `asyncrl run` as a child process, and the numbers that its files hold."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.monitoring.records.spans import (
    Span,
    SpanKind,
    clip,
    flatten,
    idle_by_cause,
    read_timelines,
)
from benchmarks.pipeline.modes import CONFIG, Effort, Mode
from benchmarks.run_command import run_command

GENERATOR, TRAINER = "generator-0", "trainer"


class RunError(Exception):
    """A run failed or its files are incomplete. The message names the run and quotes its output."""


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
    command = run_command(CONFIG, settings)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=effort.timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{name} took more than {effort.timeout_seconds:.0f} s") from error
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RunError(f"{name} failed with exit code {done.returncode}:\n{output}")
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
