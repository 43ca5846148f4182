"""The errors of monitoring.

MonitoringError
├── ExporterError    metrics cannot be served: change `monitoring.host` or `monitoring.port`
│   └── PortInUse    another process listens on the port
├── TracingError     the OpenTelemetry SDK is missing: install it or turn tracing off
├── RecordError      a file of the run cannot be read: names the file and the line
└── ReportError      the directory has nothing to make a report of
"""

from pathlib import Path


class MonitoringError(Exception):
    """Root of this package's errors."""


class ExporterError(MonitoringError):
    """Metrics cannot be served at the configured address; the message names a remedy."""


class PortInUse(ExporterError):  # noqa: N818 - names the state
    """Another process listens on the requested port."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"metrics port {port} on {host} is in use by another process. Set `monitoring.port` to "
            "a base port that is free together with the ones after it (one per process of the "
            "run), to 0 for any free ports, or `monitoring.metrics` to false."
        )


class TracingError(MonitoringError):
    """A process cannot import the OpenTelemetry SDK."""

    def __init__(self, process: str, error: ImportError) -> None:
        super().__init__(
            f"monitoring.tracing.enabled is true, but {process} cannot import the OpenTelemetry "
            f"SDK ({error}). Install it where this process runs (pip install 'asyncrl[otel]'), or "
            "set monitoring.tracing.enabled to false"
        )


class RecordError(MonitoringError):
    """A line of one of the run's files cannot be decoded."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(
            f"{path}, line {line}: {reason}. Another version of asyncrl wrote it, something else "
            "changed it, or the disk is faulty; remove that line to read the rest."
        )
        self.line = line
        self.reason = reason


class ReportError(MonitoringError):
    """No report can be written; the message names the directory and what it lacks."""
