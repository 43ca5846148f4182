"""A child's end of a session, and the messages that may wait in its relay.

A message is urgent if the scheduler or the trainer waits for it before a device gets work. The
sender may override the table: for the report of a finished run-ahead sample and the last delivery
of a generator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.wire.errors import SessionFull, Unreachable
from asyncrl.wire.messages import from_generator, from_trainer
from asyncrl.wire.sessions.session import Session, new_session
from asyncrl.wire.transport.decoding import FrameDecoder
from asyncrl.wire.transport.outbox import Outbox

WAIT: tuple[type, ...] = (
    from_generator.GeneratorReport,
    from_generator.SampleDelivered,
    from_generator.Rescored,
    from_trainer.TrainerReport,
    from_trainer.CheckpointWritten,
    from_trainer.CheckpointFailed,
)
"""Messages that wait, up to `bundles.GATHER_SECONDS`. All others are urgent."""


def is_urgent(message: msgspec.Struct) -> bool:
    """Return True if a message leaves at once."""
    return type(message) not in WAIT


In = TypeVar("In")


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
        """Queue a message for the controller until the end of this turn of the event loop.

        `urgent` None depends on its type. Raises Unreachable if too many are unacknowledged.
        """
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
        """Set the timer for the session's next frame."""
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
