"""Fits the costs of a real run to its records: the engine's log, metrics.jsonl and timelines.

docs/modes.md says what the fit assumes and what it cannot know.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.cores import rank_of
from asyncrl.engine.drafting.calibration import rising
from asyncrl.errors import UserError
from asyncrl.generator.reports import EngineRecord
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.monitoring.records.spans import Span, SpanKind, clip, read_timelines
from asyncrl.simulation.cost import MeasuredCost
from asyncrl.simulation.lengths import Survival, bisected
from asyncrl.wire.records.step import StepMetrics

WARM_UP = 3
"""First steps of a run, left out because caches are empty and kernels are not chosen yet."""
_ROW_BOUNDS = (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1 << 30)
"""Intervals are pooled by rows per step, between each two of these bounds."""
_DECODING = {SpanKind.GENERATING, SpanKind.VERIFYING, SpanKind.RUN_AHEAD}
_MAX_NORMAL_QUEUE = 16
"""Rewards that may wait without being a bottleneck: samples end in batches."""
_MIN_INTERVALS = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """The measurements of a run that a simulation of the same machine and task needs."""

    name: str
    config: RunConfig
    cost: MeasuredCost
    lengths: tuple[int, ...]
    step_seconds: float
    steps: int
    drift: float | None
    """Total variation per token by which `block` explains rejections; None: nothing verified."""
    outside: float
    """Share of tokens drawn outside the stored top K."""
    noise: float
    """Total variation per token at the noise floor; 0 if it was not measured."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An engine's work between two lines of its log."""

    seconds: float
    steps: int
    busy: float
    row_steps: int
    """Rows summed over steps: the tokens fed that were not drafts."""
    drafted: int
    scored: int
    generated: int
    rewarded: int
    rewards_queued: bool
    """True if more than `_MAX_NORMAL_QUEUE` samples waited for their reward at both ends."""

    @property
    def rows(self) -> float:
        """Rows per step."""
        return self.row_steps / self.steps


def fit_run(directory: Path) -> Fit:
    """Fit the costs of a run without its first `WARM_UP` steps. Raises UserError."""
    if not (directory / "metrics.jsonl").exists():
        raise UserError(f"{directory} is not the directory of a run: metrics.jsonl is missing")
    steps = read_metrics(directory / "metrics.jsonl")
    if len(steps) < (needed := WARM_UP + _MIN_INTERVALS):
        raise UserError(
            f"{directory}: metrics.jsonl has {len(steps)} steps, but a fit needs {needed} or more; "
            "let the run train for more steps"
        )
    config = load_config(directory / "config.yaml")
    began, ended = steps[WARM_UP - 1].time, steps[-1].time
    steady = steps[WARM_UP:]
    intervals, lengths = _intervals(directory, began, ended)
    generators, trainers = _spans(directory)
    overhead = _overhead(generators, intervals, began, ended)
    rewards = _rewards(intervals, overhead)
    constant, token = _step_cost(intervals)
    at, speeds, fed = _by_rows(intervals)
    train_token, optimizer = _training(steady)
    kind, tokens = SpanKind.TRANSFERRING_WEIGHTS, steps[-1].tokens
    swaps = [span.seconds for line in generators.values() for span in line if span.kind == kind]
    outside = tokens.outside_top_k / max(1, tokens.generated + tokens.verified)
    noise = (steps[-1].noise_floor.abs_mean or 0.0) / 2
    cost = MeasuredCost(
        step_seconds=constant * overhead,
        token_seconds=token * overhead,
        rows=at,
        speeds=speeds,
        fed=fed,
        train_token_seconds=train_token,
        optimizer_seconds=optimizer + fmean(step.times.publish_seconds for step in steady),
        swap_seconds=fmean(swaps) if swaps else 0.0,
        reward_seconds=rewards[0],
        reward_steps=rewards[1],
        message_seconds=_message_seconds(generators, trainers),
    )
    return Fit(
        name=config.run.name,
        config=config,
        cost=cost,
        lengths=lengths,
        step_seconds=fmean(step.step_seconds for step in steady),
        steps=len(steps),
        drift=_drift(steps[-1], lengths, outside, noise),
        outside=outside,
        noise=noise,
    )


def _intervals(run: Path, began: float, ended: float) -> tuple[list[Interval], tuple[int, ...]]:
    """Return all generators' intervals between two times, and lengths of finished samples."""
    found: list[Interval] = []
    lengths: list[int] = []
    for path in sorted((run / "engine").glob("*.jsonl")):
        lines = [line for line in read_jsonl(path, EngineRecord) if began <= line.time <= ended]
        for before, after in itertools.pairwise(lines):
            if after.engine.steps < before.engine.steps:  # the process was restarted
                continue
            lengths += after.lengths
            tokens = after.engine.tokens - before.engine.tokens
            min_waiting = min(before.rewards_waiting, after.rewards_waiting)
            found.append(
                Interval(
                    seconds=after.time - before.time,
                    steps=after.engine.steps - before.engine.steps,
                    busy=after.engine.busy_seconds - before.engine.busy_seconds,
                    row_steps=tokens.generated - tokens.accepted,
                    drafted=tokens.drafted,
                    scored=tokens.verified + tokens.rejected,
                    generated=tokens.generated,
                    rewarded=len(after.lengths) + before.rewards_waiting - after.rewards_waiting,
                    rewards_queued=min_waiting > _MAX_NORMAL_QUEUE,
                )
            )
    if sum(interval.steps > 0 for interval in found) < _MIN_INTERVALS or not lengths:
        raise UserError(
            f"{run}/engine has too few records of engine steps; repeat the run with more steps"
        )
    return found, tuple(lengths)


