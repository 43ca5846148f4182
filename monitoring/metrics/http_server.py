"""Serves one WSGI application by threads, on a port that may be sent anything.

It bounds the number of connections and their time, so that a scanner or a slow client takes a
bounded number of threads, and it writes nothing to the terminal. On a loopback address, a request
for another machine's name is refused: a site whose name was made to point to 127.0.0.1 (DNS
rebinding) reaches servers on loopback, and still sends its own name as `Host`.
"""

import contextlib
import errno
import io
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TextIO
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from asyncrl.monitoring.config import is_loopback

log = logging.getLogger(__name__)

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]
"""A WSGI application."""

MAX_CONNECTIONS = 32
"""Most connections at once; further ones are closed."""
CONNECTION_SECONDS = 10.0
"""Longest life of a connection; Prometheus gives up earlier."""
METHODS = ("GET", "HEAD", "OPTIONS")


def means_this_machine(host: str) -> bool:
    """Return True if a Host header is a loopback address or `localhost`, with any port."""
    try:
        return is_loopback((urlsplit(f"//{host}").hostname or "").lower())
    except ValueError:
        return False


def is_free(host: str, port: int) -> bool:
    """Return False if another program listens on `host:port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As in a run, recently closed connections do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves `application` on `host:port`; port 0 takes any free one. Raises OSError."""

    daemon_threads = True
    block_on_close = False  # a connection's thread ends by its own deadline
    request_queue_size = 64

    def __init__(self, host: str, port: int, application: Application) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._deadlines: dict[Any, float] = {}
        """Deadline of each open connection, by its socket."""
        super().__init__(address, _Connection)  # type: ignore[arg-type]
        here = is_loopback(self.server_name)
        self.set_app(_asked_as_this_machine(application) if here else application)

    def server_bind(self) -> None:
        """Bind the address, without HTTPServer's DNS lookup of this machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.server_port

    def shutdown(self) -> None:
        """End `serve_forever` at once: on its own it checks twice a second."""
        with contextlib.suppress(OSError):  # some systems cannot shut down a listening socket
            self.socket.shutdown(socket.SHUT_RDWR)
        super().shutdown()

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Return True if one more connection fits."""
        if len(self._deadlines) >= MAX_CONNECTIONS:
            return False
        self._deadlines[request] = time.monotonic() + CONNECTION_SECONDS
        return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its place."""
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Shut down the connections whose time is up."""
        now = time.monotonic()
        for request, deadline in self._deadlines.copy().items():
            if deadline < now:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log a connection's error; the default prints a traceback."""
        log.debug("the connection from %s ended", client_address, exc_info=sys.exc_info())


class _Connection(WSGIRequestHandler):
    """Reads one request, writes its answer, and nothing to the terminal."""

    default_request_version = "HTTP/1.0"  # so that an unreadable request gets a status line

    def parse_request(self) -> bool:
        """Refuse malformed headers with 400, and other methods than `METHODS` with 405."""
        if not super().parse_request():
            return False
        if self.headers.defects:
            self.send_error(400, "Malformed header")
        elif self.command not in METHODS:
            self.send_response(405)
            self.send_header("Allow", ", ".join(METHODS))
            self.end_headers()
        else:
            return True
        return False

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Log nothing."""

    def get_stderr(self) -> TextIO:
        """Discard the traceback of an application that raised."""
        return io.StringIO()


def _asked_as_this_machine(application: Application) -> Application:
    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        if host is None or means_this_machine(host):
            return application(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"The Host header is not a name of this machine; ask 127.0.0.1 or localhost\n"]

    return answer
