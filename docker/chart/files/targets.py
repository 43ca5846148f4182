"""Serves the list of a run's processes for Prometheus's HTTP discovery: targets.py RUN.

The run keeps it in /work/runs/prometheus-RUN.json. The controller calls itself by its host name
there, which other pods cannot look up; its pod's address takes that place.
"""

import http.server
import json
import os
import pathlib
import signal
import socket
import sys

LIST = pathlib.Path("/work/runs") / f"prometheus-{sys.argv[1]}.json"


def targets() -> list[dict[str, object]]:
    """One group for each process; empty while there is no run."""
    try:
        groups = json.loads(LIST.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    for group in groups:
        for number, address in enumerate(group["targets"]):
            host, _, port = address.rpartition(":")
            if host in (socket.gethostname(), "127.0.0.1"):
                group["targets"][number] = f"{os.environ['POD_IP']}:{port}"
    return groups


class Answer(http.server.BaseHTTPRequestHandler):
    """`GET /targets`."""

    def do_GET(self) -> None:
        """As Prometheus asks."""
        if self.path != "/targets":
            self.send_error(404, "GET /targets")
            return
        body = json.dumps(targets()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Once in 15 seconds is no news."""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    http.server.ThreadingHTTPServer(("0.0.0.0", 9099), Answer).serve_forever()  # noqa: S104
