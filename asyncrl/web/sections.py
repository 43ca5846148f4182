"""Renders the report's sections as HTML, again and again as the run's files grow.

An active run is drawn from the ends of its files, so a long run costs as much as a short one.
"""

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.monitoring.metrics.occupancy import SlotPiece
from asyncrl.monitoring.records.jsonl import read_tail
from asyncrl.monitoring.records.metrics_log import recent_evaluations
from asyncrl.monitoring.records.samples import newest_samples
from asyncrl.monitoring.records.spans import Span, merge
from asyncrl.monitoring.report.data import RunData, load_config, load_state, rank_of
from asyncrl.monitoring.report.health import health
from asyncrl.monitoring.report.lanes import Window
from asyncrl.monitoring.report.learning import learning
from asyncrl.monitoring.report.markup import Markup
from asyncrl.monitoring.report.sections import orders, samples, settings
from asyncrl.monitoring.report.time_line import MAX_LANES, recent_time_line, time_line
from asyncrl.monitoring.report.work import work
from asyncrl.web.step_file import StepFile
from asyncrl.wire.messages.control import OrderRecord

RECENT_SECONDS = 120.0
TIMELINE_BYTES = 1 << 18
ORDER_BYTES = 1 << 18
_LINE_BYTES = 1 << 16
_OLDEST_LANE_SECONDS = 30.0
"""Processes that ended longer ago than this before the window do not have a lane."""

NAMES = ("learning", "timeline", "work", "samples", "health", "orders", "settings")


@dataclass(frozen=True, slots=True)
class Section:
    """One rendered section."""

    html: bytes
    version: str
    """Changes whenever `html` changes."""


class LiveSections:
    """The sections of an active run."""

    def __init__(self, run: Path, steps: StepFile) -> None:
        self._run = run
        self._steps = steps

    def drawn(self) -> Mapping[str, Section]:
        """Draw all sections from the ends of the run's files; this belongs in a thread."""
        self._steps.refresh()
        data = RunData(name=self._run.name)
        load_config(self._run / "config.yaml", data)
        load_state(self._run / "run.json", data)
        data.steps = list(self._steps.recent)
        data.samples = newest_samples(self._run, data.max_samples)
        data.evaluations = recent_evaluations(self._run / "evaluations.jsonl", ORDER_BYTES)
        data.orders = read_tail(self._run / "orders.jsonl", OrderRecord, ORDER_BYTES)
        window = _recent(self._run, data)
        return _drawn(data, None if window is None else recent_time_line(data, window))


class EndedSections:
    """The sections of a run that has ended, drawn once."""

    def __init__(self, data: RunData) -> None:
        self._drawn = _drawn(data, time_line(data))

    def drawn(self) -> Mapping[str, Section]:
        """Return all sections."""
        return self._drawn


Sections = LiveSections | EndedSections


def recent_spans(run: Path, seconds: float) -> dict[str, list[Span]]:
    """Return the last part of each process's time line, by process, without empty ones."""
    paths = sorted((run / "timeline").glob("*.jsonl"), key=lambda path: rank_of(path.stem))
    since = time.time() - seconds  # noqa: TID251 - spans have that time
    lanes: dict[str, list[Span]] = {}
    for path in paths:
        spans = [one for one in read_tail(path, Span, TIMELINE_BYTES) if one.end > one.start]
        spans = merge((one for one in spans if one.end > since), 0.002)
        if spans:
            lanes[path.stem] = spans
        if len(lanes) == MAX_LANES:
            break
    return lanes


def _recent(run: Path, data: RunData) -> Window | None:
    """Read the last minutes into `data`; return the window that they cover."""
    data.timelines = recent_spans(run, RECENT_SECONDS + _OLDEST_LANE_SECONDS)
    if not data.timelines:
        return None
    data.slots = {
        name: pieces
        for name in data.timelines
        if (pieces := read_tail(run / "slots" / f"{name}.jsonl", SlotPiece, TIMELINE_BYTES))
    }
    end = max(spans[-1].end for spans in data.timelines.values())
    begin = min(spans[0].start for spans in data.timelines.values())
    firsts = [_first_start(run / "timeline" / f"{name}.jsonl") for name in data.timelines]
    origin = min((one for one in firsts if one is not None), default=begin)
    return Window(max(begin, end - RECENT_SECONDS), end, origin)


def _first_start(path: Path) -> float | None:
    with contextlib.suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
        return msgspec.json.decode(file.readline(_LINE_BYTES), type=Span).start
    return None


def _drawn(data: RunData, lanes: Markup | None) -> dict[str, Section]:
    drawn = (learning(data), lanes, work(data), samples(data), health(data), orders(data))
    found: dict[str, Section] = {}
    for name, part in zip(NAMES, (*drawn, settings(data)), strict=True):
        html = (part or "").encode()
        found[name] = Section(html, hashlib.blake2b(html, digest_size=8).hexdigest())
    return found
