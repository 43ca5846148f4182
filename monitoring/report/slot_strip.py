"""Draw what an engine's slots were used for: a strip under its lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.monitoring.metrics.occupancy import SlotPiece, SlotUse
from asyncrl.monitoring.report.markup import Markup
from asyncrl.monitoring.report.stacks import SLICES, Box, stacked_slices
from asyncrl.monitoring.terminal.formatting import duration, number, percent

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
    """For each of `slices` equal parts of `[start, end)`: use to mean share of all slots.

    A part without any record is empty. Otherwise the shares add up to 1 minus the idle share.
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
        {use: share / seconds for use, share in uses.items()} if seconds else {}
        for uses, seconds in zip(used, recorded, strict=True)
    ]


def slot_strip(
    pieces: Sequence[SlotPiece], span: tuple[float, float], box: Box, origin: float
) -> Markup:
    """The use of one generator's slots over time.

    Args:
        pieces: the generator's records.
        span: first and last moment drawn, in seconds since 1970.
        box: where to draw.
        origin: the moment from which the axis counts.
    """
    start, end = span
    slots = max((piece.slots for piece in pieces), default=0)
    slices = use_in_slices(pieces, start, end, SLICES)

    def describe(index: int) -> str:
        uses = slices[index]
        lines = [
            f"{NAMES[use]}: {number(uses[use] * slots, 1)} of {slots} slots"
            for use in STYLES
            if uses.get(use, 0.0) > 0
        ]
        at = duration(start - origin + (end - start) * index / SLICES)
        empty = percent(max(0.0, 1 - sum(uses.values())))
        return "\n".join([*lines, f"empty: {empty}, at {at}"])

    return stacked_slices(slices, STYLES, box, describe)
