"""Serves a registry to Prometheus over HTTP."""

import errno
import threading
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, make_wsgi_app

from asyncrl.monitoring.config import MAX_PORT, MonitoringConfig, host_port
from asyncrl.monitoring.errors import ExporterError, PortInUse
from asyncrl.monitoring.metrics.http_server import MetricsServer, is_free

CLOSE_SECONDS = 5.0
"""Longest wait of `Exporter.close` for a running scrape."""


@dataclass(slots=True)
class Exporter:
    """A running HTTP server on its own daemon thread."""

    host: str
    port: int
    """The actual port, even if port 0 was requested."""
    _server: MetricsServer = field(repr=False)
    _thread: threading.Thread = field(repr=False)

    @property
    def url(self) -> str:
        """The address to scrape."""
        return f"http://{host_port(self.host, self.port)}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(CLOSE_SECONDS)


def start_exporter(registry: CollectorRegistry, host: str, port: int) -> Exporter:
    """Serve `registry` on `host:port`; port 0 is any free one. Raises PortInUse, ExporterError."""
    if not 0 <= port <= MAX_PORT:
        raise ExporterError(f"metrics port {port} is not between 0 and {MAX_PORT}")
    try:
        server = MetricsServer(host, port, make_wsgi_app(registry))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port) from error
        raise ExporterError(
            f"metrics cannot be served on {host_port(host, port)} ({error.strerror or error}): set "
            "`monitoring.host` to an address of this machine (127.0.0.1 serves this machine "
            "only) and `monitoring.port` to 0 or a number above 1023"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return Exporter(host, server.port, server, thread)


def exporter_for(
    config: MonitoringConfig, registry: CollectorRegistry, index: int
) -> Exporter | None:
    """Start the exporter of the index-th process if enabled. Raises PortInUse or ExporterError."""
    if not config.metrics:
        return None
    return start_exporter(registry, config.host, config.port_of(index))


def is_taken(config: MonitoringConfig, index: int) -> bool:
    """Return True if another program has the metrics port of this machine's index-th process."""
    port = config.port + index
    named = config.metrics and config.port != 0 and port <= MAX_PORT
    return named and not is_free(config.host, port)
