"""Draws each process's activity over time: one lane per process over a window of time."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.monitoring.metrics.occupancy import SlotPiece, SlotUse
from asyncrl.monitoring.records.spans import Span, SpanKind, clip, flatten
from asyncrl.monitoring.report.markup import Child, Markup, element, legend
from asyncrl.monitoring.report.plots import SLICES, Box, stacked_slices
from asyncrl.monitoring.terminal.formatting import duration, number, percent

WIDTH = 1080
LABELS = 124
RIGHT = 10
TOP = 20
LANE = 30
STRIP = 26
"""Height of the strip that shows the use of slots, under its process's lane."""
GAP = 12
AXIS = 30
MAX_EXACT_SPANS = 500
"""A lane with more spans than this in its window is drawn in slices."""
_TIME_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60),
    *(120, 300, 600, 1800, 3600, 7200, 21600, 86400),
)
"""Tick distances of the axis, in seconds."""
_NAMES = {kind.value: kind.value.replace("_", " ") for kind in SpanKind}
KIND_NAMES: Mapping[str, str] = {**_NAMES, SpanKind.RUN_AHEAD.value: "run-ahead"}
STYLES = {
    SlotUse.PRIMARY.value: "k-generating",
    SlotUse.VERIFYING.value: "k-verifying",
    SlotUse.RUN_AHEAD.value: "k-run_ahead",
    SlotUse.EVALUATING.value: "k-evaluating",
    SlotUse.STOPPED.value: "k-transferring_weights",
    SlotUse.ENVIRONMENT.value: "k-environment",
}
"""CSS class of each use, in the order from the bottom. Empty slots are not drawn."""
NAMES = {
    SlotUse.PRIMARY.value: "due samples",
    SlotUse.VERIFYING.value: "verification",
    SlotUse.RUN_AHEAD.value: "run-ahead",
    SlotUse.EVALUATING.value: "evaluation",
    SlotUse.STOPPED.value: "stopped (new weights or paused)",
    SlotUse.ENVIRONMENT.value: "empty, samples wait for environments",
    SlotUse.IDLE.value: "empty",
}


def use_in_slices(
    pieces: Iterable[SlotPiece], start: float, end: float, slices: int
) -> list[dict[str, float]]:
    """Use to its mean share of all slots, for each of `slices` equal parts of `[start, end)`."""
    recorded = [0.0] * slices
    used: list[dict[str, float]] = [{} for _ in range(slices)]
    for piece in pieces:
        if piece.slots > 0:
            for index, seconds in _by_slice(piece, start, end, slices):
                recorded[index] += seconds
                for use, slots in piece.used.items():
                    share = slots / piece.slots * seconds
                    used[index][use] = used[index].get(use, 0.0) + share
    return [
        {use: share / seconds for use, share in uses.items()}
        for uses, seconds in zip(used, recorded, strict=True)
    ]


def _by_slice(
    piece: Span | SlotPiece, start: float, end: float, slices: int
) -> Iterator[tuple[int, float]]:
    """Yield index and seconds of the piece's part in each of `slices` parts of `[start, end)`."""
    size = (end - start) / slices
    first = max(0, int((piece.start - start) / size))
    for index in range(first, min(slices - 1, int((piece.end - start) / size)) + 1):
        left = max(piece.start, start + index * size)
        seconds = min(piece.end, start + (index + 1) * size) - left
        if seconds > 0:
            yield index, seconds


