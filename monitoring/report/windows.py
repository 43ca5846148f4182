"""The parts of a run that the report draws: all of it, the training phase, a few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.monitoring.records.spans import Span
from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.lanes import Window

ZOOM_STEPS = 3
"""Number of steps in the enlarged window from the middle of the run."""


def whole_window(lanes: Mapping[str, Sequence[Span]]) -> Window:
    """From the start of the first span to the end of the last."""
    start = min(span.start for spans in lanes.values() for span in spans)
    end = max(span.end for spans in lanes.values() for span in spans)
    return Window(start, end, start)


def middle_window(data: RunData, whole: Window) -> Window:
    """A few steps in the middle of the run; a twentieth of it if no steps are recorded."""
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


def training_window(data: RunData, whole: Window) -> Window:
    """From the start of the first step to the end of the last; the whole run without steps."""
    if data.steps:
        first, last = data.steps[0], data.steps[-1]
        start = max(whole.start, first.time - first.step_seconds)
        end = min(whole.end, last.time)
        if end > start:
            return Window(start, end, whole.origin)
    return whole
