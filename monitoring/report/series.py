"""Small sums behind the report's plots. Pure functions over lists that may have gaps (None)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Values = Sequence[float | None]


def finite(value: object) -> float | None:
    """The number, or None for anything that is not a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def smooth(values: Values, span: float | None = None) -> list[float | None]:
    """Exponential moving average, corrected for its start; gaps stay gaps.

    `span` is the number of points that it looks back over; by default a tenth, at least 5.
    """
    decay = 1.0 - 1.0 / (span or max(5.0, len(values) / 10.0))
    total = weight = 0.0
    out: list[float | None] = []
    for value in values:
        if value is None:
            out.append(None)
            continue
        total = decay * total + value
        weight = decay * weight + 1.0
        out.append(total / weight)
    return out


def growth(values: Values) -> list[float | None]:
    """What a cumulative number grew by at each step.

    A smaller number than before means that counting began again (a resumed run): then it counts
    from 0. A gap gives gaps for itself and its successor.
    """
    out: list[float | None] = []
    before: float | None = 0.0
    for value in values:
        if value is None or before is None:
            out.append(None)
        else:
            out.append(value - before if value >= before else value)
        before = value
    return out


def mean(values: Values) -> float | None:
    """Mean of what is known, None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def thin(values: Values, most: int) -> list[float | None]:
    """At most `most` points: means over equal neighbourhoods (use on x and y alike)."""
    if len(values) <= most:
        return list(values)
    edges = [i * len(values) // most for i in range(most + 1)]
    return [mean(values[a:b]) for a, b in itertools.pairwise(edges)]


def wilson(share: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion: 95% with the default z. Raises ValueError at 0 trials."""
    if trials < 1:
        raise ValueError("an interval needs at least one trial")
    scale = 1.0 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference_interval(
    before: float, after: float, trials: int, z: float = 1.96
) -> tuple[float, float]:
    """Newcombe's interval for after - before, as if the two samples were independent."""
    low_b, high_b = wilson(before, trials, z)
    low_a, high_a = wilson(after, trials, z)
    change = after - before
    below = math.hypot(after - low_a, high_b - before)
    above = math.hypot(high_a - after, before - low_b)
    return change - below, change + above


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about that many."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, about)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.85)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
