"""Which parts of a run the report looks at: all of it, the training phase, a few steps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monitoring.report.data import RunData
from monitoring.report.lanes import Window
from monitoring.spans import Span

ZOOM_STEPS = 3
"""The section shown larger spans this many steps in the middle of the run."""


def whole_window(lanes: Mapping[str, Sequence[Span]]) -> Window:
    """From the first span to the end of the last."""
    start = min(span.start for spans in lanes.values() for span in spans)
    end = max(span.end for spans in lanes.values() for span in spans)
    return Window(start, end, start)


def middle_window(data: RunData, whole: Window) -> Window:
    """A few steps in the middle of the run, or a twentieth of it where steps have no times."""
    times = [step.time for step in data.steps if whole.start <= step.time <= whole.end]
    if len(times) >= 2:
        middle = len(times) // 2
        first = max(0, middle - (ZOOM_STEPS + 1) // 2)
        last = min(len(times) - 1, first + ZOOM_STEPS)
        if times[last] > times[first]:
            margin = 0.04 * (times[last] - times[first])
            return Window(
                max(whole.start, times[first] - margin),
                min(whole.end, times[last] + margin),
                whole.origin,
            )
    centre, half = (whole.start + whole.end) / 2, (whole.end - whole.start) / 40
    return Window(centre - half, centre + half, whole.origin)


def training_window(data: RunData, whole: Window) -> tuple[float, float]:
    """From the beginning of the first recorded step to the end of the last, else everything."""
    if data.steps:
        first, last = data.steps[0], data.steps[-1]
        start = max(whole.start, first.time - first.step_seconds)
        end = min(whole.end, last.time)
        if end > start:
            return start, end
    return whole.start, whole.end
