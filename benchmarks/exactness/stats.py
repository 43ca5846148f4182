"""How far counts are from an enumerated distribution, with confidence bounds."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

LEVEL = 0.025
"""Probability with which each end of the confidence interval fails."""
_REPLICATIONS = 2000


@dataclass(frozen=True)
class Distance:
    """Total variation between a sampler and a distribution, estimated from n samples."""

    samples: int
    cells: int
    """Sequences with a probability above 0."""
    tv: float
    """Total variation of the observed frequencies; greater than 0 for an exact sampler too."""
    tv_by_chance: float
    """Mean of `tv` for n samples of the distribution itself, over 2,000 simulated runs."""
    tv_by_chance_999: float
    """The value that one exact run in 1,000 exceeds, from the same simulated runs."""
    tv_low: float
    """Lower bound of the sampler's own total variation, with 97.5% confidence. The tested event is
    chosen on one half of the samples and counted in the other (Clopper-Pearson)."""
    tv_high: float
    """Upper bound with 97.5% confidence: the smaller of two bounds. The first is TV <= half the
    square root of chi-square, whose upper limit inverts the noncentral chi-square distribution of
    Pearson's statistic. The second adds to `tv` a bound of its sampling error (McDiarmid)."""
    p_value: float
    """Of Pearson's chi-square test, cells that expect fewer than 5 samples pooled. 0 if a sequence
    of probability 0 was drawn."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def distance(halves: NDArray[np.int64], probabilities: NDArray[np.float64]) -> Distance:
    """Compare `[2, C]` counts, two independent halves of the samples, with `[C]` probabilities."""
    counts = halves.sum(axis=0)
    total = int(counts.sum())
    fits = halves.shape == (2, len(probabilities)) and abs(probabilities.sum() - 1) <= 1e-6
    if not fits or not halves.sum(axis=1).all():
        raise ValueError(
            f"counts of shape {halves.shape} and {total} samples do not fit {len(probabilities)} "
            f"probabilities that sum to {probabilities.sum():.6f}"
        )
    probabilities = probabilities / probabilities.sum()
    tv = 0.5 * float(np.abs(counts / total - probabilities).sum())
    chance = _by_chance(tuple(probabilities), total)
    impossible = bool(counts[probabilities == 0].any())
    statistic, freedom, rare = _pearson(counts, probabilities)
    return Distance(
        samples=total,
        cells=int((probabilities > 0).sum()),
        tv=tv,
        tv_by_chance=float(chance.mean()),
        tv_by_chance_999=float(np.quantile(chance, 0.999)),
        tv_low=_low(halves, probabilities),
        tv_high=_high(tv, statistic, freedom, rare, total, probabilities, impossible),
        p_value=0.0 if impossible else float(stats.chi2.sf(statistic, freedom)),
    )


@cache
def _by_chance(probabilities: tuple[float, ...], total: int) -> NDArray[np.float64]:
    runs = np.random.default_rng(0).multinomial(total, probabilities, _REPLICATIONS)
    return np.asarray(0.5 * np.abs(runs / total - probabilities).sum(axis=1))


def _pearson(
    counts: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> tuple[float, int, float]:
    """Statistic, degrees of freedom, and the probability of the pooled cells."""
    expected = probabilities * counts.sum()
    large = expected >= 5
    rare = float(probabilities[~large].sum())
    want, seen = expected[large], counts[large]
    if rare * counts.sum() >= 5:
        want = np.append(want, expected[~large].sum())
        seen = np.append(seen, counts[~large].sum())
    # A pool that expects less than 5 is left out: it would cause false alarms.
    return float(((seen - want) ** 2 / want).sum()), max(len(want) - 1, 1), rare


def _low(halves: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """TV >= P(E) - p(E) for every event E; E: what was too frequent in the first half."""
    first, second = halves
    event = first / first.sum() > probabilities
    hits, trials = int(second[event].sum()), int(second.sum())
    lower = stats.beta.ppf(LEVEL, hits, trials - hits + 1) if hits else 0.0
    return max(0.0, float(lower - probabilities[event].sum()))


def _high(
    tv: float,
    statistic: float,
    freedom: int,
    rare: float,
    total: int,
    probabilities: NDArray[np.float64],
    impossible: bool,
) -> float:
    # E TV(frequencies, truth) <= half of sqrt((C - 1) / n); one sample moves it by at most 1 / n.
    cells = int((probabilities > 0).sum())
    error = 0.5 * np.sqrt((cells - 1) / total) + np.sqrt(-np.log(LEVEL) / 2 / total)
    plain = min(1.0, tv + float(error))
    if impossible:
        return plain
    limit = 2.0 * statistic + 100.0

    def excess(noncentral: float) -> float:
        return float(stats.ncx2.cdf(statistic, freedom, noncentral)) - LEVEL

    if excess(1e-9) <= 0:
        return min(plain, rare)
    if excess(limit) > 0:
        return plain
    noncentral = optimize.brentq(excess, 1e-9, limit)
    return min(plain, 0.5 * float(np.sqrt(noncentral / total)) + rare)
