"""An agent's connection to a controller, and why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from asyncrl.config.agents import host_and_port
from asyncrl.wire import Line
from asyncrl.wire.messages import to_agent
from asyncrl.wire.transport.keys import LineKeys

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
_GREETING_SECONDS = 2.0
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class AgentLine(Line[to_agent.ToAgent]):
    """A `Line` that knows how far its connection came. Make it within the event loop."""

    def __init__(self, controller: str, keys: LineKeys) -> None:
        super().__init__("", keys, to_agent.ToAgent)
        self._made_with = controller, keys
        self._host, self._port = host_and_port(controller)
        self._is_connected = False
        self.refused = 0
        """Connections in a row that the other end closed before it had proved that it has the same
        secret. A proxy does that too, as long as there is nobody behind it: see `is_a_hub`."""
        self.refused_before: int | None = None
        """How many of them were refused before a controller was seen there; None: none was."""
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
            elif event in _FAILED or (event == zmq.EVENT_DISCONNECTED and is_open):
                self.refused += is_open
                self._is_connected = is_open = False
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_connected = False

    async def trouble(self) -> str:
        """Why nothing is heard."""
        if self._is_connected:
            return "it is connected, and gets no answer"
        if self.refused and await self.is_a_hub():
            return (
                "something listens there, and does not have the same secret: compare the file of "
                "--key-file with launcher.agents.key_file"
            )
        if self.refused:
            return (
                "connections are accepted there and closed: by a proxy (Docker, ssh -L, a mesh) as "
                "long as the controller is not up, or by another program that has the port"
            )
        try:
            loop = asyncio.get_running_loop()
            await loop.getaddrinfo(self._host, self._port, family=socket.AF_INET)
        except socket.gaierror as error:
            return f"the host {self._host} is not known, or has no IPv4 address ({error.strerror})"
        return "nothing listens there, or it cannot be reached"

    async def is_refused(self, times: int) -> bool:
        """Whether a controller, and not a proxy before it was there, has refused so many times."""
        refused = self.refused
        if refused < times or not await self.is_a_hub():
            self.refused_before = None
        elif self.refused_before is None:
            self.refused_before = refused
        return self.refused_before is not None and refused >= self.refused_before + times

    async def is_a_hub(self) -> bool:
        """Whether what listens there speaks ZeroMQ: it sends its signature without being asked."""
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

    def connected_again(self) -> AgentLine:
        """Close this one; another one to the same controller, which knows what was refused."""
        self.close()
        line = AgentLine(*self._made_with)
        line.refused, line.refused_before = self.refused, self.refused_before
        return line

    def close(self) -> None:
        """Close the socket; what is queued is still sent for at most a second."""
        self._watching.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._events.close(linger=0)
        super().close()
