"""One paced run as a child process, and the numbers that its files hold."""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.run_config import load_config
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.monitoring.records.spans import clip, idle_by_cause, read_timelines
from benchmarks.harness import RunError, output_of, overrides
from benchmarks.paced.child import RECORDS
from benchmarks.paced.pace import Work, pace_variable
from benchmarks.paced.setting import CONFIG, Paced

_ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Numbers:
    """Means over the timed steps of one paced run."""

    step_seconds: float
    """Wall time per step."""
    tokens_per_step: float
    """Response tokens trained on per step."""
    staleness_max: float
    """Largest age of a trained token, in optimizer steps."""
    kept: float | None
    """Share of the verified tokens that were accepted; None if nothing was verified."""
    regenerated: float
    """Tokens rejected by verification over tokens trained on."""
    generator_idle: float
    """Share of the time in which a generator had nothing to decode or score, mean over them."""
    idle_causes: dict[str, float]
    """Share of the time by what generators waited for."""
    generator_device_idle: float
    """Share of the time in which a generator's modelled device did nothing."""
    trainer_device_idle: float
    """The same of the trainer's."""
    generator_busy: dict[str, float]
    """Modelled seconds per step by kind, mean over the generators."""
    trainer_busy: dict[str, float]
    """The same of the trainer."""
    computed: float
    """Real seconds of the computations over the modelled ones, generators."""
    overrun: float
    """Share of the time by which steps of the generators took longer than modelled."""
    between_steps: float
    """Seconds of the host between two steps of a generator that has work."""
    lengths: dict[tuple[int, int], int]
    """By (group, sample): response tokens that were trained on, of the whole run."""

    @property
    def seconds_per_token(self) -> float:
        return self.step_seconds / self.tokens_per_step


def carry_out(paced: Paced, model: Path, folder: Path) -> Numbers:
    """Train with the command line, on paced devices."""
    command = [sys.executable, "-m", "benchmarks.paced.command", "run", str(CONFIG)]
    command += ["--end-with", str(os.getpid()), *overrides(paced.settings(model, folder))]
    load_config(CONFIG, paced.settings(model, folder))  # refuses before a process is started
    environment = os.environ | pace_variable(paced.cost())
    output_of(command, paced.name, TIMEOUT_SECONDS, cwd=_ROOT, env=environment)
    return read_run(folder / paced.name, paced.window)


def read_run(run: Path, window: tuple[int, int]) -> Numbers:
    """The numbers of the steps of `window`."""
    steps = read_metrics(run / "metrics.jsonl")
    first, end = window
    if not 1 <= first < end <= len(steps):
        raise RunError(f"{run.name} has {len(steps)} steps; {first} to {end} were to be timed")
    before, timed = steps[first - 1], steps[first:end]
    begins, ends, count = before.time, timed[-1].time, len(timed)
    grown = timed[-1].tokens - before.tokens
    tokens = statistics.fmean(step.batch.tokens for step in timed)
    devices = {path.stem: read_jsonl(path, Work) for path in (run / RECORDS).glob("*.jsonl")}
    generators = [lines for name, lines in devices.items() if name.startswith("generator")]
    trainer = [line for name, lines in devices.items() if name == "trainer" for line in lines]
    if not generators or not trainer:
        raise RunError(f"{run.name} has no records of its devices in {run / RECORDS}")
    busy = [_busy(lines, begins, ends) for lines in generators]
    works = [line for lines in generators for line in lines if begins < line.time <= ends]
    modelled = sum(sum(line.seconds.values()) for line in works)
    idle: dict[str, float] = {}
    timelines = [
        spans
        for name, spans in read_timelines(run / "timeline").items()
        if name.startswith("generator")
    ]
    for spans in timelines:
        shares = idle_by_cause(clip(spans, begins, ends), begins, ends)
        for cause, share in shares.items():
            idle[cause] = idle.get(cause, 0.0) + share / len(timelines)
    verified = grown.verified + grown.rejected
    training = _busy(trainer, begins, ends)
    seconds = ends - begins
    return Numbers(
        step_seconds=seconds / count,
        tokens_per_step=tokens,
        staleness_max=max(step.staleness.max for step in timed),
        kept=grown.verified / verified if verified else None,
        regenerated=grown.rejected / count / tokens,
        generator_idle=sum(idle.values()),
        idle_causes=dict(sorted(idle.items(), key=lambda item: -item[1])),
        generator_device_idle=1 - statistics.fmean(sum(one.values()) for one in busy) / seconds,
        trainer_device_idle=1 - sum(training.values()) / seconds,
        generator_busy=_mean([{k: v / count for k, v in one.items()} for one in busy]),
        trainer_busy={kind: value / count for kind, value in training.items()},
        computed=sum(line.computed for line in works) / modelled,
        overrun=sum(line.overrun for line in works) / seconds / len(generators),
        between_steps=max(0.0, seconds * len(generators) * (1 - sum(idle.values())) - modelled)
        / max(1, sum(line.items for line in works)),
        lengths={(g, s): n for line in trainer for g, s, n in line.lengths},
    )


def _busy(lines: Sequence[Work], begins: float, ends: float) -> dict[str, float]:
    """Modelled seconds by kind between two times."""
    found: dict[str, float] = {}
    for line in lines:
        if begins < line.time <= ends:
            for kind, seconds in line.seconds.items():
                found[kind] = found.get(kind, 0.0) + seconds
    return found


def _mean(maps: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = {key for one in maps for key in one}
    return {key: statistics.fmean(one.get(key, 0.0) for one in maps) for key in sorted(keys)}
