"""Draw what an engine's slots were used for: a strip under its lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from monitoring.occupancy import SlotPiece, SlotUse
from monitoring.report.markup import Markup, element
from monitoring.wording import duration, number, percent

STYLES = {
    SlotUse.PRIMARY.value: "k-generating",
    SlotUse.VERIFYING.value: "k-verifying",
    SlotUse.RUN_AHEAD.value: "k-run_ahead",
    SlotUse.EVALUATING.value: "k-evaluating",
    SlotUse.STOPPED.value: "k-transferring_weights",
}
NAMES = {
    SlotUse.PRIMARY.value: "due samples",
    SlotUse.VERIFYING.value: "verifying",
    SlotUse.RUN_AHEAD.value: "running ahead",
    SlotUse.EVALUATING.value: "evaluating",
    SlotUse.STOPPED.value: "stopped for new weights or by a person",
    SlotUse.IDLE.value: "empty",
}
SLICES = 238


def use_in_slices(
    pieces: Iterable[SlotPiece], start: float, end: float, slices: int
) -> list[dict[str, float]]:
    """For each of `slices` equal parts of `[start, end)`: use to mean share of all slots.

    Empty where nothing is recorded; idle is what is missing to 1.
    """
    size = (end - start) / slices
    used: list[dict[str, float]] = [{} for _ in range(slices)]
    recorded = [0.0] * slices
    for piece in pieces:
        if piece.end <= start or piece.start >= end or piece.slots <= 0:
            continue
        first = max(0, int((piece.start - start) / size))
        last = min(slices - 1, int((piece.end - start) / size))
        for index in range(first, last + 1):
            left = max(piece.start, start + index * size)
            seconds = min(piece.end, start + (index + 1) * size) - left
            if seconds > 0:
                recorded[index] += seconds
                for use, slots in piece.used.items():
                    share = slots / piece.slots * seconds
                    used[index][use] = used[index].get(use, 0.0) + share
    return [
        {use: share / seconds for use, share in one.items()} if seconds else {}
        for one, seconds in zip(used, recorded, strict=True)
    ]


def slot_strip(
    pieces: Sequence[SlotPiece],
    span: tuple[float, float],
    box: tuple[float, float, float, float],
    origin: float,
) -> Markup:
    """One path per use, and over each slice an invisible band with its numbers.

    Args:
        pieces: of one process.
        span: first and last moment drawn, in seconds since 1970.
        box: left, top, width and height, in pixels.
        origin: the moment that the axis counts from.
    """
    start, end = span
    left, top, width, height = box
    slots = max((piece.slots for piece in pieces), default=0)
    paths: dict[str, list[str]] = {}
    bands = []
    step = width / SLICES
    for index, uses in enumerate(use_in_slices(pieces, start, end, SLICES)):
        x, floor, words = left + index * step, top + height, []
        for use in STYLES:
            share = uses.get(use, 0.0)
            if share > 0:
                tall = share * height
                shape = f"M{x:.2f} {floor:.2f}h{step:.2f}v{-tall:.2f}h{-step:.2f}z"
                paths.setdefault(use, []).append(shape)
                floor -= tall
                words.append(f"{NAMES[use]}: {number(share * slots, 1)} of {slots} slots")
        if not words:
            continue
        at = duration(start - origin + (end - start) * index / SLICES)
        words.append(f"empty: {percent(max(0.0, 1 - sum(uses.values())))}, at {at}")
        told = element("title", "\n".join(words))
        bands.append(element("g", told, element("rect", x=x, y=top, width=step, height=height)))
    marks = [element("path", d="".join(d), class_=STYLES[use]) for use, d in paths.items()]
    return element("g", marks, element("g", bands, class_="hover"))
