"""From estimated acceptance probabilities to observed ones, learned while running.

A drafter estimates how likely each node is to be accepted. Whether a draft pays depends on those
numbers, so they are held against what happened, in bins of the estimate that are fine where it
matters (at large batch only nodes above 0.97 pay), and mapped by a rising curve through the bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EDGES: Floats = np.array(
    [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995,
     0.998]
)  # fmt: skip
"""Bounds of the bins."""
BINS = len(EDGES) + 1
WINDOW = 1500.0
"""Nodes of a bin that are remembered: its mean has a standard error of 0.004 at 0.97."""
DOUBT = 6.0
"""Nodes' worth of trust in the estimate itself. Nodes of a path fail together, so it is not 1."""
STALE = 2000
"""Judgements without a node in a bin after which its past is no longer held against it."""

_CENTRES: Floats = (np.concatenate(([0.0], EDGES)) + np.concatenate((EDGES, [1.0]))) / 2


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, size = value, weight, 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, other_size = pools.pop()
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total += other_weight
            size += other_size
        pools.append((mean, total, size))
    return [mean for mean, _, size in pools for _ in range(size)]


class Calibration:
    """A rising map from estimated to observed probability; at first the identity."""

    def __init__(self) -> None:
        self._nodes = np.zeros(BINS)
        self._estimated = np.zeros(BINS)  # sums
        self._accepted = np.zeros(BINS)
        self._last = np.zeros(BINS)
        self._judged = 0
        self._knots: tuple[Floats, Floats] | None = None

    def judge(self, estimates: NDArray[np.floating], accepted: NDArray[np.bool_]) -> None:
        """Nodes with these estimates were fed, and accepted or not: `[N]` both."""
        self._judged += 1
        bins = np.searchsorted(EDGES, estimates, side="right")
        count = np.bincount(bins, minlength=BINS)
        keep = np.maximum(1.0 - count / WINDOW, 0.1)
        for kept, new in (
            (self._nodes, count),
            (self._estimated, np.bincount(bins, weights=estimates, minlength=BINS)),
            (self._accepted, np.bincount(bins, weights=accepted, minlength=BINS)),
        ):
            kept *= keep
            kept += new
        self._last[count > 0] = self._judged
        self._knots = None

    def apply(self, estimates: NDArray[np.floating]) -> Floats:
        """Observed acceptance of nodes with these estimates, `[N]`, each from 0 to 1."""
        at, value = self._curve()
        mapped: Floats = np.interp(estimates, at, value)
        return mapped

    def hopeful(self, estimates: NDArray[np.floating]) -> Floats:
        """The same, but never below the estimate itself: what a second try may hope for."""
        higher: Floats = np.maximum(self.apply(estimates), estimates)
        return higher

    def estimate_for(self, probability: float) -> float:
        """The least estimate whose observed acceptance reaches `probability`; above 1 if none."""
        at, value = self._curve()
        index = int(np.searchsorted(value, probability))
        if index == len(value):
            return 1.1
        if index == 0:
            return 0.0
        low, high = value[index - 1], value[index]
        part = (probability - low) / (high - low)
        return float(at[index - 1] + part * (at[index] - at[index - 1]))

    def _curve(self) -> tuple[Floats, Floats]:
        if self._knots is None:
            seen = self._nodes > 0
            mean = np.where(seen, self._estimated / np.maximum(self._nodes, 1e-9), _CENTRES)
            value = (self._accepted + DOUBT * mean) / (self._nodes + DOUBT)
            smooth = rising(value.tolist(), (self._nodes + DOUBT).tolist())
            self._knots = np.concatenate(([0.0], mean)), np.array([0.0, *smooth])
        return self._knots
