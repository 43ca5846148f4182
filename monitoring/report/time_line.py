"""The report's timeline: each process's activity over time, and idle shares by cause."""

from collections.abc import Mapping, Sequence

from asyncrl.monitoring.metrics.occupancy import EMPTY, SlotPiece, SlotUse, slot_shares
from asyncrl.monitoring.records.spans import UNACCOUNTED, Span, absent_seconds, idle_by_cause
from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.lanes import NAMES, STYLES, Window, kinds_legend, lanes_drawing
from asyncrl.monitoring.report.markup import Child, Markup, element, legend
from asyncrl.monitoring.report.sections import section
from asyncrl.monitoring.terminal.formatting import duration, percent

ZOOM_STEPS = 3
MAX_LANES = 24
"""Most processes that are drawn. The table of idle shares lists all of them."""
_CAUSE_STYLES = ("c2", "c4", "c5", "c3", "k-rewarding", "k-evaluating", "k-saving")
_BUSY = "c1"
_OTHER = "c6"
STEPS_OF_THE_RUN = "From the start of the first step to the end of the last step"


def whole_window(lanes: Mapping[str, Sequence[Span]]) -> Window:
    """Window from the start of the first span to the end of the last."""
    start = min(span.start for spans in lanes.values() for span in spans)
    end = max(span.end for spans in lanes.values() for span in spans)
    return Window(start, end, start)


