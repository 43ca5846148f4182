"""Traces of groups of samples, from the draw of the prompt to the optimizer step.

`export` alone imports the OpenTelemetry SDK, and only if `monitoring.tracing.enabled` is set.
"""

import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack

from asyncrl.monitoring.config import TracingConfig
from asyncrl.monitoring.errors import TracingError
from asyncrl.monitoring.metrics.process_metrics import ProcessMetrics
from asyncrl.monitoring.tracing.tracer import TraceIds, Tracer


def open_tracer(
    config: TracingConfig,
    closing: ExitStack | AsyncExitStack,
    *,
    key: str,
    run: str,
    process: str,
    metrics: ProcessMetrics,
    unix: Callable[[float], float],
) -> Tracer:
    """Open a tracer that sends to the configured collector; `closing` ends it.

    `key` and `unix` as in `TraceIds` and `Tracer`. Raises TracingError if the SDK is missing.
    """
    try:
        from asyncrl.monitoring.tracing.export import SpanExport
    except ImportError as error:
        raise TracingError(process, error) from error
    resource = {
        "service.name": "asyncrl",
        "service.instance.id": f"{run}/{process}",
        "asyncrl.run": run,
        "asyncrl.process": process,
        "host.name": socket.gethostname(),
    }
    export = SpanExport(
        config.traces_url,
        queued=config.queue_spans,
        resource=resource,
        count=lambda outcome, spans: metrics.trace_spans.of(outcome).inc(spans),
    )
    closing.callback(export.close)
    return Tracer(TraceIds(key, config.sample_rate), export, unix)
