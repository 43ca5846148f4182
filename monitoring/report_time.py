"""The report's time line: who was busy when, and idle shares by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monitoring.lanes import Window, kinds_legend, lanes_drawing
from monitoring.markup import Child, Markup, element
from monitoring.report_data import RunData
from monitoring.report_sections import section
from monitoring.series import finite
from monitoring.spans import UNACCOUNTED, Span, idle_by_cause
from monitoring.wording import percent

MOST_LANES = 24
"""More processes than this are not drawn; the table of idle shares has them all."""
ZOOM_STEPS = 3
"""The section shown larger spans this many steps in the middle of the run."""

_CAUSE_STYLES = ("c2", "c4", "c5", "c3")


def time_line(data: RunData) -> Markup | None:
    """Lanes for the whole run and for its middle, and idle shares."""
    if not data.timelines:
        return None
    lanes = dict(list(data.timelines.items())[:MOST_LANES])
    whole = whole_window(lanes)
    hidden = len(data.timelines) - len(lanes)
    about = (
        "One lane per process. Where colours share a column, their heights are shares of its time."
    )
    if hidden:
        about += f" {hidden} more processes are in the table only."
    zoom = middle_window(data, whole)
    moments = [
        (int(row["step"]), time)
        for row in data.rows
        if (time := finite(row.get("time"))) is not None
    ]
    return section(
        "Who was busy when",
        about,
        element(
            "div",
            element("h3", "The whole run"),
            kinds_legend(lanes),
            lanes_drawing(lanes, whole, "time line of the whole run"),
            class_="card",
        ),
        element(
            "div",
            element("h3", "A moment in the middle"),
            lanes_drawing(lanes, zoom, "time line of a few steps", moments),
            class_="card",
        ),
        _idle_card(data, whole),
    )


def whole_window(lanes: Mapping[str, Sequence[Span]]) -> Window:
    """From the first span to the end of the last."""
    start = min(span.start for spans in lanes.values() for span in spans)
    end = max(span.end for spans in lanes.values() for span in spans)
    return Window(start, end, start)


def middle_window(data: RunData, whole: Window) -> Window:
    """A few steps in the middle of the run, or a twentieth of it where steps have no times."""
    times = [
        time
        for row in data.rows
        if (time := finite(row.get("time"))) is not None and whole.start <= time <= whole.end
    ]
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
    times = [
        (time, finite(row.get("step_seconds")) or 0.0)
        for row in data.rows
        if (time := finite(row.get("time"))) is not None
    ]
    if times:
        start = max(whole.start, times[0][0] - times[0][1])
        end = min(whole.end, times[-1][0])
        if end > start:
            return start, end
    return whole.start, whole.end


def _idle_card(data: RunData, whole: Window) -> Markup:
    start, end = training_window(data, whole)
    shares = {name: idle_by_cause(spans, start, end) for name, spans in data.timelines.items()}
    totals: dict[str, float] = {}
    for one in shares.values():
        for cause, share in one.items():
            totals[cause] = totals.get(cause, 0.0) + share
    named = sorted((cause for cause in totals if cause != UNACCOUNTED), key=lambda c: -totals[c])
    styles = dict(zip(named, _CAUSE_STYLES, strict=False))
    rows = [
        element(
            "tr",
            element("td", name),
            element("td", percent(min(1.0, sum(one.values())), 1), class_="num"),
            element("td", _bar(one, styles), class_="bar"),
            element("td", _causes(one), class_="soft"),
        )
        for name, one in shares.items()
    ]
    head = element(
        "tr",
        [element("th", text) for text in ("process", "idle", "busy and idle", "waiting for")],
    )
    return element(
        "div",
        element("h3", "Idle shares"),
        element(
            "p",
            "From the beginning of the first step to the end of the last, by what each process "
            "waited for. Unaccounted is time that its record does not explain.",
            class_="about",
        ),
        element("div", element("table", head, rows), class_="wide"),
        class_="card",
    )


def _causes(shares: Mapping[str, float]) -> str:
    words = [f"{cause} {percent(share, 1)}" for cause, share in shares.items() if share >= 0.0005]
    return ", ".join(words) or "never"


def _bar(shares: Mapping[str, float], styles: Mapping[str, str]) -> Markup:
    """Busy from the left, then each cause."""
    busy = max(0.0, 1.0 - sum(shares.values()))
    parts: list[tuple[str, float, str]] = [("busy", busy, "c1")]
    parts += [(cause, share, styles.get(cause, "c6")) for cause, share in shares.items()]
    left = 0.0
    marks: list[Child] = []
    for name, share, style in parts:
        width = 300 * share
        told = element("title", f"{name} {percent(share, 1)}")
        marks.append(
            element(
                "g",
                element("rect", told, x=left, y=0, width=width, height=12, class_="area"),
                class_=style,
            )
        )
        left += width
    return element("svg", marks, viewBox="0 0 300 12", role="img", aria_label="busy and idle")
