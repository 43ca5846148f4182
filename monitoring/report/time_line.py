"""The report's time line: what each process did when, and idle shares by cause."""

from __future__ import annotations

from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.idle import idle_card, slots_card
from asyncrl.monitoring.report.lanes import Window, kinds_legend, lanes_drawing
from asyncrl.monitoring.report.markup import Child, Markup, element
from asyncrl.monitoring.report.sections import section
from asyncrl.monitoring.report.windows import middle_window, training_window, whole_window
from asyncrl.monitoring.terminal.formatting import duration

MAX_LANES = 24
"""Most processes that are drawn. The table of idle shares lists all of them."""


def time_line(data: RunData) -> Markup | None:
    """Lanes for the whole run and for its middle, and idle shares; None without time lines."""
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
    """Lanes of an active run over its last minutes, and idle shares; `data` has time lines."""
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
