"""A child's end of a session, over whatever hands its frames to a relay.

Which messages of a child wait in its relay for others, and which leave at once.

Urgent is what the scheduler or the trainer waits for before a device gets work. The rest only adds
to counts, or is about samples of run-ahead, whose slots are filled from a queue meanwhile. The
sender may know better than the table: the report of a finished run-ahead sample and the last
delivery of a generator are told so when they are sent.
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

WAIT: frozenset[type] = frozenset(
    {
        from_generator.GeneratorReport,
        from_generator.SampleDelivered,
        from_generator.Rescored,
        from_trainer.TrainerReport,
        from_trainer.CheckpointWritten,
        from_trainer.CheckpointFailed,
    }
)
"""Messages that wait, up to `bundles.GATHER_SECONDS`. All others are urgent."""


def is_urgent(message: msgspec.Struct) -> bool:
    """Whether a message leaves at once."""
    return type(message) not in WAIT


In = TypeVar("In")


class SessionEnd(Generic[In]):
    """Turns messages into frames of one session, and back. Used from one event loop.

    Args:
        incoming: union of the message types that the controller may send.
        max_bytes: longest message that is accepted.
        transmit: hands a frame to the relay, or drops it: then it is sent again.
    """

    def __init__(self, incoming: Any, *, max_bytes: int, transmit: Callable[[bytes], None]) -> None:
        self._session = Session(new_session())
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

    @property
    def count_resent(self) -> Callable[[int], None]:
        """As `Session.count_resent`."""
        return self._session.count_resent

    @count_resent.setter
    def count_resent(self, count: Callable[[int], None]) -> None:
        self._session.count_resent = count

    def send_soon(self, message: msgspec.Struct, *, urgent: bool | None = None) -> None:
        """Queue a message until the end of this turn of the event loop.

        Args:
            message: to the controller.
            urgent: whether the relay passes it on at once; None: as its type says.

        Raises:
            Unreachable: the controller has acknowledged nothing for so long that no more is kept.
        """
        if self._full is not None:
            raise self._full
        self._urgent |= is_urgent(message) if urgent is None else urgent
        self._outbox.add("", message)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message now, after those that are queued. Raises as `send_soon`."""
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
        """The new messages in a frame.

        Raises:
            FrameRefused: it is not of this session, or what it holds are no messages.
        """
        taken = self._session.take(frame, time.monotonic())
        for reply in taken.replies:
            self._transmit(reply)
        self._arm()
        return [] if taken.body is None else self._decoder.decode_all(taken.body)

    def ask(self) -> None:
        """Have the controller say at once what it has."""
        for frame in self._session.probe(time.monotonic()):
            self._transmit(frame)

    def _arm(self) -> None:
        """Look again when the session has something to send."""
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
        """Send what is queued, and look at the clock no more."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
