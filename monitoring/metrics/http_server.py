"""A small HTTP server for one WSGI application, on a port that may receive anything.

Everything but a plain HTTP/1 request gets 400, without a message. The head of a request is limited
in size and time, and connections in number, so a scanner or a slow client takes a bounded number of
threads. On a loopback address, a request whose `Host` is another machine's name is refused: a site
whose name points to 127.0.0.1 (DNS rebinding) would reach servers on loopback.
"""

from __future__ import annotations

import contextlib
import http
import logging
import re
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from asyncrl.monitoring.config import is_loopback


def means_this_machine(host: str) -> bool:
    """Return True if a Host header is a loopback address or `localhost`, with any port.

    >>> means_this_machine("localhost:9100"), means_this_machine("127.0.0.1.example.org")
    (True, False)
    """
    try:
        return is_loopback((urlsplit(f"//{host}").hostname or "").lower())
    except ValueError:
        return False


log = logging.getLogger(__name__)

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

MAX_HEAD_BYTES = 16_384
MAX_CONNECTIONS = 32
"""Most connections at once; further ones get 503."""
REQUEST_SECONDS = 5.0
"""Time limit for a request's head to arrive, and for its answer to be read."""

_END = re.compile(rb"\r?\n\r?\n")
_REQUEST_LINE = re.compile(rb"(GET|HEAD|OPTIONS) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves `application` on `host:port`; port 0 takes any free one. Raises OSError."""

    daemon_threads = True
    block_on_close = False  # a connection's thread ends by its own deadline
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, application: Application) -> None:
        family, address = _resolve(host, port)
        self.address_family = family
        self.application = application
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Connection)
        self._is_loopback = is_loopback(str(self.server_address[0]))

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self.server_address[1])

    def shutdown(self) -> None:
        """End `serve_forever` at once: on its own it checks twice a second."""
        with contextlib.suppress(OSError):  # some systems cannot shut down a listening socket
            self.socket.shutdown(socket.SHUT_RDWR)
        super().shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a separate thread, or with 503 if there are too many."""
        if not self._places.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_response(http.HTTPStatus.SERVICE_UNAVAILABLE, [], b"", head=False))
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def answer(self, environ: dict[str, Any] | None) -> bytes:
        """Answer a request; None could not be read."""
        if environ is None:
            return _BAD_REQUEST
        host = environ.get("HTTP_HOST")
        if self._is_loopback and host is not None and not means_this_machine(host):
            return _WRONG_HOST
        return _answer(self.application, environ)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection's error; the default prints a traceback."""
        del request
        log.debug("the connection from %s ended", client_address, exc_info=sys.exc_info())


class _Connection(socketserver.BaseRequestHandler):
    """Serves one request, then closes the connection."""

    server: MetricsServer

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or too slow
            answer = self.server.answer(_parse(self._head()))
            self.request.settimeout(REQUEST_SECONDS)
            self.request.sendall(answer)

    def _head(self) -> bytes:
        """Read up to the empty line; incomplete if it is too long or the client stops."""
        received = b""
        deadline = time.monotonic() + REQUEST_SECONDS
        while len(received) < MAX_HEAD_BYTES and not _END.search(received):
            self.request.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = self.request.recv(4096)
            if not chunk:
                break
            received += chunk
        return received


def _parse(head: bytes) -> dict[str, Any] | None:
    """Build the WSGI environment; None unless this is an HTTP/1 request for a resource."""
    end = _END.search(head)
    if end is None:
        return None
    first, *lines = re.split(rb"\r?\n", head[: end.start()])
    request = _REQUEST_LINE.fullmatch(first)
    headers = [_HEADER.fullmatch(line) for line in lines]
    if request is None:
        return None
    path, _, query = request[2].decode().partition("?")
    environ = {
        "REQUEST_METHOD": request[1].decode(),
        "PATH_INFO": urllib.parse.unquote(path, errors="replace"),
        "QUERY_STRING": query,
    }
    for header in headers:
        if header is None:
            return None
        environ["HTTP_" + header[1].decode().upper().replace("-", "_")] = header[2].decode("latin1")
    return environ


def _answer(application: Application, environ: dict[str, Any]) -> bytes:
    started: list[tuple[str, list[tuple[str, str]]]] = []
    body = b"".join(application(environ, lambda *arguments: started.append(arguments[:2])))
    status, headers = started[0]
    code = http.HTTPStatus(int(status.partition(" ")[0]))
    return _response(code, headers, body, head=environ["REQUEST_METHOD"] == "HEAD")


def _response(
    status: http.HTTPStatus, headers: list[tuple[str, str]], body: bytes, *, head: bool
) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *(f"{name}: {value}" for name, value in headers),
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin1") + (b"" if head else body)


def _refusal(status: http.HTTPStatus, why: str) -> bytes:
    kind = [("Content-Type", "text/plain; charset=utf-8")]
    return _response(status, kind, f"{why}\n".encode(), head=False)


_BAD_REQUEST = _refusal(
    http.HTTPStatus.BAD_REQUEST, "This port serves Prometheus metrics: GET /metrics"
)
_WRONG_HOST = _refusal(
    http.HTTPStatus.FORBIDDEN,
    "The Host header is not a name of this machine; ask 127.0.0.1 or localhost",
)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0][0], found[0][4]
