"""Are estimates of acceptance right? Compare them with what became of the drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Finest near 1, where a planner with little room for drafts decides."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Estimates within [low, high), the last bin's `high` included."""

    low: float
    high: float
    count: int
    """Estimates in it."""
    estimated: float
    """Their mean."""
    observed: float
    """Share of them that was accepted."""

    @property
    def deviation(self) -> float:
        """Standard deviation of `observed` if the estimates were right and outcomes independent."""
        return float(np.sqrt(max(self.estimated * (1.0 - self.estimated), 1e-12) / self.count))


def calibration(
    probabilities: ArrayLike, accepted: ArrayLike, edges: tuple[float, ...] = EDGES
) -> list[Bin]:
    """Group estimates by size; a bin without any is left out.

    Args:
        probabilities: `[N]` estimated, of paths or of single tokens given that the ones before
            them were accepted; then only those that were put to the test may be among them.
        accepted: `[N]` what happened.
        edges: of the bins, rising.

    Example:
        >>> [(b.low, b.count, b.observed) for b in calibration([0.92, 0.94, 0.2], [1, 0, 0])]
        [(0.2, 1, 0.0), (0.9, 2, 0.5)]

    Raises:
        ValueError: the two differ in length, or a probability lies outside the edges.
    """
    values = np.asarray(probabilities, np.float64)
    hits = np.asarray(accepted, np.bool_)
    if values.shape != hits.shape or values.ndim != 1:
        raise ValueError(f"{values.shape} probabilities and {hits.shape} outcomes do not fit")
    if len(values) and not edges[0] <= values.min() <= values.max() <= edges[-1]:
        raise ValueError(f"probabilities must lie between {edges[0]} and {edges[-1]}")
    where = np.minimum(np.searchsorted(edges, values, side="right"), len(edges) - 1) - 1
    return [
        Bin(
            edges[index],
            edges[index + 1],
            int(inside.sum()),
            float(values[inside].mean()),
            float(hits[inside].mean()),
        )
        for index in range(len(edges) - 1)
        if (inside := where == index).any()
    ]
