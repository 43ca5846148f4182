"""A decoding engine on paper: known step times and known acceptance, for the draft planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.drafting.planner import DraftPlanner

Floats = NDArray[np.float64]
Seconds = Callable[[Floats, int, int], Floats]
"""(tokens, rows, context) -> seconds, for an array of tokens."""


def cpu(tokens: Floats, rows: int, context: int) -> Floats:
    """101M parameters in float32 on two cores, as measured; linear above 128 tokens."""
    at = [1, 2, 8, 32, 128, 4096]
    return np.interp(tokens, at, [0.016, 0.017, 0.0215, 0.058, 0.222, 7.0]) + 2e-8 * context


def gpu(tokens: Floats, rows: int, context: int) -> Floats:
    """Flat until 256 tokens, then a stair every 64."""
    stairs = np.ceil(np.maximum(tokens - 256, 0) / 64)
    return 0.012 + 0.0028 * stairs + 2e-5 * rows + 2e-9 * context


def small(tokens: Floats, rows: int, context: int) -> Floats:
    """3M parameters: mostly the same few operations whatever the batch."""
    return 0.002 + 2.5e-5 * tokens + 1e-5 * rows


@dataclass
class Drafter:
    """Chains whose kind is drawn per row and step: share of rows, acceptance per token."""

    kinds: tuple[tuple[float, float], ...] = ((0.5, 0.98), (0.3, 0.7), (0.2, 0.0))
    depth: int = 16
    says: Callable[[Floats], Floats] = lambda p: p
    """Estimated path probability from the true one; must rise."""

    def propose(self, rng: np.random.Generator, rows: int) -> tuple[Floats, NDArray[np.int32]]:
        """True path probabilities `[N]` and offsets `[rows+1]`."""
        shares, rates = zip(*self.kinds, strict=True)
        rate = np.array(rates)[rng.choice(len(shares), size=rows, p=shares)]
        paths = rate[:, None] ** np.arange(1, self.depth + 1)
        lengths = np.where(rate > 0, self.depth, 0)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return paths[rate > 0].ravel(), offsets


@dataclass
class World:
    """What the planner has to find out."""

    seconds: Seconds
    drafter: Drafter = field(default_factory=Drafter)
    asking: float = 3e-6
    """Seconds per row that proposing costs, beside 50 microseconds."""
    noise: float = 0.05
    stalls: float = 0.01
    """Share of steps that take ten times as long."""

    def proposing(self, rows: int) -> float:
        return 5e-5 + self.asking * rows


@dataclass
class Rates:
    """Tokens a second without noise: of the planner, of no drafting, of the best there is."""

    planned: float
    plain: float
    best: float
    asked: float
    """Share of steps in which the cache was asked."""
    drafted: float
    """Drafted tokens per step."""


def run(
    world: World, planner: DraftPlanner, rows: int, steps: int, *, seed: int = 0, context: int = 300
) -> Rates:
    """Run the planner through `steps` steps of `rows` rows."""
    rng = np.random.default_rng(seed)
    left = np.full(rows, 1000, np.int32)
    tokens = seconds = asked = drafted = 0.0
    keys = rows * context
    for _ in range(steps):
        budgets, least = planner.ask(left)
        fed = 0
        true, offsets = world.drafter.propose(rng, rows)
        cost = 0.0
        if budgets.any():
            asked += 1
            cost = world.proposing(rows)
            said = world.drafter.says(true)
            said, true, offsets = _trim(said, true, offsets, budgets, least)
            keep = planner.choose(said.astype(np.float32), offsets, rows=rows)
            chosen = _chosen(offsets, keep)
            fed = int(keep.sum())
            accepted = _accept(rng, true, offsets)[chosen]
            planner.judge(said[chosen].astype(np.float32), accepted)
            tokens += float(true[chosen].sum())
        exact = float(world.seconds(np.array([rows + fed]), rows, keys)[0]) + cost
        noisy = exact * float(np.exp(world.noise * rng.standard_normal()))
        if rng.random() < world.stalls:
            noisy *= 10
        planner.observe(tokens=rows + fed, rows=rows, context=keys, seconds=noisy)
        tokens += rows
        seconds += exact
        drafted += fed
    plain = rows / float(world.seconds(np.array([rows]), rows, keys)[0])
    best = oracle(world, rows, keys, seed=seed)
    return Rates(tokens / seconds, plain, best, asked / steps, drafted / steps)


def oracle(world: World, rows: int, keys: int, *, seed: int, samples: int = 200) -> float:
    """The best rate of any rule that knows everything (Dinkelbach's iteration)."""
    rng = np.random.default_rng(seed + 1)
    plain = rows / float(world.seconds(np.array([rows]), rows, keys)[0])
    rate = plain
    worlds = [np.sort(world.drafter.propose(rng, rows)[0])[::-1] for _ in range(samples)]
    for _ in range(6):
        tokens = seconds = 0.0
        for ranked in worlds:
            yields = rows + np.concatenate(([0.0], np.cumsum(ranked)))
            cost = world.seconds(rows + np.arange(len(yields), dtype=float), rows, keys)
            cost = cost + world.proposing(rows)
            best = int((yields - rate * cost).argmax())
            tokens += yields[best]
            seconds += cost[best]
        rate = max(tokens / seconds, plain)
    return rate


def _trim(
    said: Floats, true: Floats, offsets: NDArray[np.int32], budgets: NDArray[np.int32], least: float
) -> tuple[Floats, Floats, NDArray[np.int32]]:
    lengths = np.diff(offsets)
    place = np.arange(len(said)) - np.repeat(offsets[:-1], lengths)
    stay = (place < np.repeat(budgets, lengths)) & (said >= least)
    kept = np.concatenate(([0], np.cumsum(stay)))[offsets].astype(np.int32)
    return said[stay], true[stay], kept


def _chosen(offsets: NDArray[np.int32], keep: NDArray[np.int32]) -> NDArray[np.bool_]:
    lengths = np.diff(offsets)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return place < np.repeat(keep, lengths)


def _accept(
    rng: np.random.Generator, true: Floats, offsets: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Outcomes: one uniform number per row decides how far its chain is right."""
    lengths = np.diff(offsets)
    return np.repeat(rng.random(len(lengths)), lengths) < true
