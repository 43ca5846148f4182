"""A collector of traces: OTLP over HTTP, the real protobuf."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Event(NamedTuple):
    name: str
    time: float
    attributes: dict[str, Any]


class Span(NamedTuple):
    process: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: float
    end: float
    attributes: dict[str, Any]
    events: list[Event]
    failure: str

    @property
    def group(self) -> int:
        return int(self.attributes["asyncrl.group"])

    @property
    def sample(self) -> int | None:
        return self.attributes.get("asyncrl.sample")


class Collector:
    """What was received. `hold` lets requests wait until `release`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.requests = 0
        self.answer = 200
        self._open = threading.Event()
        self._open.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                collector._open.wait(120)
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                if collector.answer == 200:
                    collector.spans += decoded(body)
                reply = ExportTraceServiceResponse().SerializeToString()
                with contextlib.suppress(OSError):  # the sender has given up
                    self.send_response(collector.answer)
                    self.send_header("Content-Length", str(len(reply)))
                    self.end_headers()
                    self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def kill(self) -> None:
        """Nobody listens any more."""
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.kill()


def decoded(body: bytes) -> list[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            values(of_process.resource.attributes)["asyncrl.process"],
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            values(span.attributes),
            [Event(e.name, e.time_unix_nano / 1e9, values(e.attributes)) for e in span.events],
            span.status.message,
        )
        for of_process in request.resource_spans
        for scope in of_process.scope_spans
        for span in scope.spans
    ]


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
