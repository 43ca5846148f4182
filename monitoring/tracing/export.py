"""Sends spans to an OpenTelemetry collector (OTLP over HTTP), from a separate thread.

A full queue drops spans, which are counted; the thread makes one request at a time, of at most
EXPORT_SECONDS. So a collector that is dead or slow costs spans and nothing else.
"""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from asyncrl.monitoring.tracing.tracer import TraceSpan

logger = logging.getLogger("asyncrl.tracing")

BATCH_SECONDS = 1.0
"""A span leaves after this time at the latest, if the collector keeps up."""
BATCH_SPANS = 512
EXPORT_SECONDS = 5.0
"""Time limit for one request, its repetitions included."""
CLOSE_SECONDS = 2.0

_REASON_CHARACTERS = 300

Outcome = Literal["sent", "dropped"]


class SpanExport:
    """Sends spans to the URL `endpoint`, with at most `queued` waiting.

    `resource` identifies the process; `count` gets outcomes and numbers of spans, from any thread.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        queued: int,
        resource: Mapping[str, str],
        count: Callable[[Outcome, int], None],
    ) -> None:
        self._endpoint = endpoint
        self._count = count
        self._queue: queue.Queue[TraceSpan | None] = queue.Queue(queued)
        self._convert = _Converter(resource)
        self._words = _FirstWords()
        self._exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        self._is_broken = False
        self._ends: float | None = None
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, span: TraceSpan) -> None:
        """Queue a span; dropped if too many wait."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._count("dropped", 1)

    def close(self) -> None:
        """Send the queue, for at most `CLOSE_SECONDS`; skip it if the collector did not answer."""
        if self._ends is not None:
            return
        self._ends = time.monotonic() + (0.0 if self._is_broken else CLOSE_SECONDS)
        with contextlib.suppress(queue.Full):  # then the thread is not waiting for more
            self._queue.put_nowait(None)
        self._thread.join(max(0.0, self._ends - time.monotonic()))
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while self._ends is None or not self._queue.empty():
            if self._ends is not None and time.monotonic() > self._ends:
                return
            batch = self._batch()
            if batch:
                self._send(batch)

    def _batch(self) -> list[TraceSpan]:
        batch: list[TraceSpan] = []
        due = time.monotonic() + BATCH_SECONDS
        while len(batch) < BATCH_SPANS:
            try:
                span = self._queue.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                break
            if span is None:
                break
            batch.append(span)
        return batch

    def _send(self, batch: list[TraceSpan]) -> None:
        sent = False
        self._words.first = ""
        try:
            sent = self._exporter.export(self._convert(batch)) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - whatever fails here, training continues
            self._words.first = f"{type(error).__name__}: {error}"
        self._count("sent" if sent else "dropped", len(batch))
        if sent == self._is_broken and self._ends is None:
            self._is_broken = not sent
            if sent:
                logger.info("%s accepts traces again", self._endpoint)
            else:
                logger.warning(
                    "%s does not accept traces: %s. They are dropped and counted in "
                    "asyncrl_trace_spans_total; training continues",
                    self._endpoint,
                    self._words.first or "no reason given",
                )


class _FirstWords(logging.Handler):
    """Captures the first message of the exporter's log for a batch, which names the cause."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        root = logging.getLogger("opentelemetry")
        root.addHandler(self)
        root.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Note the message."""
        self.first = self.first or record.getMessage()[:_REASON_CHARACTERS]


class _Converter(SpanProcessor):
    """Converts spans to the SDK's, through its tracer. Used from one thread."""

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._ids = _Ids()
        about = Resource.create(dict(resource))
        provider = TracerProvider(ALWAYS_ON, about, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("asyncrl")
        self._ended: list[ReadableSpan] = []

    def __call__(self, batch: list[TraceSpan]) -> list[ReadableSpan]:
        for span in batch:
            self._add(span)
        ended, self._ended = self._ended, []
        return ended

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span that the SDK has made."""
        self._ended.append(span)

    def _add(self, span: TraceSpan) -> None:
        self._ids.trace, self._ids.span = span.trace, span.id
        context = None
        if span.parent is not None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            of = SpanContext(span.trace, span.parent, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(of))
        start, attributes = _nanoseconds(span.start), dict(span.attributes)
        made = self._tracer.start_span(span.name, context, attributes=attributes, start_time=start)
        for name, moment, more in span.events:
            made.add_event(name, dict(more), _nanoseconds(moment))
        if span.failure:
            made.set_status(Status(StatusCode.ERROR, span.failure))
        made.end(_nanoseconds(span.end))


class _Ids(IdGenerator):
    trace = 0
    span: int | None = None

    def generate_span_id(self) -> int:
        return self.span or secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.trace

    def is_trace_id_random(self) -> bool:
        """Return True: traces have the bits of a hash."""
        return True


def _nanoseconds(moment: float) -> int:
    return int(moment * 1e9)