def _step_cost(intervals: Iterable[Interval]) -> tuple[float, float]:
    """Fit (seconds per step, seconds per token fed) by least absolute deviations, at least 0."""
    active = [i for i in intervals if i.steps > 0]
    x = np.array([[i.steps, i.row_steps + i.drafted + i.scored] for i in active], float)
    y = np.array([i.busy for i in active])
    weight = np.ones(len(active))
    found = np.zeros(2)
    for _ in range(30):
        root = np.sqrt(weight)[:, None]
        found = np.linalg.lstsq(x * root, y * root[:, 0], rcond=None)[0]
        weight = 1.0 / np.maximum(np.abs(y - x @ found), 1e-3 * y.mean())
    if found[1] < 0 or found[0] < 0:
        by_step = found[1] < 0
        only = float(y.sum() / x[:, 0 if by_step else 1].sum())
        return (only, 0.0) if by_step else (0.0, only)
    # On a loaded machine all deviations are upwards, so the fit is scaled to the measured sum.
    scale = float(y.sum() / (x @ found).sum())
    return float(found[0]) * scale, float(found[1]) * scale


def _by_rows(
    intervals: Sequence[Interval],
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Pool (rows per step, tokens gained per row, tokens fed per row) by rows per step."""
    at, speeds, fed, weights = [], [], [], []
    for low, high in itertools.pairwise(_ROW_BOUNDS):
        pool = [i for i in intervals if i.steps > 0 and i.row_steps and low <= i.rows < high]
        if not pool:
            continue
        row_steps = sum(i.row_steps for i in pool)
        at.append(row_steps / sum(i.steps for i in pool))
        speeds.append(sum(i.generated for i in pool) / row_steps)
        fed.append(1.0 + sum(i.drafted for i in pool) / row_steps)
        weights.append(float(row_steps))
    # More rows have fewer drafts each, so both curves fall; a rise is noise.
    speeds, fed = (
        rising(np.array(one[::-1], float), np.array(weights[::-1], float))[::-1].tolist()
        for one in (speeds, fed)
    )
    return tuple(at), tuple(speeds), tuple(fed)


def _training(steps: Sequence[StepMetrics]) -> tuple[float, float]:
    """Return (seconds per token in training, seconds of the optimizer step)."""
    seconds = np.array([step.times.train_seconds for step in steps])
    computed = np.array([step.batch.tokens_computed for step in steps], float)
    spread = computed.var()
    slope = float(np.cov(computed, seconds, bias=True)[0, 1] / spread) if spread > 0 else 0.0
    constant = float(seconds.mean() - slope * computed.mean())
    constant = min(max(constant, 0.0), 0.2 * float(seconds.mean()))
    mean_tokens = fmean(step.batch.tokens for step in steps)
    return (float(seconds.mean()) - constant) / mean_tokens, constant


def _spans(directory: Path) -> tuple[dict[str, list[Span]], list[Span]]:
    lanes = read_timelines(directory / "timeline")
    generators = {name: spans for name, spans in lanes.items() if name.startswith("generator")}
    trainers = [one for one in lanes if one.startswith("trainer") and rank_of(one) == 0]
    return generators, [span for one in trainers for span in lanes[one]]


def _overhead(
    spans: dict[str, list[Span]], intervals: Iterable[Interval], began: float, ended: float
) -> float:
    """Return seconds of decoding over seconds inside engine steps, 1 to 1.5."""
    busy = sum(i.busy for i in intervals)
    clipped = (span for line in spans.values() for span in clip(line, began, ended))
    decoding = sum(span.seconds for span in clipped if span.kind in _DECODING)
    return min(max(decoding / busy, 1.0), 1.5) if busy else 1.0


def _message_seconds(generators: dict[str, list[Span]], trainer: Iterable[Span]) -> float:
    """Return the seconds of a message. New weights take two, through the controller."""
    kind = SpanKind.TRANSFERRING_WEIGHTS
    published = {s.args.get("version"): s.end for s in trainer if s.kind == kind}
    installs = [span for line in generators.values() for span in line if span.kind == kind]
    starts = [(span.start, span.args.get("version")) for span in installs]
    taken = [start - published[version] for start, version in starts if version in published]
    return max(1e-4, median(taken) / 2) if taken else 1e-3


def _rewards(intervals: Iterable[Interval], overhead: float) -> tuple[float, float]:
    """Fit (seconds per reward with an idle engine, engine steps per reward while it decodes).

    If samples always waited: rewarded = idle seconds / seconds of a reward + steps / steps of one.
    """
    backlogged = [i for i in intervals if i.rewards_queued]
    y = np.array([i.rewarded for i in backlogged], float)
    if y.sum() <= 0:
        return 0.0, 0.0
    idle = np.array([max(0.0, i.seconds - overhead * i.busy) for i in backlogged])
    steps = np.array([i.steps for i in backlogged], float)
    rates = np.linalg.lstsq(np.stack([idle, steps], 1), y, rcond=None)[0]
    by_step = float(np.clip(rates[1], 0.0, y.sum() / max(1.0, steps.sum())))
    by_idle = (y.sum() - by_step * steps.sum()) / max(1e-3, idle.sum())
    seconds = 1.0 / max(by_idle, y.sum() / sum(i.seconds for i in backlogged))
    return float(seconds), float(1.0 / by_step) if by_step else 0.0


def _drift(last: StepMetrics, lengths: Sequence[int], outside: float, noise: float) -> float | None:
    """Return the drift at which the model rejects as many tokens as verification did."""
    verified, rejected = last.tokens.verified, last.tokens.rejected
    if not verified + rejected:
        return None
    survival = Survival("block", outside=outside, noise=noise)
    kept = verified / (verified + rejected)
    high = survival.decisive
    return bisected(lambda drift: survival.expected(lengths, drift), kept, high, 30)
