"""A child's end of a session, on a socket to the relay of its node.

A message is urgent if the scheduler or the trainer waits for it before a device gets work. The
sender may override the table: for the report of a finished run-ahead sample and the last delivery
of a generator.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from asyncrl.wire.errors import SessionFull, Unreachable
from asyncrl.wire.messages import from_generator, from_trainer
from asyncrl.wire.sessions.peers import EXTRA_BYTES
from asyncrl.wire.sessions.session import Session, new_session
from asyncrl.wire.sockets import LINE_BYTES, Line, error_of
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused
from asyncrl.wire.transport.keys import LineKeys
from asyncrl.wire.transport.outbox import Outbox, join, split
from asyncrl.wire.transport.refusals import Refusals

In = TypeVar("In")

WAIT: tuple[type, ...] = (
    from_generator.GeneratorReport,
    from_generator.SampleDelivered,
    from_generator.Rescored,
    from_trainer.TrainerReport,
    from_trainer.CheckpointWritten,
    from_trainer.CheckpointFailed,
)
"""Messages that wait, up to `GATHER_SECONDS`. All others are urgent."""


def is_urgent(message: msgspec.Struct) -> bool:
    """Return True if a message leaves at once."""
    return type(message) not in WAIT


class SessionEnd(Generic[In]):
    """Turns messages into frames of one session, and back. Used from one event loop.

    `transmit` passes a frame to the relay, or drops it; dropped frames are sent again.
    """

    def __init__(self, incoming: Any, *, max_bytes: int, transmit: Callable[[bytes], None]) -> None:
        self._session = Session(new_session())
        self._session.count_resent = lambda frames: self.count_resent(frames)
        self.count_resent: Callable[[int], None] = lambda _frames: None
        """Called with the number of frames that are sent again."""
        self._decoder: FrameDecoder[In] = FrameDecoder(incoming, max_bytes=max_bytes)
        self._outbox = Outbox(self._send_body)
        self._transmit = transmit
        self._urgent = False
        self._full: Unreachable | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unacknowledged(self) -> int:
        """Frames that the controller may lack."""
        return self._session.unacknowledged

    def send_soon(self, message: msgspec.Struct, *, urgent: bool | None = None) -> None:
        """Queue a message; `urgent` None: by its type. Raises Unreachable if too many wait."""
        if self._full is not None:
            raise self._full
        self._urgent |= is_urgent(message) if urgent is None else urgent
        self._outbox.add("", message)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message now, after the queued ones. Raises as `send_soon`."""
        self.send_soon(message)
        self.flush()
        if self._full is not None:
            raise self._full

    def flush(self) -> None:
        """Send what is queued."""
        self._outbox.flush()

    def _send_body(self, _peer: str, body: bytes) -> None:
        urgent, self._urgent = self._urgent, False
        try:
            frame = self._session.send(body, time.monotonic(), urgent=urgent)
        except SessionFull as error:
            self._full = Unreachable(f"the controller cannot be reached: {error}")
            return
        self._transmit(frame)
        self._arm()

    def arrived(self, frame: bytes) -> list[In]:
        """Return the new messages in a frame. Raises FrameRefused."""
        taken = self._session.take(frame, time.monotonic())
        for reply in taken.replies:
            self._transmit(reply)
        self._arm()
        return [] if taken.body is None else self._decoder.decode_all(taken.body)

    def ask(self) -> None:
        """Ask the controller to acknowledge at once."""
        for frame in self._session.probe(time.monotonic()):
            self._transmit(frame)

    def _arm(self) -> None:
        due = self._session.next_due
        if due is None or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(due, loop.time()), self._look)

    def _look(self) -> None:
        self._timer = None
        for frame in self._session.due(time.monotonic()):
            self._transmit(frame)
        self._arm()

    def close(self) -> None:
        """Send what is queued, and stop the timer."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_LAST_SECONDS = 1.0
"""Longest wait at the end for the controller to have everything."""
_ASK_SECONDS = 0.2


class SessionLine(Line[In]):
    """A `Line` that neither loses nor doubles messages while relays come and go."""

    def __init__(
        self, address: str, keys: LineKeys, incoming: Any, refusals: Refusals | None = None
    ) -> None:
        super().__init__(address, keys, incoming, refusals)
        self.session: SessionEnd[In] = SessionEnd(
            incoming, max_bytes=LINE_BYTES, transmit=self._transmit
        )

    def _transmit(self, frame: bytes) -> None:
        """Pass a frame to the relay. One that its queue does not take is sent again later."""
        error_of(self._socket.send_multipart(split(frame), flags=zmq.NOBLOCK))

    def send_soon(self, message: msgspec.Struct, *, urgent: bool | None = None) -> None:
        """See `Line.send_soon`; `urgent` as in `SessionEnd.send_soon`."""
        self.session.send_soon(message, urgent=urgent)

    async def send(self, message: msgspec.Struct) -> None:
        """See `Line.send`."""
        self.session.send(message)

    async def receive(self) -> In:
        """See `Line.receive`."""
        while not self._ready:
            self._accept(await self._socket.recv_multipart())
            if not self._ready:
                await asyncio.sleep(0)
        return self._ready.popleft()

    def _accept(self, parts: list[bytes]) -> None:
        try:
            self._ready.extend(
                self.session.arrived(join(parts, max_bytes=LINE_BYTES + EXTRA_BYTES))
            )
        except FrameRefused as error:
            self.refusals.refuse(self._address, error)

    def close(self) -> None:
        """Close the socket once the controller has everything, after a second at most."""
        self.session.close()
        ends = time.monotonic() + _LAST_SECONDS
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        while self.session.unacknowledged and time.monotonic() < ends:
            self.session.ask()
            with contextlib.suppress(zmq.ZMQError):
                if socket.poll(int(1000 * _ASK_SECONDS)):
                    self._accept(socket.recv_multipart(zmq.NOBLOCK))
        self.session.close()
        self._socket.close()
