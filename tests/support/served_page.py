"""The web page of a made-up run, served from a thread of the test, and a plain client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.monitoring.config import WebConfig
from asyncrl.web.guard import Policy
from asyncrl.web.sections import LiveSections
from asyncrl.web.server import serve_from
from asyncrl.web.serving import listen
from asyncrl.web.step_file import StepFile
from asyncrl.wire.messages import control

TOKEN = "the-token-of-this-test"


@dataclass
class FakeRun:
    """A controller that says and does what the test wants."""

    status_now: dict[str, Any] = field(default_factory=lambda: {"run": "fake", "step": 3})
    reply: control.Reply | Exception = field(default_factory=lambda: control.Accepted("done", 7))
    asked: int = 0
    orders: list[control.Request] = field(default_factory=list)
    takes_orders: bool = True

    async def status(self) -> dict[str, Any]:
        self.asked += 1
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.status_now

    async def order(self, request: control.Request) -> control.Reply:
        self.orders.append(request)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Asks a page on 127.0.0.1."""

    port: int

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, reply.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def order(self, name: str, arguments: object = None, token: str | None = TOKEN) -> Answer:
        """Give an order as the page does."""
        headers = {"Content_Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        body = json.dumps({} if arguments is None else arguments).encode()
        return self.ask("POST", f"/api/orders/{name}", body, **headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    @contextlib.contextmanager
    def snapshots(self) -> Iterator[Iterator[dict[str, Any]]]:
        """The stream of events, decoded."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/api/events")
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            yield (json.loads(line[6:]) for line in reply if line.startswith(b"data: "))


@contextlib.contextmanager
def serving(run: Path, source: Any, policy: Policy | None = None) -> Iterator[Client]:
    """Serve this folder, with this source of the status."""
    listening = listen(WebConfig())
    steps = StepFile(run / "metrics.jsonl")
    sections = LiveSections(run, steps)
    allowed = policy or Policy(is_loopback=True, token=TOKEN)
    served: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []
    begun = threading.Event()

    async def work() -> None:
        task = asyncio.create_task(serve_from(run, source, sections, steps, allowed, listening))
        served.append((asyncio.get_running_loop(), task))
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert begun.wait(60)
    try:
        yield Client(listening.getsockname()[1])
    finally:
        loop, task = served[0]
        with contextlib.suppress(RuntimeError):  # the test has ended the server
            loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        listening.close()
