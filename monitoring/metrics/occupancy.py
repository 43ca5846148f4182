"""The use of an engine's slots, in slot-seconds, recorded in `RUN/slots/PROCESS.jsonl`."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl

PIECE_SECONDS = 0.25
"""Shortest piece written while the use of slots keeps changing."""


class SlotUse(StrEnum):
    """Uses of a slot."""

    PRIMARY = "primary"
    VERIFYING = "verifying"
    """Scoring the kept tokens of a sample under new weights."""
    RUN_AHEAD = "run_ahead"
    """Generating a sample of a later step."""
    EVALUATING = "evaluating"
    STOPPED = "stopped"
    """Unused: weights are being swapped, or a user paused the run."""
    ENVIRONMENT = "environment"
    """Unused: reserved for a sample that waits for its environment."""
    IDLE = "idle"
    """Unused: no request holds the slot."""


EMPTY = (SlotUse.ENVIRONMENT.value, SlotUse.IDLE.value)
"""Uses in which no request holds the slot and nothing keeps the engine from taking one."""


class SlotPiece(msgspec.Struct, frozen=True):
    """The use of one process's slots from `start` to `end`."""

    start: float
    """Unix seconds."""
    end: float
    slots: int
    used: dict[str, float]
    """Mean number of slots per `SlotUse` value; the rest of `slots` is idle."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start

    def slot_seconds(self) -> dict[str, float]:
        """Slots times seconds by use, `idle` last; uses with 0 are left out."""
        out = {use: slots * self.seconds for use, slots in self.used.items() if slots}
        idle = (self.slots - sum(self.used.values())) * self.seconds
        return out | {SlotUse.IDLE.value: idle} if idle > 1e-9 else out


class SlotLog:
    """Appends the use of slots to `path`, if given; `observe` gets each piece as it is written."""

    def __init__(
        self, path: Path | None, observe: Callable[[SlotPiece], None] | None = None
    ) -> None:
        self._writer = None if path is None else RetryingJsonlWriter[SlotPiece](path)
        self._observe = observe
        self._piece: SlotPiece | None = None

    def add(self, start: float, end: float, slots: int, used: Mapping[str, int]) -> None:
        """Add the slots per use from `start` to `end` (Unix times). Raises ValueError."""
        if sum(used.values()) > slots or any(count < 0 for count in used.values()):
            raise ValueError(
                f"slots in use {dict(used)} of an engine with {slots} slots: counts must be 0 or "
                "more and must not exceed the slots together"
            )
        if end <= start:
            return
        new = SlotPiece(start, end, slots, {use: float(n) for use, n in used.items() if n})
        last = self._piece
        if (
            last is not None
            and new.slots == last.slots
            and new.start - last.end < 0.002
            and (new.used == last.used or last.seconds < PIECE_SECONDS)
        ):
            self._piece = _joined(last, new)
        else:
            self.flush()
            self._piece = new

    def flush(self) -> None:
        """Write what was collected."""
        piece, self._piece = self._piece, None
        if piece is None:
            return
        if self._writer is not None:
            rounded = {use: round(slots, 3) for use, slots in piece.used.items()}
            start, end = round(piece.start, 4), round(piece.end, 4)
            self._writer.append(SlotPiece(start, end, piece.slots, rounded))
        if self._observe is not None:
            self._observe(piece)

    def close(self) -> None:
        """Write everything and close the file. Idempotent."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _joined(first: SlotPiece, second: SlotPiece) -> SlotPiece:
    if first.used == second.used:
        return SlotPiece(first.start, second.end, first.slots, first.used)
    mean: dict[str, float] = {}
    for use in first.used | second.used:
        slot_seconds = sum(one.used.get(use, 0.0) * one.seconds for one in (first, second))
        mean[use] = slot_seconds / (second.end - first.start)  # a gap (2 ms at most) counts as idle
    return SlotPiece(first.start, second.end, first.slots, mean)


def slot_shares(pieces: Iterable[SlotPiece], start: float, end: float) -> dict[str, float]:
    """Share of the slot-seconds of `[start, end)` by use that occurred, in `SlotUse`'s order."""
    totals: dict[str, float] = {}
    for piece in pieces:
        inside = min(piece.end, end) - max(piece.start, start)
        if inside > 0:
            for use, seconds in piece.slot_seconds().items():
                totals[use] = totals.get(use, 0.0) + seconds * inside / piece.seconds
    whole = sum(totals.values())
    order = [use.value for use in SlotUse]
    known = sorted(totals, key=lambda use: order.index(use) if use in order else -1)
    return {use: totals[use] / whole for use in known} if whole else {}


def read_slots(path: Path) -> list[SlotPiece]:
    """Read the pieces of one process in the order of the file. Raises as `read_jsonl`."""
    return [piece for piece in read_jsonl(path, SlotPiece) if piece.end > piece.start]
