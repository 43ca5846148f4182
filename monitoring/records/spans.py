"""Spans of a process's activity over time, and idle shares computed from them. Pure."""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from asyncrl.monitoring.records.jsonl import read_jsonl

UNACCOUNTED = "unaccounted"
"""Cause of the idle time that no span covers."""
ABSENT_SECONDS = 1.0
"""A longer time without a span of any process means that none existed."""
_GAP = 0.05
"""Longest gap between two pieces of one phase, in seconds."""
_REMEMBERED = 51
ENOUGH = 5
"""Ended phases of a kind that a median needs."""


class SpanKind(StrEnum):
    """A process's activities. Where spans overlap, the kind listed first here counts."""

    TRAINING = "training"
    GENERATING = "generating"
    VERIFYING = "verifying"
    EVALUATING = "evaluating"
    RUN_AHEAD = "run_ahead"
    TRANSFERRING_WEIGHTS = "transferring_weights"
    REWARDING = "rewarding"
    SAVING = "saving"
    STARTING = "starting"
    WAITING = "waiting"
    """Idle; the argument `for` names the cause."""


_RANK = {kind.value: rank for rank, kind in enumerate(SpanKind)}


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One activity of one process from `start` to `end`."""

    kind: str
    """A `SpanKind` value; readers show an unknown kind by its name."""
    start: float
    """Unix seconds, monotonic within a process."""
    end: float
    args: dict[str, Any] = {}
    """Details: `step`, `version`, `for`."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start

    @property
    def cause(self) -> str:
        """The `for` of a waiting span."""
        return str(self.args.get("for", UNACCOUNTED))


def continues(first: Span, second: Span, gap: float) -> bool:
    """Return True if `second` is the same activity, at most `gap` seconds after `first`."""
    is_same = first.kind == second.kind and first.args == second.args
    return is_same and first.start <= second.start <= first.end + gap


def join(first: Span, second: Span) -> Span:
    """The span that covers both; `second` must continue `first`."""
    return Span(first.kind, first.start, max(first.end, second.end), first.args)


