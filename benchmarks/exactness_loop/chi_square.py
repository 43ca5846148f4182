"""Stratified chi-square tests of samples against enumerated distributions.

The number of samples of each stratum (such as a prompt) is given, not drawn, so each stratum has
its own degrees of freedom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

MIN_EXPECTED = 10.0
"""A cell with a smaller distributions count is pooled with others."""

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    """The result of a test, and the distance that it measured."""

    samples: int
    p_value: float
    cells: int
    tv: float
    """Total variation of the pooled cells' frequencies."""
    tv_by_chance: float
    """Its mean for an exact sampler, by the normal approximation."""

    def __str__(self) -> str:
        return (
            f"p = {self.p_value:.3g}, TV {self.tv:.4f} (chance {self.tv_by_chance:.4f}), "
            f"{self.cells} cells, {self.samples} samples"
        )


def compare(
    drawn: Iterable[tuple[Hashable, Hashable]],
    distributions: Mapping[Any, Mapping[Any, float]],
    pool: Any = None,
) -> Verdict:
    """Compare (stratum, outcome) pairs with the distribution of each stratum.

    Pools of a stratum that stay rare are pooled in turn. A stratum with a single cell contributes
    nothing. An outcome of probability 0 gives the p-value 0.
    """
    strata: dict[Hashable, Counter[Any]] = {}
    for stratum, outcome in drawn:
        strata.setdefault(stratum, Counter())[outcome] += 1
    statistic, freedom, distance, chance, total, cells = 0.0, 0, 0.0, 0.0, 0, 0
    for stratum, counts in strata.items():
        n = counts.total()
        total += n
        distribution = distributions[stratum]
        if any(distribution.get(outcome, 0.0) <= 0.0 for outcome in counts):
            return Verdict(n, 0.0, 1, 1.0, 0.0)
        expected, observed = _pooled(counts, distribution, n, pool)
        if len(expected) < 2:
            continue
        statistic += float(((observed - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
        cells += len(expected)
        distance += float(np.abs(observed - expected).sum()) / 2
        chance += float(np.sqrt(expected * (1 - expected / n)).sum()) * np.sqrt(2 / np.pi) / 2
    p = float(chi2.sf(statistic, freedom)) if freedom else 1.0
    return Verdict(total, p, cells, distance / max(total, 1), chance / max(total, 1))


def _pooled(
    counts: Counter[Any], distribution: Mapping[Any, float], n: int, pool: Any
) -> tuple[Doubles, Doubles]:
    expected: defaultdict[Any, float] = defaultdict(float)
    observed: Counter[Any] = Counter()
    for outcome, mass in distribution.items():
        cell = outcome
        if mass * n < MIN_EXPECTED:
            cell = ("rare", None if pool is None else pool(outcome))
        expected[cell] += mass * n
        observed[cell] += counts[outcome]
    for cell in [c for c in expected if expected[c] < MIN_EXPECTED]:
        expected["rest"] += expected.pop(cell)
        observed["rest"] += observed.pop(cell)
    if 0 < expected["rest"] < MIN_EXPECTED and len(expected) > 1:
        smallest = min((c for c in expected if c != "rest"), key=lambda c: expected[c])
        expected[smallest] += expected.pop("rest")
        observed[smallest] += observed.pop("rest")
    names = [c for c in expected if expected[c] > 0]
    return np.array([expected[c] for c in names]), np.array([observed[c] for c in names], float)
