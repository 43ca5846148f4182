"""An agent: joins a controller, carries out its orders, and leaves on request.

join      sends Hello every second until it is welcomed, without a limit; reports problems
serve     consumes: orders. produces: its state, every second and when something changes.
          waits for: the controller. bounded by: `lost_seconds`; then its children are ended
leave     after SIGTERM: the controller takes its child out of the run, within the grace period

An agent that is unknown to a controller ends its children and says hello again.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from asyncrl.config.launcher import host_and_port
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.health import Health, beat_of
from asyncrl.launch.agents.hosting import Hosting, Ports
from asyncrl.launch.agents.secret import HUB
from asyncrl.launch.gpus import find_gpus, torch_build
from asyncrl.launch.node_child import Place, code_version, node_facts
from asyncrl.launch.placement import VISIBLE, select_gpus
from asyncrl.wire import Line, RunKey
from asyncrl.wire.messages import from_agent, to_agent
from asyncrl.wire.transport.keys import LineKeys


def count_gpus() -> int:
    """Count the GPUs that CUDA_VISIBLE_DEVICES leaves; 0 with a CPU build. Raises UserError."""
    if torch_build().cuda is None:
        return 0
    return len(select_gpus(find_gpus(), os.environ.get(VISIBLE), None))


_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OPENED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_EVENTS = _OPENED | _FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_GREETING_SECONDS = 2.0


class AgentLine(Line[to_agent.ToAgent]):
    """A `Line` that records the progress of its connection. Create it within the event loop."""

    def __init__(self, controller: str, keys: LineKeys) -> None:
        super().__init__("", keys, to_agent.ToAgent)
        self._made_with = controller, keys
        self._host, self._port = host_and_port(controller)
        self._is_connected = False
        self.refused = 0
        """Consecutive connections that the other end closed before it had proved the same secret.
        A proxy without a running backend does that too: see `is_a_hub`."""
        self.refused_before: int | None = None
        """Those refused before a controller was seen there; None if none was seen."""
        endpoint = f"inproc://agent-{id(self)}"
        self._socket.monitor(endpoint, _EVENTS)
        self._events = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._events.connect(endpoint)
        self._watching = asyncio.create_task(self._watch())
        self.move_to(f"tcp://{controller}")

    async def _watch(self) -> None:
        is_open = False
        while True:
            event = (await recv_monitor_message(self._events))["event"]
            if event == zmq.EVENT_CONNECTED:
                is_open = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected, self.refused, is_open = True, 0, False
            elif event & _FAILED or (event == zmq.EVENT_DISCONNECTED and is_open):
                self.refused += is_open
                self._is_connected = is_open = False
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_connected = False

    async def trouble(self) -> str:
        """Return the reason why no messages arrive."""
        if self._is_connected:
            return "the connection is open, but nothing answers"
        if self.refused and await self.is_a_hub():
            return (
                "something listens there, and does not have the same secret: compare the file of "
                "--key-file with launcher.agents.key_file"
            )
        if self.refused:
            return (
                "connections are accepted there and closed: by a proxy (Docker, ssh -L, a mesh) "
                "until the controller is up, or by another program that has the port"
            )
        try:
            loop = asyncio.get_running_loop()
            await loop.getaddrinfo(self._host, self._port, family=socket.AF_INET)
        except socket.gaierror as error:
            return f"the host {self._host} is unknown, or lacks an IPv4 address ({error.strerror})"
        return "nothing listens there, or it cannot be reached"

    async def is_refused(self, times: int) -> bool:
        """Return True if a controller, not a proxy before its start, has refused this often."""
        refused = self.refused
        if refused < times or not await self.is_a_hub():
            self.refused_before = None
        elif self.refused_before is None:
            self.refused_before = refused
        return self.refused_before is not None and refused >= self.refused_before + times

    async def is_a_hub(self) -> bool:
        """Return True if the listener speaks ZeroMQ: it sends its signature first."""
        writer = None
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                return (await reader.readexactly(10))[::9] == b"\xff\x7f"
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False
        finally:
            if writer is not None:
                writer.transport.abort()

    def connected_again(self) -> "AgentLine":
        """Replace this line by a new one to the same controller; the counts are kept."""
        self.close()
        line = AgentLine(*self._made_with)
        line.refused, line.refused_before = self.refused, self.refused_before
        return line

    def close(self) -> None:
        """Close the socket; queued messages are still sent for at most a second."""
        self._watching.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._events.close(linger=0)
        super().close()


logger = logging.getLogger("asyncrl.agent")

NODE_VARIABLE = "ASYNCRL_AGENT_NODE"
"""Environment variable with the name of its node, if the starter knows one (Ray does): agents of
one node share a relay, even with `relays: always`."""
BEAT_SECONDS = 1.0
AGAIN_SECONDS = 10.0
SAY_SECONDS = 60.0
REFUSED = 5
"""Consecutive connections that may fail because the secrets differ."""
LAST_FILES_SECONDS = 4.0
"""Time for copying the last lines of a child's files before its relay ends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings of an agent."""

    controller: str
    role: str
    secret: RunKey
    name: str = ""
    """Empty: the host's."""
    node: str = ""
    """See NODE_VARIABLE; empty: the agent's name."""
    runs: Path | None = None
    """The local folder that holds the run's folder; None: the path is the controller's."""
    advertise: str = ""
    """Host under which other machines reach this one; empty: as the controller sees it."""
    ports: str = ""
    metrics_port: int | None = None
    """Port of the trainer or generator; the relay has the next one. None: any free one."""
    gpus: int = 0
    grace_seconds: float = 600.0
    once: bool = False