def merge(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Join equal spans that overlap or lie at most `gap` seconds apart; ordered by start."""
    newest: dict[tuple[str, str], int] = {}
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        key = (span.kind, repr(span.args))
        index = newest.get(key)
        if index is not None and continues(merged[index], span, gap):
            merged[index] = join(merged[index], span)
        else:
            newest[key] = len(merged)
            merged.append(span)
    return merged


def clip(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of spans inside `[start, end)`."""
    inside = [span for span in spans if span.end > start and span.start < end]
    return [Span(one.kind, max(one.start, start), min(one.end, end), one.args) for one in inside]


def flatten(spans: Iterable[Span]) -> list[Span]:
    """Remove overlaps: keep at each moment the running span of the first kind in `SpanKind`."""
    ordered = sorted(spans, key=lambda span: span.start)
    edges = sorted({edge for span in ordered for edge in (span.start, span.end)})
    running: list[Span] = []
    pieces: list[Span] = []
    upcoming = 0
    for left, right in itertools.pairwise(edges):
        while upcoming < len(ordered) and ordered[upcoming].start <= left:
            running.append(ordered[upcoming])
            upcoming += 1
        running = [span for span in running if span.end > left]
        if not running:
            continue
        top = min(running, key=lambda span: (_RANK.get(span.kind, 0), -span.start))
        piece = Span(top.kind, left, right, top.args)
        if pieces and continues(pieces[-1], piece, 0.0):
            pieces[-1] = join(pieces[-1], piece)
        else:
            pieces.append(piece)
    return pieces


def absent_seconds(lanes: Iterable[Iterable[Span]], start: float, end: float) -> float:
    """Seconds of `[start, end)` in which no process of a run existed; 0 if no span lies in it.

    These are the gaps longer than `ABSENT_SECONDS`: a live process records what it waits for.
    """
    absent, covered = 0.0, start
    spans = sorted((span.start, span.end) for lane in lanes for span in lane)
    for begin, finish in [*spans, (end, end)]:
        gap = min(begin, end) - covered
        absent += gap if gap > ABSENT_SECONDS else 0.0
        covered = max(covered, finish)
    return absent if absent < end - start else 0.0


def idle_by_cause(
    spans: Iterable[Span], start: float, end: float, *, absent: float = 0.0
) -> dict[str, float]:
    """Share of `[start, end)` in which a process waited, by cause, largest first.

    Time without a span is `UNACCOUNTED`, `absent` seconds do not count. ValueError if none remain.
    """
    whole = end - start - absent
    if not whole > 0:
        raise ValueError(
            f"idle shares need an end after the start; got {start} to {end}, {absent} s of which "
            "do not count"
        )
    covered = 0.0
    idle: dict[str, float] = {}
    for span in flatten(clip(spans, start, end)):
        covered += span.seconds
        if span.kind == SpanKind.WAITING:
            idle[span.cause] = idle.get(span.cause, 0.0) + span.seconds
    missing = whole - covered
    if missing > 1e-9 * (end - start):
        idle[UNACCOUNTED] = idle.get(UNACCOUNTED, 0.0) + missing
    largest = sorted(idle.items(), key=lambda item: -item[1])
    return {cause: seconds / whole for cause, seconds in largest}


def idle_ratio(spans: Iterable[Span], start: float, end: float) -> float:
    """Share of `[start, end)` in which a process waited, 0 to 1. Raises as `idle_by_cause`."""
    return min(1.0, sum(idle_by_cause(spans, start, end).values()))


class RecentIdle:
    """Idle shares over the last `seconds`, updated with each piece of a timeline; none overlap."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._spans: deque[Span] = deque()
        self._idle: dict[str, float] = {}
        self._covered = 0.0

    def add(self, span: Span) -> dict[str, float]:
        """Add a piece; return the idle share of the time that ends with it, by cause.

        Causes without a share left stay in the result with 0.
        """
        self._spans.append(span)
        self._count(span, 1.0)
        start = span.end - self._seconds
        while self._spans[0].start < start:
            old = self._spans.popleft()
            self._count(old, -1.0)
            if old.end > start:
                rest = Span(old.kind, start, old.end, old.args)
                self._spans.appendleft(rest)
                self._count(rest, 1.0)
        whole = span.end - self._spans[0].start
        missing = max(0.0, whole - self._covered)
        idle = self._idle | {UNACCOUNTED: self._idle.get(UNACCOUNTED, 0.0) + missing}
        return {cause: min(1.0, max(0.0, seconds / whole)) for cause, seconds in idle.items()}

    def _count(self, span: Span, sign: float) -> None:
        self._covered += sign * span.seconds
        if span.kind == SpanKind.WAITING:
            self._idle[span.cause] = self._idle.get(span.cause, 0.0) + sign * span.seconds


@dataclass(slots=True)
class Phases:
    """Follows a timeline whose pieces do not overlap: a phase is a row of equal pieces."""

    present: Span | None = None
    _ended: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, piece: Span) -> Span | None:
        """Add a piece of the timeline; return the phase that it ends, if any."""
        before = self.present
        if before is not None and continues(before, piece, _GAP):
            self.present = join(before, piece)
            return None
        self.present = piece
        if before is not None:
            self._ended.setdefault(before.kind, deque(maxlen=_REMEMBERED)).append(before.seconds)
        return before

    def usual(self, kind: str) -> float | None:
        """Median of the last phases of a kind, in seconds; None until there were `ENOUGH`."""
        ended = self._ended.get(kind, ())
        return median(ended) if len(ended) >= ENOUGH else None


def read_spans(path: Path, gap: float = 0.002) -> list[Span]:
    """Read one process's spans, merged and ordered by start. Raises as `read_jsonl`."""
    return merge((span for span in read_jsonl(path, Span) if span.end > span.start), gap)


def read_timelines(folder: Path) -> Mapping[str, list[Span]]:
    """Process name to its spans, for each `*.jsonl` in `folder`, ordered by name; may be empty."""
    return {path.stem: read_spans(path) for path in sorted(folder.glob("*.jsonl"))}