def slot_strip(
    pieces: Sequence[SlotPiece], span: tuple[float, float], box: Box, origin: float
) -> Markup:
    """Draw the use of one generator's slots in `span` (Unix seconds), counted from `origin`."""
    start, end = span
    slots = max((piece.slots for piece in pieces), default=0)
    slices = use_in_slices(pieces, start, end, SLICES)

    def describe(index: int) -> str:
        uses = slices[index]
        used = [use for use in STYLES if uses.get(use, 0.0) > 0]
        lines = [f"{NAMES[use]}: {number(uses[use] * slots, 1)} of {slots} slots" for use in used]
        at = duration(start - origin + (end - start) * index / SLICES)
        empty = percent(max(0.0, 1 - sum(uses.values())))
        return "\n".join([*lines, f"empty: {empty}, at {at}"])

    return stacked_slices(slices, STYLES, box, describe)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that is drawn. Times are in seconds since 1970."""

    start: float
    end: float
    origin: float

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
    """Draw all lanes over one window; `title` is for screen readers."""
    slots = slots or {}
    marks: list[Child] = []
    y = float(TOP)
    for name, spans in lanes.items():
        short = name if len(name) <= 17 else name[:8] + "…" + name[-8:]
        marks += [_track(short, _box(y, LANE), "lane"), _lane(spans, window, y)]
        y += LANE
        if name in slots:
            box = _box(y + 3, STRIP)
            strip = slot_strip(slots[name], (window.start, window.end), box, window.origin)
            marks += [_track("slots in use", box, "tick"), strip]
            y += 3 + STRIP
        y += GAP
    marks = [_axis(window, y), *marks, _finished_steps(window, y, steps)]
    view = f"0 0 {WIDTH} {y + AXIS}"
    drawing = element("svg", marks, viewBox=view, role="img", aria_label=title)
    return element("div", drawing, class_="wide")


def _box(y: float, height: float) -> Box:
    return Box(LABELS, y, WIDTH - LABELS - RIGHT, height)


def _track(label: str, box: Box, style: str) -> Markup:
    middle = box.top + box.height / 2 + 4
    return element(
        "g",
        element("text", label, x=LABELS - 12, y=middle, class_=f"{style} end"),
        element("rect", x=box.left, y=box.top, width=box.width, height=box.height, class_="track"),
    )


def kinds_legend(
    lanes: Mapping[str, Sequence[Span]], slots: Mapping[str, Sequence[SlotPiece]]
) -> Markup:
    """Colours of the kinds of spans and of slots that occur."""
    seen = {span.kind for spans in lanes.values() for span in spans}
    items = {KIND_NAMES[kind]: f"k-{kind}" for kind in SpanKind if kind.value in seen}
    waits = SlotUse.ENVIRONMENT.value
    if any(waits in piece.used for pieces in slots.values() for piece in pieces):
        items[f"slots: {NAMES[waits]}"] = STYLES[waits]
    return legend([*items.items(), ("nothing recorded", "track")])


def _lane(spans: Sequence[Span], window: Window, y: float) -> Markup:
    inside = flatten(clip(spans, window.start, window.end))
    if len(inside) <= MAX_EXACT_SPANS:
        return element("g", [_rectangle(span, window, y) for span in inside])
    return _slices(inside, window, y)


def _rectangle(span: Span, window: Window, y: float) -> Markup:
    left, title = window.x(span.start), element("title", _description(span, window))
    width = max(0.35, window.x(span.end) - left)
    return element("rect", title, x=left, y=y, width=width, height=LANE, class_=_style(span.kind))


def _style(kind: str) -> str:
    return f"k-{kind}" if kind in KIND_NAMES else "k-other"


def _description(span: Span, window: Window) -> str:
    name = KIND_NAMES.get(span.kind, span.kind)
    if span.kind == SpanKind.WAITING:
        name += f" for {span.cause}"
    details = [f"{key} {value}" for key, value in span.args.items() if key != "for"]
    when = f"{_precise(span.seconds)} from {_precise(span.start - window.origin)}"
    return "\n".join([name, *details, when])


def _precise(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _slices(spans: Sequence[Span], window: Window, y: float) -> Markup:
    slices = slice_shares(spans, window.start, window.end, SLICES)
    kinds = sorted({kind for shares in slices for kind in shares}, key=_order)

    def describe(index: int) -> str:
        shares = [(kind, slices[index][kind]) for kind in kinds if kind in slices[index]]
        lines = [f"{KIND_NAMES.get(kind, kind)} {percent(share)}" for kind, share in shares]
        at = window.start - window.origin + (window.end - window.start) * index / SLICES
        return "\n".join([*lines, f"at {duration(at)}"])

    return stacked_slices(slices, {kind: _style(kind) for kind in kinds}, _box(y, LANE), describe)


def _order(kind: str) -> int:
    """Place in the stack, from the bottom; unknown kinds come first."""
    return list(KIND_NAMES).index(kind) if kind in KIND_NAMES else -1


def slice_shares(
    spans: Sequence[Span], start: float, end: float, slices: int
) -> list[dict[str, float]]:
    """Kind to its share, for each of `slices` equal parts of `[start, end)`, without overlaps."""
    size = (end - start) / slices
    out: list[dict[str, float]] = [{} for _ in range(slices)]
    for span in spans:
        for index, seconds in _by_slice(span, start, end, slices):
            out[index][span.kind] = out[index].get(span.kind, 0.0) + seconds / size
    return out


def _axis(window: Window, bottom: float) -> Markup:
    length = window.end - window.start
    longest = _TIME_STEPS[-1] * math.ceil(length / (12 * _TIME_STEPS[-1]))
    step = next((seconds for seconds in _TIME_STEPS if length / seconds <= 12), longest)
    marks = []
    tick = int((window.start - window.origin) / step)
    while (at := window.origin + tick * step) <= window.end:
        if at >= window.start:
            x = window.x(at)
            marks.append(element("line", x1=x, x2=x, y1=TOP - 4, y2=bottom - 4, class_="grid"))
            label = clock_label(tick * step, step)
            marks.append(element("text", label, x=x, y=bottom + 10, class_="tick mid"))
        tick += 1
    label = "time since the start of the run"
    marks.append(element("text", label, x=(LABELS + WIDTH) / 2, y=bottom + 26, class_="label mid"))
    return element("g", marks)


def clock_label(seconds: float, step: float) -> str:
    """A time on the axis, as precise as `step` requires: `1.5 s`, `42 s`, `3:20`, `1:05:00`."""
    if step < 1:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _finished_steps(window: Window, y: float, steps: Sequence[tuple[int, float]]) -> Markup | None:
    marks = []
    for step, time in steps:
        if window.start <= time <= window.end:
            x = window.x(time)
            marks.append(element("line", x1=x, x2=x, y1=TOP - 6, y2=y - 6, class_="step"))
            label = f"step {step} done"
            marks.append(element("text", label, x=x, y=TOP - 9, class_="tick mid"))
    return element("g", marks) if marks else None
