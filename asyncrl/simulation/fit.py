"""The cost of a real run, from the records that it left in its directory.

    RUN/engine/GENERATOR.jsonl    what the engine did between two lines (`processes.engine_log`)
    RUN/metrics.jsonl             seconds of steps, of training; tokens
    RUN/timeline/PROCESS.jsonl    seconds of weight transfers, and of a message

What the fit assumes, and what it cannot see, is said in docs/simulation.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import UserError
from asyncrl.processes.engine_log import EngineRecord
from asyncrl.simulation.cost import MeasuredCost
from engine.drafting.calibration import rising
from monitoring.jsonl import read_jsonl
from monitoring.spans import Span, SpanKind, read_spans

WARM_UP = 3
"""Steps of a run that are left out: caches are empty, kernels are not chosen yet."""
_ROWS = (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1 << 30)
"""Bounds of the rows per step between which windows are pooled."""
_DECODING = {SpanKind.GENERATING, SpanKind.VERIFYING, SpanKind.RUN_AHEAD}
_QUEUE = 16
"""Rewards that may wait without it meaning anything: samples end, and are rewarded, in batches."""
_LEAST_WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """What a simulation of the same machine and task needs."""

    name: str
    config: RunConfig
    cost: MeasuredCost
    lengths: tuple[int, ...]
    """Tokens of the answers that were seen."""
    step_seconds: float
    """Mean of the run's steps after `WARM_UP`."""
    steps: int
    """Steps of the run."""
    drift: float | None
    """Total variation per token and step that explains what verification rejected, were it judged
    token by token; None if nothing was verified."""


@dataclass(frozen=True, slots=True)
class Window:
    """What an engine did between two lines of its record."""

    seconds: float
    steps: int
    busy: float
    row_steps: int
    """Tokens fed that were not drafts: rows, summed over steps."""
    drafted: int
    scored: int
    """By verification."""
    generated: int
    rewarded: int
    """Samples that got their reward."""
    queued: bool
    """More than `_QUEUE` samples waited for theirs at both of its ends."""

    @property
    def rows(self) -> float:
        """Per step."""
        return self.row_steps / self.steps


def fit_run(directory: Path, warm_up: int = WARM_UP) -> Fit:
    """Fit the costs of a run.

    Raises:
        UserError: the run has no such records, or too few steps of them.
    """
    if not (directory / "metrics.jsonl").exists():
        raise UserError(f"{directory} is not the directory of a run: it has no metrics.jsonl")
    rows: list[dict[str, Any]] = read_jsonl(directory / "metrics.jsonl", dict)
    if len(rows) < warm_up + _LEAST_WINDOWS:
        raise UserError(
            f"{directory}: {len(rows)} steps in metrics.jsonl; a fit needs "
            f"{warm_up + _LEAST_WINDOWS} or more"
        )
    config = load_config(directory / "config.yaml")
    began, ended = float(rows[warm_up - 1]["time"]), float(rows[-1]["time"])
    steady = rows[warm_up:]
    windows, lengths = _windows(directory, began, ended)
    generators, trainers = _spans(directory)
    overhead = _overhead(generators, windows, began, ended)
    rewards = _rewards(windows, overhead)
    constant, token = _step_cost(windows)
    at, speeds, fed = _by_rows(windows)
    train_token, optimizer = _training(steady)
    cost = MeasuredCost(
        step_seconds=constant * overhead,
        token_seconds=token * overhead,
        rows=at,
        speeds=speeds,
        fed=fed,
        train_token_seconds=train_token,
        optimizer_seconds=optimizer + fmean(row["publish_seconds"] for row in steady),
        swap_seconds=_mean_of(generators, SpanKind.TRANSFERRING_WEIGHTS),
        reward_seconds=rewards[0],
        reward_steps=rewards[1],
        message_seconds=_message_seconds(generators, trainers),
    )
    return Fit(
        name=config.run.name,
        config=config,
        cost=cost,
        lengths=lengths,
        step_seconds=fmean(row["step_seconds"] for row in steady),
        steps=len(rows),
        drift=_drift(rows),
    )


def _windows(directory: Path, began: float, ended: float) -> tuple[list[Window], tuple[int, ...]]:
    """Of all generators, between two moments; and the lengths of what they finished."""
    found: list[Window] = []
    lengths: list[int] = []
    for path in sorted((directory / "engine").glob("*.jsonl")):
        lines = [line for line in read_jsonl(path, EngineRecord) if began <= line.time <= ended]
        for before, after in itertools.pairwise(lines):
            if after.engine.steps < before.engine.steps:  # the process was started again
                continue
            lengths += after.lengths
            tokens = after.engine.tokens - before.engine.tokens
            found.append(
                Window(
                    seconds=after.time - before.time,
                    steps=after.engine.steps - before.engine.steps,
                    busy=after.engine.busy_seconds - before.engine.busy_seconds,
                    row_steps=tokens.generated - tokens.accepted,
                    drafted=tokens.drafted,
                    scored=tokens.verified + tokens.rejected,
                    generated=tokens.generated,
                    rewarded=len(after.lengths) + before.rewards_waiting - after.rewards_waiting,
                    queued=min(before.rewards_waiting, after.rewards_waiting) > _QUEUE,
                )
            )
    if sum(window.steps > 0 for window in found) < _LEAST_WINDOWS or not lengths:
        raise UserError(
            f"{directory}/engine has too little about the engine's steps; run it again, for longer"
        )
    return found, tuple(lengths)


