"""Records a process's activity over time, in `RUN/timeline/PROCESS.jsonl`.

Each flush also writes open spans, whose parts readers join: a killed process loses one interval.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter
from asyncrl.monitoring.records.spans import Span, SpanKind, continues, join


@dataclass(frozen=True, slots=True)
class Clock:
    """Source of times; tests pass their own."""

    monotonic: Callable[[], float] = time.monotonic
    """Monotonic seconds from any origin, as `Timeline.record` takes them."""
    wall: Callable[[], float] = time.time  # noqa: TID251 - read once, for an origin
    """Unix time in seconds; read once, so that later corrections of the clock do not matter."""


class Timeline:
    """The timeline of one process. Thread-safe.

    It appends to `path`, if given, at most every `flush_seconds`. Equal spans at most `merge_gap`
    seconds apart become one. `observe` gets each piece when it is written.
    """

    def __init__(
        self,
        path: Path | None,
        process: str,
        *,
        clock: Clock | None = None,
        flush_seconds: float = 1.0,
        merge_gap: float = 0.002,
        observe: Callable[[Span], None] | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", process):
            raise ValueError(
                f"process name {process!r} may only have letters, digits, '-', '_' and '.', as in "
                "generator-0"
            )
        self.process = process
        self._clock = clock or Clock()
        self._offset = self._clock.wall() - self._clock.monotonic()
        self._flush_seconds = flush_seconds
        self._merge_gap = merge_gap
        self._observe = observe
        self._lock = threading.RLock()
        self._writer = None if path is None else RetryingJsonlWriter[Span](path)
        self._buffer: list[Span] = []
        self._open: dict[int, tuple[str, float, dict[str, Any]]] = {}
        self._opened = 0
        self._flushed_at = self._clock.monotonic()
        self._closed = False

    def now(self) -> float:
        """Monotonic seconds, for `record`."""
        return self._clock.monotonic()

    def unix(self, moment: float) -> float:
        """Convert a reading of `now` to Unix time."""
        return moment + self._offset

    @contextmanager
    def span(self, kind: SpanKind | str, **args: Any) -> Iterator[None]:
        """Record the time inside the block, even if it raises. Raises ValueError for odd kinds."""
        name, args = _checked(kind, args)
        with self._lock:
            self._opened += 1
            key = self._opened
            self._open[key] = (name, self._clock.monotonic(), args)
        try:
            yield
        finally:
            with self._lock:
                end = self._clock.monotonic()
                if key in self._open:
                    _, start, _ = self._open.pop(key)
                    self._add(name, start, end, args)

    def waiting(self, cause: str, **args: Any) -> Any:
        """Record the time inside the block as waiting for `cause`."""
        return self.span(SpanKind.WAITING, **{"for": cause}, **args)

    def record(self, kind: SpanKind | str, start: float, end: float, **args: Any) -> None:
        """Record a past span, by readings of `now`. Raises ValueError for odd kinds or times."""
        name, args = _checked(kind, args)
        if end < start:
            raise ValueError(
                f"span {name} of {self.process} ends {start - end:.6f} s before it starts"
            )
        with self._lock:
            self._add(name, start, end, args)

    def flush(self) -> None:
        """Write everything up to now, open spans included."""
        with self._lock:
            now = self._clock.monotonic()
            for key, (kind, start, args) in list(self._open.items()):
                self._open[key] = (kind, now, args)
                self._keep(kind, start, now, args)
            self._write(now)

    def close(self) -> None:
        """Write everything up to now, open spans included, and close the file. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self.flush()
            self._open.clear()
            self._closed = True
            if self._writer is not None:
                self._writer.close()

    def _add(self, kind: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._keep(kind, start, end, args)
        now = self._clock.monotonic()
        if now - self._flushed_at >= self._flush_seconds:
            self._write(now)

    def _keep(self, kind: str, start: float, end: float, args: dict[str, Any]) -> None:
        if end <= start or self._closed:
            return
        at, until = round(start + self._offset, 6), round(end + self._offset, 6)
        span = Span(kind, at, until, args)
        if self._buffer and continues(self._buffer[-1], span, self._merge_gap):
            self._buffer[-1] = join(self._buffer[-1], span)
        else:
            self._buffer.append(span)

    def _write(self, now: float) -> None:
        self._flushed_at = now
        pieces, self._buffer = self._buffer, []
        if self._writer is not None:
            self._writer.append(*pieces)
        if self._observe is not None:
            for piece in pieces:
                self._observe(piece)


def _checked(kind: SpanKind | str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        name = SpanKind(kind).value
    except ValueError:
        known = ", ".join(one.value for one in SpanKind)
        raise ValueError(f"unknown kind of span {kind!r}; use one of {known}") from None
    if name == SpanKind.WAITING and not args.get("for"):
        raise ValueError("a waiting span needs a cause: timeline.waiting('weights')")
    return name, args