def middle_window(data: RunData, whole: Window) -> Window:
    """Window of a few steps in the middle of the run; without steps, a twentieth of it."""
    times = [step.time for step in data.steps if whole.start <= step.time <= whole.end]
    if len(times) >= 2:
        middle = len(times) // 2
        first = max(0, middle - (ZOOM_STEPS + 1) // 2)
        last = min(len(times) - 1, first + ZOOM_STEPS)
        if times[last] > times[first]:
            margin = 0.04 * (times[last] - times[first])
            start, end = times[first] - margin, times[last] + margin
            return Window(max(whole.start, start), min(whole.end, end), whole.origin)
    centre, half = (whole.start + whole.end) / 2, (whole.end - whole.start) / 40
    return Window(centre - half, centre + half, whole.origin)


def training_window(data: RunData, whole: Window) -> Window:
    """Window from the start of the first step to the end of the last; without steps, the whole."""
    if data.steps:
        first, last = data.steps[0], data.steps[-1]
        start = max(whole.start, first.time - first.step_seconds)
        end = min(whole.end, last.time)
        if end > start:
            return Window(start, end, whole.origin)
    return whole


def idle_card(
    lanes: Mapping[str, Sequence[Span]], window: Window, period: str = STEPS_OF_THE_RUN
) -> Markup:
    """Each process's idle share of the window, by cause. `period` describes the window."""
    absent = absent_seconds(lanes.values(), window.start, window.end)
    shares = {
        name: idle_by_cause(spans, window.start, window.end, absent=absent)
        for name, spans in lanes.items()
    }
    if absent:
        period += f" without {duration(absent)} in which no process existed"
    totals: dict[str, float] = {}
    for causes in shares.values():
        for cause, share in causes.items():
            totals[cause] = totals.get(cause, 0.0) + share
    named = sorted((cause for cause in totals if cause != UNACCOUNTED), key=lambda c: -totals[c])
    styles = dict(zip(named, _CAUSE_STYLES, strict=False))
    lines = []
    for name, causes in shares.items():
        idle = min(1.0, sum(causes.values()))
        bar = _bar([("busy", 1.0 - idle, _BUSY), *_parts(causes, styles)])
        lines.append((name, idle, bar, _in_words(causes, {}) or "never idle"))
    colours = {"busy": _BUSY, **styles}
    if len(named) > len(styles) or UNACCOUNTED in totals:
        colours["other or unaccounted"] = _OTHER
    return _idle_card(
        "Idle shares",
        f"{period}, by what each process waited for. Unaccounted time is time without a record.",
        colours,
        ("process", "idle", "busy and idle", "waiting for"),
        lines,
    )


def slots_card(slots: Mapping[str, Sequence[SlotPiece]], window: Window) -> Markup | None:
    """Use of each generator's slots in the window, if recorded."""
    shares = {name: slot_shares(pieces, window.start, window.end) for name, pieces in slots.items()}
    idle = SlotUse.IDLE.value
    lines = []
    for name, uses in shares.items():
        if uses:
            bar = _bar([part for part in _parts(uses, STYLES) if part[0] != idle])
            empty = sum(uses.get(use, 0.0) for use in EMPTY)
            lines.append((name, 1.0 - empty, bar, _in_words(uses, NAMES)))
    if not lines:
        return None
    waits = SlotUse.ENVIRONMENT.value
    used = {use for uses in shares.values() for use in uses}
    colours = {NAMES[use]: style for use, style in STYLES.items() if use != waits or waits in used}
    return _idle_card(
        "Slots",
        "A generator counts as busy even if only two of its slots generate. So this is the share "
        "of slot time in use over the same time, and what the slots were used for.",
        colours,
        ("process", "in use", "use of the slots", "share of slot time"),
        lines,
    )


def _idle_card(
    title: str,
    about: str,
    colours: Mapping[str, str],
    head: Sequence[str],
    lines: Sequence[tuple[str, float, Markup, str]],
) -> Markup:
    body = [
        element(
            "tr",
            element("td", name),
            element("td", percent(share, 1), class_="num"),
            element("td", bar, class_="bar"),
            element("td", details, class_="soft"),
        )
        for name, share, bar, details in lines
    ]
    titles = element("tr", [element("th", text) for text in head])
    return element(
        "div",
        element("h3", title),
        element("p", about, class_="about"),
        legend(colours.items()),
        element("div", element("table", titles, body), class_="wide"),
        class_="card",
    )


def _parts(shares: Mapping[str, float], styles: Mapping[str, str]) -> list[tuple[str, float, str]]:
    return [(name, share, styles.get(name, _OTHER)) for name, share in shares.items()]


def _in_words(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    known = [(names.get(name, name), share) for name, share in shares.items() if share >= 0.0005]
    return ", ".join(f"{name} {percent(share, 1)}" for name, share in known)


def _bar(parts: Sequence[tuple[str, float, str]]) -> Markup:
    """Shares of 1 next to each other, from the left. The rest stays empty."""
    left = 0.0
    marks: list[Child] = [element("rect", x=0, y=0, width=300, height=12, class_="track")]
    for name, share, style in parts:
        title = element("title", f"{NAMES.get(name, name)} {percent(share, 1)}")
        rect = element("rect", title, x=left, y=0, width=300 * share, height=12, class_="area")
        marks.append(element("g", rect, class_=style))
        left += 300 * share
    return element("svg", marks, viewBox="0 0 300 12", role="img", aria_label="shares")


def time_line(data: RunData) -> Markup | None:
    """Lanes for the whole run and for its middle, and idle shares, if there are timelines."""
    if not data.timelines:
        return None
    lanes = dict(list(data.timelines.items())[:MAX_LANES])
    whole = whole_window(lanes)
    few, training = middle_window(data, whole), training_window(data, whole)
    finished = [(step.step, step.time) for step in data.steps]
    all_lanes = lanes_drawing(lanes, whole, "time line of the whole run", slots=data.slots)
    few_lanes = lanes_drawing(lanes, few, "time line of a few steps", finished, data.slots)
    return section(
        "What each process did",
        _about(data, hidden=len(data.timelines) - len(lanes)),
        _card("The whole run", kinds_legend(lanes, data.slots), all_lanes),
        _card("A few steps in the middle", few_lanes),
        idle_card(data.timelines, training),
        slots_card(data.slots, training),
    )


def recent_time_line(data: RunData, window: Window) -> Markup:
    """Lanes of an active run over its last minutes, and idle shares; `data` has timelines."""
    lanes = lanes_drawing(data.timelines, window, "time line of the last minutes", slots=data.slots)
    seconds = duration(window.end - window.start)
    return section(
        "What each process does",
        _about(data, hidden=0),
        _card(f"The last {seconds}", kinds_legend(data.timelines, data.slots), lanes),
        idle_card(data.timelines, window, f"Over the last {seconds}"),
        slots_card(data.slots, window),
    )


def _about(data: RunData, hidden: int) -> str:
    about = "One lane per process. Where colours are stacked, their heights are shares of the time."
    if data.slots:
        about += (
            " The strip under a generator's lane shows how many of its slots were in use, in the "
            "same colours."
        )
    if hidden:
        about += f" {hidden} more processes are listed in the table only."
    return about


def _card(title: str, *content: Child) -> Markup:
    return element("div", element("h3", title), *content, class_="card")