@contextlib.contextmanager
def signals_handled(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle` at SIGTERM and SIGINT inside the block."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Agent:
    """One agent. Use once: `await agent.run()`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ports = Ports(settings.ports)
        self._host = host_and_port(settings.controller)[0]
        name = settings.name or socket.gethostname()
        self._keys: LineKeys = settings.secret.line(HUB, f"{name}-{secrets.token_hex(3)}")
        self._node = settings.node or self._keys.name
        self._code = code_version()
        self._ip = ""
        self._run = ""
        self._session = ""
        self._facts = ""
        self._lost_seconds = float("inf")  # until the controller says
        self._heard = time.monotonic()
        self._note = ""
        self._leave_at: float | None = None
        self._signals = 0
        self._over: str | None = None
        self._silent: float | None = None
        """Seconds for which the controller was silent when it was given up."""
        self._late: list[str] = []
        self._changed: asyncio.Event
        self._hosting: Hosting
        self._line: AgentLine

    @property
    def name(self) -> str:
        """Name under which the controller knows it."""
        return self._keys.name

    async def run(self, health: Health | None = None) -> None:
        """Join controllers and serve them, one after the other, until a signal.

        `health` reports that this loop turns and that the child can take work. Raises UserError if
        the controller refuses this agent or has another secret, AsyncrlError if its child is late.
        """
        self._changed = asyncio.Event()
        self._hosting = Hosting(self._place, self._ports, self._changed.set)
        settings = self._settings
        logger.info(
            "agent %s: role %s, %d GPU(s), for a controller at %s",
            self.name, settings.role, settings.gpus, settings.controller,
        )  # fmt: skip
        self._line = AgentLine(settings.controller, self._keys)
        end_beat = beat_of(health, lambda: self._hosting.is_ready)
        try:
            with signals_handled(self._told_to_end):
                while not self._is_leaving or self._hosting.work:
                    if not await self._join():
                        break
                    await self._serve()
                    if self._is_leaving:
                        break
                    await self._hosting.end_all()
                    self._hosting.forget()
                    if settings.once and (self._over is not None or self._silent is not None):
                        break
                    self._session = ""
        finally:
            await self._hosting.end_all(by_force=bool(self._late))
            if self._session:
                await self._tell()
            self._line.close()
            end_beat()
        if settings.once and self._silent is not None and not self._is_leaving:
            raise AsyncrlError(
                f"the controller of run {self._run} was silent for {self._silent:.0f} s, so this "
                "agent ends with the run (--once)"
            )
        if self._late:
            raise AsyncrlError(
                f"{', '.join(self._late)} did not leave within {settings.grace_seconds:g} s "
                "(--grace) and was killed; its work is generated again, or trained again from the "
                "newest checkpoint"
            )

    @property
    def _is_leaving(self) -> bool:
        return self._leave_at is not None

    def _told_to_end(self) -> None:
        """Let the child leave at the first signal, end it at once at the second."""
        self._signals += 1
        grace = self._settings.grace_seconds if self._signals == 1 else 0.0
        self._leave_at = time.monotonic() + grace
        if self._hosting.work and grace:
            logger.info(
                "ending: %s leaves the run, within %.0f s",
                ", ".join(self._hosting.work), grace,
            )  # fmt: skip
        self._changed.set()

    def _place(self, spec: dict[str, object]) -> Place:
        settings = self._settings
        port = str(spec["control_address"]).rpartition(":")[2]
        changes: dict[str, object] = {
            "control_address": f"tcp://{self._host}:{port}",
            "advertised": settings.advertise,
        }
        if settings.metrics_port is not None:
            changes["metrics_port"] = settings.metrics_port + (spec["role"] == "relay")
        ip = "0.0.0.0" if settings.advertise else self._ip  # noqa: S104 - with keys
        run = "" if settings.runs is None else str((settings.runs / self._run).absolute())
        return Place(self._node, ip, changes, run)

    async def _join(self) -> bool:
        """Say hello until welcomed; False if a signal ends this agent first. Raises UserError."""
        attempts, began, said, trouble = 0, time.monotonic(), float("-inf"), ""
        self._over, self._silent, beginning = None, None, secrets.token_hex(4)
        while not self._is_leaving:
            now = time.monotonic()
            attempts += 1
            # The line queues it for a controller that is not up yet, which takes the first one of
            # each `beginning`; so nothing is sent before our address is known, and a new address
            # needs a new beginning.
            if ip := await asyncio.to_thread(_own_address, self._settings.controller):
                if self._ip not in ("", ip):
                    beginning = secrets.token_hex(4)
                self._ip = ip
                await self._line.send(_hello(self._settings, ip, self._code, beginning))
            if await self._is_welcome():
                return True
            if await self._line.is_refused(REFUSED):
                raise UserError(f"{self._settings.controller}: {await self._line.trouble()}")
            found = await self._line.trouble() if attempts % 3 == 0 else trouble
            if found != trouble or (found and now - said > SAY_SECONDS):
                trouble, said = found, now
                logger.info(
                    "no controller at %s after %d attempts in %.0f s: %s; trying every second",
                    self._settings.controller, attempts, now - began, found,
                )  # fmt: skip
            if attempts % int(AGAIN_SECONDS / BEAT_SECONDS) == 0:
                self._line = self._line.connected_again()
            self._hosting.reap()
        return False

    async def _is_welcome(self) -> bool:
        """Return True if the controller answers within a second. Raises as `_join`."""
        until = time.monotonic() + BEAT_SECONDS
        while (left := until - time.monotonic()) > 0 and not self._is_leaving:
            message = await self._hear(left)
            if isinstance(message, to_agent.Refused):
                raise UserError(f"the controller refuses this agent: {message.reason}")
            if isinstance(message, to_agent.Welcome):
                await self._welcomed(message)
                return True
        return False

    async def _hear(self, seconds: float) -> to_agent.ToAgent | None:
        """Return the next message, or None after this long, or as soon as something has changed."""
        order = asyncio.create_task(self._line.receive())
        news = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((order, news), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._changed.clear()
            return order.result() if order.done() else None
        finally:
            order.cancel()
            news.cancel()

    async def _welcomed(self, message: to_agent.Welcome) -> None:
        self._session, self._run = message.session, message.run
        self._lost_seconds, self._heard, self._note = message.lost_seconds, time.monotonic(), ""
        question = json.loads(message.question)
        if self._settings.runs is not None:
            token = Path(question["token_file"])
            question["token_file"] = str(self._settings.runs / self._run / token.name)
        facts = await asyncio.to_thread(node_facts, question)
        self._facts = json.dumps(facts | {"id": self._node})
        logger.info("joined run %s", self._run)

    async def _serve(self) -> None:
        sent = float("-inf")
        while True:
            now = time.monotonic()
            if self._is_leaving and not self._hosting.work:
                await self._last_files()
                await self._tell()
                logger.info("left run %s", self._run)
                return
            if self._leave_at is not None and now > self._leave_at:
                self._late = self._hosting.work
                logger.warning("%s did not leave in time", ", ".join(self._late))
                return
            if now - self._heard > self._lost_seconds:
                self._silent = now - self._heard
                logger.warning("the controller was silent for %.0f s", self._silent)
                self._line = self._line.connected_again()
                return
            if now - sent >= BEAT_SECONDS or self._changed.is_set():
                sent = now
                await self._tell()
            message = await self._hear(BEAT_SECONDS)
            if message is None:
                self._hosting.reap()
            elif isinstance(message, to_agent.Orders) and message.session == self._session:
                self._heard = time.monotonic()
                self._hosting.obey(message)
                if message.note and message.note != self._note:
                    logger.info("waiting: %s", message.note)
                self._note = message.note
            elif isinstance(message, to_agent.Over) and message.session == self._session:
                self._over = message.text
                logger.info("%s", message.text)
                return
            elif (
                isinstance(message, to_agent.Orders | to_agent.Welcome)
                and message.session != self._session
            ):
                logger.info("the controller has given up this agent, or was restarted")
                return

    async def _tell(self) -> None:
        left = None if self._leave_at is None else max(0.0, self._leave_at - time.monotonic())
        hosted = self._hosting.processes
        await self._line.send(from_agent.State(self._session, self._facts, hosted, left))

    async def _last_files(self) -> None:
        """Wait while a relay here serves the last lines of its departed child's files."""
        if any(one.code is None for one in self._hosting.processes):
            await asyncio.sleep(LAST_FILES_SECONDS)


def _hello(settings: Settings, ip: str, code: str, beginning: str) -> from_agent.Hello:
    python, address = "{}.{}".format(*sys.version_info), settings.advertise or ip
    host = socket.gethostname()
    return from_agent.Hello(settings.role, host, address, settings.gpus, python, code, beginning)


def _own_address(controller: str) -> str:
    """Return this machine's address on the route to the controller; empty if unknown yet."""
    host, port = host_and_port(controller)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
