"""Draw who was busy when: one lane per process over a window of time.

A window with few spans is drawn span by span. One with many is cut into slices, and in each slice
the height of a colour is that kind's share of the slice, so that nothing is lost by drawing small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monitoring.occupancy import SlotPiece
from monitoring.report.markup import Child, Markup, element
from monitoring.report.slot_strip import slot_strip
from monitoring.spans import Span, SpanKind, clip, flatten
from monitoring.wording import duration, percent

WIDTH = 1080
LABELS = 124
RIGHT = 10
TOP = 20
LANE = 30
STRIP = 26
"""Height of the strip that shows the use of slots, under its process's lane."""
GAP = 12
AXIS = 30
MOST_EXACT = 500
"""With more spans than this in a window, a lane is drawn in slices."""
SLICES = 238

_TIME_STEPS = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    1800,
    3600,
    7200,
    21600,
    86400,
)

KIND_NAMES: Mapping[str, str] = {
    kind.value: kind.value.replace("_", " ").replace("run ahead", "running ahead")
    for kind in SpanKind
}


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that is drawn; times in seconds since 1970."""

    start: float
    end: float
    origin: float
    """Where the axis counts from: the run's start."""

    def x(self, time: float) -> float:
        """Pixels from the left edge."""
        share = (time - self.start) / (self.end - self.start)
        return LABELS + share * (WIDTH - LABELS - RIGHT)


def lanes_drawing(
    lanes: Mapping[str, Sequence[Span]],
    window: Window,
    title: str,
    steps: Sequence[tuple[int, float]] = (),
    slots: Mapping[str, Sequence[SlotPiece]] | None = None,
) -> Markup:
    """All lanes over one window.

    Args:
        lanes: process to its spans.
        window: what is drawn.
        title: read aloud in place of the drawing.
        steps: moments at which steps finished, as `(step, time)`.
        slots: process to the use of its slots, drawn under its lane.
    """
    slots = slots or {}
    marks: list[Child] = []
    y = float(TOP)
    for name, spans in lanes.items():
        marks.append(_track(_short(name), y, LANE, "lane"))
        inside = flatten(clip(spans, window.start, window.end))
        drawn = _exact if len(inside) <= MOST_EXACT else _slices
        marks.append(drawn(inside, window, y))
        y += LANE
        if name in slots:
            y += 3
            marks.append(_track("slots in use", y, STRIP, "tick"))
            box = (LABELS, y, WIDTH - LABELS - RIGHT, STRIP)
            marks.append(slot_strip(slots[name], (window.start, window.end), box, window.origin))
            y += STRIP
        y += GAP
    marks = [_axis(window, y), *marks, _finished_steps(window, y, steps)]
    return element(
        "div",
        element("svg", marks, viewBox=f"0 0 {WIDTH} {y + AXIS}", role="img", aria_label=title),
        class_="wide",
    )


def _track(label: str, y: float, height: float, style: str) -> Markup:
    width = WIDTH - LABELS - RIGHT
    return element(
        "g",
        element("text", label, x=LABELS - 12, y=y + height / 2 + 4, class_=f"{style} end"),
        element("rect", x=LABELS, y=y, width=width, height=height, class_="track"),
    )


def kinds_legend(lanes: Mapping[str, Sequence[Span]]) -> Markup:
    """The colours of the kinds that occur."""
    seen = {span.kind for spans in lanes.values() for span in spans}
    known = [kind for kind in SpanKind if kind.value in seen]
    items = [
        element("span", element("i", class_=f"swatch k-{kind}"), KIND_NAMES[kind]) for kind in known
    ]
    items.append(element("span", element("i", class_="swatch track"), "nothing recorded"))
    return element("div", items, class_="legend")


def _short(name: str) -> str:
    return name if len(name) <= 17 else name[:8] + "…" + name[-8:]


def _exact(spans: Sequence[Span], window: Window, y: float) -> Markup:
    marks = []
    for span in spans:
        left = window.x(span.start)
        width = max(0.35, window.x(span.end) - left)
        marks.append(
            element(
                "rect",
                element("title", _described(span, window)),
                x=left,
                y=y,
                width=width,
                height=LANE,
                class_=_style(span.kind),
            )
        )
    return element("g", marks)


