"""An agent's connection to a controller, and why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from asyncrl.launch.agents.config import host_and_port
from wire import Line
from wire.keys import LineKeys
from wire.messages import to_agent

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class AgentLine(Line[to_agent.ToAgent]):
    """A `Line` that knows how far its connection came. Make it within the event loop."""

    def __init__(self, controller: str, keys: LineKeys) -> None:
        super().__init__("", keys, to_agent.ToAgent)
        self._host, self._port = host_and_port(controller)
        self._is_connected = False
        self.refused = 0
        """Connections in a row that the other end closed before it had proved that it has the same
        secret."""
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
        if self.refused:
            return (
                "something listens there, and does not have the same secret: compare the file of "
                "--key-file with launcher.agents.key_file, or another program has the port"
            )
        try:
            await asyncio.get_running_loop().getaddrinfo(self._host.strip("[]"), self._port)
        except socket.gaierror as error:
            return f"the host {self._host} is not known ({error.strerror})"
        return "nothing listens there, or it cannot be reached"

    def close(self) -> None:
        """Close the socket; what is queued is still sent for at most a second."""
        self._watching.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._events.close(linger=0)
        super().close()
