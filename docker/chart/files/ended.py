"""Answers the probes of a controller whose run has ended: it is well, and has nothing to do."""

import http.server
import signal
import sys


class Answer(http.server.BaseHTTPRequestHandler):
    """`/healthz`: 200. `/readyz`: 503."""

    def do_GET(self) -> None:
        """As `--health-port` of a controller."""
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Probes are no news."""


signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.ThreadingHTTPServer(("0.0.0.0", 5990), Answer).serve_forever()  # noqa: S104 - a pod's
