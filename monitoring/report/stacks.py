"""Draw shares over time: equal slices, in each of which the parts are stacked from the bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.monitoring.report.markup import Markup, element

SLICES = 238
"""Slices of a time line over its whole width."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a drawing, in pixels."""

    left: float
    top: float
    width: float
    height: float


def stacked_slices(
    slices: Sequence[Mapping[str, float]],
    styles: Mapping[str, str],
    box: Box,
    describe: Callable[[int], str],
) -> Markup:
    """One path per part, and over each slice an invisible band that shows its numbers.

    Args:
        slices: for each slice, part to its share of the slice, 0 to 1; empty: nothing is drawn.
        styles: part to its CSS class, in the order from the bottom.
        box: where to draw.
        describe: the text that is shown when the slice of this index is pointed at.
    """
    width = box.width / max(1, len(slices))
    paths: dict[str, list[str]] = {}
    bands = []
    for index, shares in enumerate(slices):
        if not shares:
            continue
        left, floor = box.left + index * width, box.top + box.height
        for part in styles:
            height = shares.get(part, 0.0) * box.height
            if height > 0:
                paths.setdefault(part, []).append(bar_path(left, floor, width, height))
                floor -= height
        band = element("rect", x=left, y=box.top, width=width, height=box.height)
        bands.append(element("g", element("title", describe(index)), band))
    marks = [
        element("path", d="".join(pieces), class_=styles[part]) for part, pieces in paths.items()
    ]
    return element("g", marks, element("g", bands, class_="hover"))


def bar_path(left: float, floor: float, width: float, height: float) -> str:
    """The outline of an upright bar that stands on `floor`, as SVG path data."""
    return f"M{left:.2f} {floor:.2f}h{width:.2f}v{-height:.2f}h{-width:.2f}z"
