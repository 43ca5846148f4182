"""The half of a node that sends chunks."""

from __future__ import annotations

import logging
from typing import Protocol

import zmq

from asyncrl.wire.errors import WeightsSupersededError
from asyncrl.wire.messages.chain import Ask, Gone, Waiting
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights.chain.held import Held
from asyncrl.wire.weights.chain.pace import Pace
from asyncrl.wire.weights.chain.serving import Serving, State, Turn
from asyncrl.wire.weights.chain.sockets import ParentSocket

logger = logging.getLogger(__name__)

_ASKS, _CHUNKS = 64, 4
"""Messages that are read, and chunks that are sent, before something else gets a turn."""


class Versions(Protocol):
    """What a node can send."""

    def state(self, version: str, index: int) -> State:
        """Of a chunk."""
        ...

    def to_send(self, ask: Ask) -> tuple[Held, Held | None]:
        """The version that a chunk here belongs to, and the base for it."""
        ...


class Outlet:
    """Answers children through one socket."""

    def __init__(
        self, socket: ParentSocket, versions: Versions, pace: Pace, refusals: Refusals
    ) -> None:
        self.socket = socket
        self._versions = versions
        self._pace = pace
        self._refusals = refusals
        self._serving = Serving(versions.state)
        self.sent_bytes = 0

    def take(self, now: float) -> None:
        """Read what children ask for."""
        for _ in range(_ASKS):
            try:
                received = self.socket.receive()
            except zmq.Again:
                return
            if received is not None:
                child, ask = received
                if not self._serving.ask(child, ask, now):
                    error = FrameRefused(Reason.IMPOSSIBLE_EVENT, "it asks for too many chunks")
                    self._refusals.refuse(child, error)

    def send(self, now: float) -> float | None:
        """Send what is due; seconds until there is more, or None if children wait for this node."""
        for child, version in self._serving.lost():
            self.socket.send(child, Gone(version, "this node no longer has it"), [])
        for child, version in self._serving.kept_waiting(now):
            if not self.socket.send(child, Waiting(version), []):
                self._serving.forget(child)
        for _ in range(_CHUNKS):
            pause = self._pace.wait(now)
            if pause > 0:
                return pause
            turn = self._serving.next_chunk(now)
            if turn is None:
                return None
            self._send_chunk(turn)
        return 0.0

    def _send_chunk(self, turn: Turn) -> None:
        held, base = self._versions.to_send(turn.ask)
        try:
            chunk, parts = held.encoded(turn.ask.index, base, more=turn.more)
        except WeightsSupersededError as error:
            self.socket.send(turn.child, Gone(turn.ask.version, str(error)), [])
            return
        if not self.socket.send(turn.child, chunk, parts):
            logger.info("%s cannot be reached; its asks are forgotten", turn.child)
            self._serving.forget(turn.child)
            return
        nbytes = sum(map(len, parts))
        self._pace.sent(nbytes)
        self.sent_bytes += nbytes
