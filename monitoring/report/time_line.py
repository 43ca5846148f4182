"""The report's time line: who was busy when, and idle shares by cause."""

from __future__ import annotations

from monitoring.report.data import RunData
from monitoring.report.idle import idle_card, slots_card
from monitoring.report.lanes import kinds_legend, lanes_drawing
from monitoring.report.markup import Markup, element
from monitoring.report.sections import section
from monitoring.report.windows import middle_window, training_window, whole_window

MOST_LANES = 24
"""More processes than this are not drawn; the table of idle shares has them all."""


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
    if data.slots:
        about += (
            " Under a generator's lane: how many of its slots were in use, in the same colours."
        )
    if hidden:
        about += f" {hidden} more processes are in the table only."
    zoom = middle_window(data, whole)
    moments = [(step.step, step.time) for step in data.steps]
    return section(
        "Who was busy when",
        about,
        element(
            "div",
            element("h3", "The whole run"),
            kinds_legend(lanes),
            lanes_drawing(lanes, whole, "time line of the whole run", slots=data.slots),
            class_="card",
        ),
        element(
            "div",
            element("h3", "A moment in the middle"),
            lanes_drawing(lanes, zoom, "time line of a few steps", moments, data.slots),
            class_="card",
        ),
        idle_card(data.timelines, *training_window(data, whole)),
        slots_card(data.slots, *training_window(data, whole)),
    )
