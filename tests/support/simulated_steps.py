"""A simulated decoding engine with known step times and acceptance, for the draft planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.drafting.planner import DraftPlanner

Floats = NDArray[np.float64]
Seconds = Callable[[Floats, int, int], Floats]
"""(tokens, rows, context) -> seconds, for an array of tokens."""


def cpu(tokens: Floats, rows: int, context: int) -> Floats:
    """101M parameters in float32 on two cores, as measured; linear above 128 tokens."""
    at = [1, 2, 8, 32, 128, 4096]
    return np.interp(tokens, at, [0.016, 0.017, 0.0215, 0.058, 0.222, 7.0]) + 2e-8 * context


def gpu(tokens: Floats, rows: int, context: int) -> Floats:
    """Constant up to 256 tokens, then one stair per 64 tokens."""
    stairs = np.ceil(np.maximum(tokens - 256, 0) / 64)
    return 0.012 + 0.0028 * stairs + 2e-5 * rows + 2e-9 * context


def small(tokens: Floats, rows: int, context: int) -> Floats:
    """3M parameters: mostly constant overhead, independent of the batch."""
    return 0.002 + 2.5e-5 * tokens + 1e-5 * rows


@dataclass
class Drafter:
    """Drafts a chain per row and step; the kind of each chain is drawn at random."""

    kinds: tuple[tuple[float, float], ...] = ((0.5, 0.98), (0.3, 0.7), (0.2, 0.0))
    """(share of rows, acceptance per token) of each kind."""
    depth: int = 16
    """Tokens of a chain."""
    estimate: Callable[[Floats], Floats] = lambda p: p
    """Estimated path probability as a function of the true one; must be increasing."""

    def propose(self, rng: np.random.Generator, rows: int) -> tuple[Floats, NDArray[np.int32]]:
        """True path probabilities `[N]` and offsets `[rows+1]`."""
        shares, rates = zip(*self.kinds, strict=True)
        rate = np.array(rates)[rng.choice(len(shares), size=rows, p=shares)]
        paths = rate[:, None] ** np.arange(1, self.depth + 1)
        lengths = np.where(rate > 0, self.depth, 0)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return paths[rate > 0].ravel(), offsets


@dataclass
class SimulatedEngine:
    """The quantities that the planner has to learn."""

    seconds: Seconds
    drafter: Drafter = field(default_factory=Drafter)
    propose_seconds: float = 3e-6
    """Seconds per row of asking the cache for drafts, on top of 50 microseconds."""
    noise: float = 0.05
    """Standard deviation of the logarithm of a step's seconds."""
    stalls: float = 0.01
    """Share of steps that take ten times as long."""

    def proposing(self, rows: int) -> float:
        """Seconds of asking the cache for drafts of this many rows."""
        return 5e-5 + self.propose_seconds * rows


@dataclass
class Rates:
    """Tokens per second without noise: of the planner, without drafting, and of the best rule."""

    planned: float
    plain: float
    best: float
    asked: float
    """Share of steps in which the cache was asked for drafts."""
    drafted: float
    """Drafted tokens per step."""


def run(
    engine: SimulatedEngine,
    planner: DraftPlanner,
    rows: int,
    steps: int,
    *,
    seed: int = 0,
    context: int = 300,
) -> Rates:
    """Run the planner through `steps` steps of `rows` rows."""
    rng = np.random.default_rng(seed)
    left = np.full(rows, 1000, np.int32)
    tokens = seconds = asked = drafted = 0.0
    keys = rows * context
    for _ in range(steps):
        budgets, min_probability = planner.ask(left)
        fed = 0
        true, offsets = engine.drafter.propose(rng, rows)
        cost = 0.0
        if budgets.any():
            asked += 1
            cost = engine.proposing(rows)
            estimated = engine.drafter.estimate(true)
            estimated, true, offsets = _trim(estimated, true, offsets, budgets, min_probability)
            keep = planner.choose(estimated.astype(np.float32), offsets, rows=rows)
            chosen = _chosen(offsets, keep)
            fed = int(keep.sum())
            accepted = _accept(rng, true, offsets)[chosen]
            planner.judge(estimated[chosen].astype(np.float32), accepted)
            tokens += float(true[chosen].sum())
        exact = float(engine.seconds(np.array([rows + fed]), rows, keys)[0]) + cost
        noisy = exact * float(np.exp(engine.noise * rng.standard_normal()))
        if rng.random() < engine.stalls:
            noisy *= 10
        planner.observe(tokens=rows + fed, rows=rows, context=keys, seconds=noisy)
        tokens += rows
        seconds += exact
        drafted += fed
    plain = rows / float(engine.seconds(np.array([rows]), rows, keys)[0])
    best = oracle(engine, rows, keys, seed=seed)
    return Rates(tokens / seconds, plain, best, asked / steps, drafted / steps)


def oracle(
    engine: SimulatedEngine, rows: int, keys: int, *, seed: int, samples: int = 200
) -> float:
    """The best rate of any rule that knows all quantities (Dinkelbach's iteration)."""
    rng = np.random.default_rng(seed + 1)
    plain = rows / float(engine.seconds(np.array([rows]), rows, keys)[0])
    rate = plain
    curves = []
    for _ in range(samples):
        ranked = np.sort(engine.drafter.propose(rng, rows)[0])[::-1]
        yields = rows + np.concatenate(([0.0], np.cumsum(ranked)))
        cost = engine.seconds(rows + np.arange(len(yields), dtype=float), rows, keys)
        curves.append((yields, cost + engine.proposing(rows)))
    for _ in range(6):
        tokens = seconds = 0.0
        for yields, cost in curves:
            best = int((yields - rate * cost).argmax())
            tokens += yields[best]
            seconds += cost[best]
        rate = max(tokens / seconds, plain)
    return rate


def _trim(
    estimated: Floats,
    true: Floats,
    offsets: NDArray[np.int32],
    budgets: NDArray[np.int32],
    min_probability: float,
) -> tuple[Floats, Floats, NDArray[np.int32]]:
    lengths = np.diff(offsets)
    place = np.arange(len(estimated)) - np.repeat(offsets[:-1], lengths)
    stay = (place < np.repeat(budgets, lengths)) & (estimated >= min_probability)
    kept = np.concatenate(([0], np.cumsum(stay)))[offsets].astype(np.int32)
    return estimated[stay], true[stay], kept


def _chosen(offsets: NDArray[np.int32], keep: NDArray[np.int32]) -> NDArray[np.bool_]:
    lengths = np.diff(offsets)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return place < np.repeat(keep, lengths)


def _accept(
    rng: np.random.Generator, true: Floats, offsets: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Outcomes per token: one uniform number per row decides how long its accepted prefix is."""
    lengths = np.diff(offsets)
    return np.repeat(rng.random(len(lengths)), lengths) < true