def _style(kind: str) -> str:
    return f"k-{kind}" if kind in KIND_NAMES else "k-other"


def _described(span: Span, window: Window) -> str:
    words = KIND_NAMES.get(span.kind, span.kind)
    if span.kind == SpanKind.WAITING:
        words += f" for {span.cause}"
    rest = [f"{key} {value}" for key, value in span.args.items() if key != "for"]
    lines = [words, *rest, f"{_exactly(span.seconds)} from {_exactly(span.start - window.origin)}"]
    return "\n".join(lines)


def _exactly(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _slices(spans: Sequence[Span], window: Window, y: float) -> Markup:
    """One path per kind, and over each slice an invisible band with its numbers."""
    shares = slice_shares(spans, window.start, window.end, SLICES)
    width = (WIDTH - LABELS - RIGHT) / SLICES
    paths: dict[str, list[str]] = {}
    bands = []
    for index, slice_ in enumerate(shares):
        left = LABELS + index * width
        floor = y + LANE
        words = []
        for kind in sorted(slice_, key=_order):
            height = slice_[kind] * LANE
            paths.setdefault(kind, []).append(
                f"M{left:.2f} {floor:.2f}h{width:.2f}v{-height:.2f}h{-width:.2f}z"
            )
            floor -= height
            words.append(f"{KIND_NAMES.get(kind, kind)} {percent(slice_[kind])}")
        at = (window.start - window.origin) + (window.end - window.start) * index / SLICES
        title = element("title", "\n".join([*words, f"at {duration(at)}"]))
        bands.append(element("g", title, element("rect", x=left, y=y, width=width, height=LANE)))
    marks = [element("path", d="".join(d), class_=_style(kind)) for kind, d in paths.items()]
    return element("g", marks, element("g", bands, class_="hover"))


def _order(kind: str) -> int:
    return list(KIND_NAMES).index(kind) if kind in KIND_NAMES else -1


def slice_shares(
    spans: Sequence[Span], start: float, end: float, slices: int
) -> list[dict[str, float]]:
    """For each of `slices` equal parts of `[start, end)`: kind to its share of that part.

    The spans must not overlap (see `flatten`) and lie inside the window.
    """
    size = (end - start) / slices
    out: list[dict[str, float]] = [{} for _ in range(slices)]
    for span in spans:
        first = max(0, min(slices - 1, int((span.start - start) / size)))
        last = max(0, min(slices - 1, int((span.end - start) / size)))
        for index in range(first, last + 1):
            left = max(span.start, start + index * size)
            right = min(span.end, start + (index + 1) * size)
            if right > left:
                out[index][span.kind] = out[index].get(span.kind, 0.0) + (right - left) / size
    return out


def _axis(window: Window, bottom: float) -> Markup:
    length = window.end - window.start
    longest = _TIME_STEPS[-1] * math.ceil(length / (12 * _TIME_STEPS[-1]))
    step = next((one for one in _TIME_STEPS if length / one <= 12), longest)
    marks = []
    tick = int((window.start - window.origin) / step)
    while (at := window.origin + tick * step) <= window.end:
        if at >= window.start:
            x = window.x(at)
            marks.append(element("line", x1=x, x2=x, y1=TOP - 4, y2=bottom - 4, class_="grid"))
            label = clock_label(tick * step, step)
            marks.append(element("text", label, x=x, y=bottom + 10, class_="tick mid"))
        tick += 1
    words = "time since the run began"
    marks.append(element("text", words, x=(LABELS + WIDTH) / 2, y=bottom + 26, class_="label mid"))
    return element("g", marks)


def clock_label(seconds: float, step: float) -> str:
    """`1.5 s`, `42 s`, `3:20`, `1:05:00`: as fine as the steps of the axis need."""
    if step < 1:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _finished_steps(
    window: Window, bottom: float, steps: Sequence[tuple[int, float]]
) -> Markup | None:
    marks = []
    for step, time in steps:
        if window.start <= time <= window.end:
            x = window.x(time)
            marks.append(element("line", x1=x, x2=x, y1=TOP - 6, y2=bottom - 6, class_="step"))
            words = f"step {step} done"
            marks.append(element("text", words, x=x, y=TOP - 9, class_="tick mid"))
    return element("g", marks) if marks else None
