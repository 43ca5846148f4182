"""The arithmetic behind the report's plots: pure functions of lists that may have gaps (None)."""

import itertools
import math
from collections.abc import Sequence

from asyncrl.wire.records.evaluations import wilson

Values = Sequence[float | None]


def finite(value: object) -> float | None:
    """The value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def smooth(values: Values, span: float | None = None) -> list[float | None]:
    """Bias-corrected exponential moving average over `span` points (a tenth, at least 5)."""
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
    """Growth of a cumulative number per step; one that falls restarted from 0, and gaps spread."""
    out: list[float | None] = []
    before: float | None = 0.0
    for value in values:
        if value is None or before is None:
            out.append(None)
        else:
            out.append(value - before if value >= before else value)
        before = value
    return out


def less(whole: Values, *parts: Values) -> list[float | None]:
    """The whole minus the parts, at least 0. Unknown parts count as 0."""
    return [
        None if value is None else max(0.0, value - sum(part or 0.0 for part in taken))
        for value, *taken in zip(whole, *parts, strict=True)
    ]


def mean(values: Values) -> float | None:
    """Mean of the known values, if there are any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def thin(values: Values, limit: int) -> list[float | None]:
    """Reduce to `limit` points: means over equal groups of neighbours (for x and y alike)."""
    if len(values) <= limit:
        return list(values)
    edges = [i * len(values) // limit for i in range(limit + 1)]
    return [mean(values[a:b]) for a, b in itertools.pairwise(edges)]


def difference_interval(
    before: float, after: float, trials: tuple[float, float], z: float = 1.96
) -> tuple[float, float]:
    """Newcombe's interval (method 10) for after - before, with `trials` behind each share."""
    low_b, high_b = wilson(before, trials[0], z)
    low_a, high_a = wilson(after, trials[1], z)
    change = after - before
    below = math.hypot(after - low_a, high_b - before)
    above = math.hypot(high_a - after, before - low_b)
    return change - below, change + above


def ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `target` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, target)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.85)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
