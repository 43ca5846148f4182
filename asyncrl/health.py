"""`/healthz` and `/readyz` over HTTP, for the probes of containers.

    /healthz   200 while the event loop turns, otherwise 503
    /readyz    200 when the process does its work, otherwise 503

A separate thread answers, so a loop that hangs is noticed.
"""

import asyncio
import http
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.errors import UserError
from asyncrl.monitoring.config import host_port, without_brackets
from asyncrl.monitoring.metrics.http_server import MetricsServer

BEAT_SECONDS = 1.0
LATE_SECONDS = 30.0
"""An event loop that has not turned for this long hangs: no step of a loop takes half of that."""


class Health:
    """The health endpoint of a process. Raises UserError if it cannot listen there.

    With port 0, the system chooses a free one.
    """

    def __init__(self, host: str, port: int) -> None:
        self._turned: float | None = None
        self._is_ready: Callable[[], bool] = lambda: False
        host = without_brackets(host)
        try:
            self._server = MetricsServer(host, port, self._answer)
        except OSError as error:
            raise UserError(
                f"--health-port: cannot listen at {host_port(host, port)} ({error.strerror}); "
                "another program has the port, or the host is not an address of this machine"
            ) from error
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    async def beat(self, is_ready: Callable[[], bool]) -> None:
        """Run in the watched loop until cancelled; another thread calls `is_ready`."""
        self._is_ready = is_ready
        try:
            while True:
                self._turned = time.monotonic()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._turned, self._is_ready = None, lambda: False

    @property
    def is_live(self) -> bool:
        """True unless the loop is known to hang; True before and after the loop."""
        turned = self._turned
        return turned is None or time.monotonic() - turned < LATE_SECONDS

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/healthz", "/readyz"):
            status, text = http.HTTPStatus.NOT_FOUND, "GET /healthz or /readyz"
        elif self.is_live and (path == "/healthz" or self._is_ready()):
            status, text = http.HTTPStatus.OK, "ok"
        else:
            status, text = http.HTTPStatus.SERVICE_UNAVAILABLE, "not ok"
        start(f"{status.value} {status.phrase}", [("Content-Type", "text/plain")])
        return [f"{text}\n".encode()]

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def beat_of(health: Health | None, is_ready: Callable[[], bool]) -> Callable[[], object]:
    """Begin `Health.beat` in the running loop, if `health` is given; return what ends it."""
    if health is None:
        return lambda: None
    return asyncio.create_task(health.beat(is_ready)).cancel


def ask(port: int, host: str, *, ready: bool) -> None:
    """Ask a process for its health, as a probe does. Raises UserError if it is not healthy."""
    import http.client
    import urllib.error
    import urllib.request

    path = "/readyz" if ready else "/healthz"
    url = f"http://{host_port(without_brackets(host), port)}{path}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}: not {'ready' if ready else 'live'} ({error.code})") from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url}: {getattr(error, 'reason', error)}") from error
