"""How far counts are from an enumerated law, and how sure that is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

LEVEL = 0.025
"""Each end of the confidence interval fails with this probability."""
_REPLICATIONS = 2000


@dataclass(frozen=True)
class Distance:
    """Total variation of a sampler from a law, as seen through n samples."""

    samples: int
    cells: int
    """Sequences that have a probability above 0."""
    tv: float
    """Of the observed frequencies. Greater than 0 for an exact sampler too:"""
    tv_by_chance: float
    """its mean for n samples of the law itself,"""
    tv_by_chance_999: float
    """and the value that one exact run in 1,000 exceeds; both from 2,000 simulated runs."""
    tv_low: float
    """The sampler's own total variation is above this with 97.5% confidence. The event that is
    tested is chosen on half of the samples and counted in the other (Clopper-Pearson)."""
    tv_high: float
    """It is below this with 97.5% confidence: the smaller one of two bounds. One is TV <= half the
    square root of chi-square, whose upper limit inverts the noncentral chi-square law of Pearson's
    statistic; the other one adds to `tv` what its own sampling error can be (McDiarmid)."""
    p_value: float
    """Pearson's chi-square, cells that expect fewer than 5 pooled; 0 where the impossible came."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def distance(halves: NDArray[np.int64], law: NDArray[np.float64]) -> Distance:
    """Compare `[2, C]` counts, two independent halves of the samples, with `[C]` probabilities.

    Raises:
        ValueError: the shapes do not fit, the law does not sum to 1, or nothing was counted.
    """
    counts = halves.sum(axis=0)
    total = int(counts.sum())
    if halves.shape != (2, len(law)) or abs(law.sum() - 1) > 1e-6 or not halves.sum(axis=1).all():
        raise ValueError(f"counts {halves.shape} of {total} samples, law of {law.sum():.6f}")
    law = law / law.sum()
    tv = 0.5 * float(np.abs(counts / total - law).sum())
    chance = _by_chance(law, total)
    impossible = bool(counts[law == 0].any())
    statistic, freedom, rare = _pearson(counts, law)
    return Distance(
        samples=total,
        cells=int((law > 0).sum()),
        tv=tv,
        tv_by_chance=float(chance.mean()),
        tv_by_chance_999=float(np.quantile(chance, 0.999)),
        tv_low=_low(halves, law),
        tv_high=_high(tv, statistic, freedom, rare, total, law, impossible),
        p_value=0.0 if impossible else float(stats.chi2.sf(statistic, freedom)),
    )


def _by_chance(law: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(0)
    out = [np.abs(rng.multinomial(total, law) / total - law).sum() for _ in range(_REPLICATIONS)]
    return 0.5 * np.array(out)


def _pearson(counts: NDArray[np.int64], law: NDArray[np.float64]) -> tuple[float, int, float]:
    """Statistic, degrees of freedom, and the probability of the pooled cells."""
    expected = law * counts.sum()
    large = expected >= 5
    rare = float(law[~large].sum())
    want, seen = expected[large], counts[large]
    if rare * counts.sum() >= 5:
        want = np.append(want, expected[~large].sum())
        seen = np.append(seen, counts[~large].sum())
    # A pool that expects less than 5 is left out: it would make false alarms.
    return float(((seen - want) ** 2 / want).sum()), max(len(want) - 1, 1), rare


def _low(halves: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """TV >= P(E) - law(E) for every event E; E: what came too often in the first half."""
    first, second = halves
    event = first / first.sum() > law
    hits, trials = int(second[event].sum()), int(second.sum())
    least = stats.beta.ppf(LEVEL, hits, trials - hits + 1) if hits else 0.0
    return max(0.0, float(least - law[event].sum()))


def _high(
    tv: float,
    statistic: float,
    freedom: int,
    rare: float,
    total: int,
    law: NDArray[np.float64],
    impossible: bool,
) -> float:
    # E TV(frequencies, truth) <= half of sqrt((C - 1) / n); one sample moves it by at most 1 / n.
    error = 0.5 * np.sqrt((int((law > 0).sum()) - 1) / total) + np.sqrt(-np.log(LEVEL) / 2 / total)
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