def _step_cost(windows: Iterable[Window]) -> tuple[float, float]:
    """Seconds of a step and of a token fed: least absolute deviations, neither below 0."""
    seen = [w for w in windows if w.steps > 0]
    x = np.array([[w.steps, w.row_steps + w.drafted + w.scored] for w in seen], float)
    y = np.array([w.busy for w in seen])
    weight = np.ones(len(seen))
    found = np.zeros(2)
    for _ in range(30):
        root = np.sqrt(weight)[:, None]
        found = np.linalg.lstsq(x * root, y * root[:, 0], rcond=None)[0]
        weight = 1.0 / np.maximum(np.abs(y - x @ found), 1e-3 * y.mean())
    if found[1] < 0 or found[0] < 0:
        by_step = found[1] < 0
        only = float(y.sum() / x[:, 0 if by_step else 1].sum())
        return (only, 0.0) if by_step else (0.0, only)
    # Deviations of a loaded machine go one way: the sum must come out as it was.
    scale = float(y.sum() / (x @ found).sum())
    return float(found[0]) * scale, float(found[1]) * scale


def _by_rows(
    windows: Sequence[Window],
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """(rows, tokens a row gets of a step, tokens fed for it), pooled by rows per step."""
    at, speeds, fed, weights = [], [], [], []
    for low, high in itertools.pairwise(_ROWS):
        pool = [w for w in windows if w.steps > 0 and w.row_steps and low <= w.rows < high]
        if not pool:
            continue
        row_steps = sum(w.row_steps for w in pool)
        at.append(row_steps / sum(w.steps for w in pool))
        speeds.append(sum(w.generated for w in pool) / row_steps)
        fed.append(1.0 + sum(w.drafted for w in pool) / row_steps)
        weights.append(float(row_steps))
    # The more rows the fewer drafts: what does not fall is noise.
    backwards = slice(None, None, -1)
    speeds = rising(speeds[backwards], weights[backwards])[backwards]
    fed = rising(fed[backwards], weights[backwards])[backwards]
    return tuple(at), tuple(speeds), tuple(fed)


def _training(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(seconds of a token trained on, seconds of the optimizer's step)."""
    seconds = np.array([row["train_seconds"] for row in rows])
    computed = np.array([row.get("tokens_computed", row["tokens"]) for row in rows])
    spread = computed.var()
    slope = float(np.cov(computed, seconds, bias=True)[0, 1] / spread) if spread > 0 else 0.0
    constant = float(seconds.mean() - slope * computed.mean())
    constant = min(max(constant, 0.0), 0.2 * float(seconds.mean()))
    return (float(seconds.mean()) - constant) / fmean(row["tokens"] for row in rows), constant


def _spans(directory: Path) -> tuple[dict[str, list[Span]], list[Span]]:
    """Time lines of the generators, by name, and of the trainer."""
    generators: dict[str, list[Span]] = {}
    trainer: list[Span] = []
    for path in sorted((directory / "timeline").glob("*.jsonl")):
        if path.stem.startswith("generator"):
            generators[path.stem] = read_spans(path)
        elif path.stem.startswith("trainer"):
            trainer += read_spans(path)
    return generators, trainer


def _overhead(
    spans: dict[str, list[Span]], windows: Iterable[Window], began: float, ended: float
) -> float:
    """Seconds in which rows decoded over seconds inside steps."""
    busy = sum(w.busy for w in windows)
    decoding = sum(
        max(0.0, min(span.end, ended) - max(span.start, began))
        for line in spans.values()
        for span in line
        if span.kind in _DECODING
    )
    return min(max(decoding / busy, 1.0), 1.5) if busy else 1.0


def _mean_of(spans: dict[str, list[Span]], kind: SpanKind) -> float:
    seconds = [span.seconds for line in spans.values() for span in line if span.kind == kind]
    return fmean(seconds) if seconds else 0.0


def _message_seconds(generators: dict[str, list[Span]], trainer: Iterable[Span]) -> float:
    """New weights take two: trainer to controller, controller to generator."""
    kind = SpanKind.TRANSFERRING_WEIGHTS
    published = {s.args.get("version"): s.end for s in trainer if s.kind == kind}
    taken = [
        s.start - published[s.args.get("version")]
        for line in generators.values()
        for s in line
        if s.kind == kind and s.args.get("version") in published
    ]
    return max(1e-4, median(taken) / 2) if taken else 1e-3


def _rewards(windows: Iterable[Window], overhead: float) -> tuple[float, float]:
    """(seconds of a reward while the engine rests, steps of the engine that go by otherwise).

    From the times in which samples always waited for theirs: samples = seconds of rest / one +
    steps / the other.
    """
    queued = [w for w in windows if w.queued]
    y = np.array([w.rewarded for w in queued], float)
    if y.sum() <= 0:
        return 0.0, 0.0
    rest = np.array([max(0.0, w.seconds - overhead * w.busy) for w in queued])
    steps = np.array([w.steps for w in queued], float)
    rates = np.linalg.lstsq(np.stack([rest, steps], 1), y, rcond=None)[0]
    by_step = float(np.clip(rates[1], 0.0, y.sum() / max(1.0, steps.sum())))
    by_rest = (y.sum() - by_step * steps.sum()) / max(1e-3, rest.sum())
    seconds = 1.0 / max(by_rest, y.sum() / sum(w.seconds for w in queued))
    return float(seconds), float(1.0 / by_step) if by_step else 0.0


def _drift(rows: Sequence[dict[str, Any]]) -> float | None:
    """Hazard of a verified token: rejections begin a loss of what is left of their answers."""
    last = rows[-1]
    verified, rejected = last.get("tokens_verified", 0), last.get("tokens_rejected", 0)
    if not verified + rejected:
        return None
    # A text of L tokens with hazard h loses about h L / 2 of itself (h L small).
    lost = rejected / (verified + rejected)
    return min(1.0, 2.0 * float(lost) / fmean(row["response_length_mean"] for row in rows))
