"""One end of a session: numbered frames, acknowledgements, and resending.

    frame = session.send(body, now)          # pass it to the relay
    taken = session.take(frame, now)         # from the relay: taken.body is new, or None
    frames = session.due(now)                # acknowledgements and questions that are due

What the other end has not acknowledged is kept and sent again

- when it asks (AGAIN): a frame is missing before one that came, or its route has changed;
- when this end has waited for `PATIENCE_SECONDS`: the oldest frame goes out once more as a PROBE,
  and the answer tells what is missing.

Repeated frames are dropped, and so are those that come too early, so each body is delivered once,
in the order in which it was sent. Unacknowledged content is bounded: the owner of a full session
ends it (`SessionFull`).

The header of a session's frame:

    session  8 bytes   drawn by the child at its start; a replacement draws another one
    number   uint64    number of this frame in its direction, from 1; 0: it has no content
    ack      uint64    the last number that its sender has, all before it included
    flags    uint8

The content follows: one message or several (`asyncrl.wire.transport.outbox`). No sockets, no clock.
"""

import os
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from asyncrl.wire.errors import SessionFull
from asyncrl.wire.transport.decoding import FrameRefused, Reason

_HEADER = struct.Struct("<8sQQB")
HEADER_BYTES = _HEADER.size

AGAIN = 1
"""Its sender lacks what follows `ack`: send it again."""
PROBE = 2
"""Its sender has waited long for an acknowledgement: answer at once, with AGAIN."""
URGENT = 4
"""A relay passes it on at once."""
_FLAGS = AGAIN | PROBE | URGENT


class Header(NamedTuple):
    """See the module."""

    session: bytes
    number: int
    ack: int
    flags: int


def new_session() -> bytes:
    """Draw a random name of a session."""
    return os.urandom(8)


def encode(header: Header, body: bytes = b"") -> bytes:
    """Return the frame."""
    return _HEADER.pack(*header) + body


def header_of(frame: bytes) -> Header:
    """Return the header of a frame. Raises FrameRefused if it has none."""
    if len(frame) < HEADER_BYTES:
        raise FrameRefused(Reason.MALFORMED, f"a session's frame of {len(frame)} bytes")
    header = Header._make(_HEADER.unpack_from(frame))
    if header.flags & ~_FLAGS or (header.number == 0) != (len(frame) == HEADER_BYTES):
        raise FrameRefused(Reason.UNEXPECTED, "the header of a session's frame contradicts itself")
    return header


def is_urgent(frame: bytes) -> bool:
    """Return True if a relay passes it on at once; also for a malformed frame, to be refused."""
    return len(frame) < HEADER_BYTES or bool(frame[HEADER_BYTES - 1] & URGENT)


ACK_SECONDS = 0.5
"""Longest delay of an acknowledgement, alone or with another frame. All processes report twice a
second, so separate acknowledgements are rare."""
ACK_FRAMES = 64
"""An acknowledgement is sent at once after this many frames."""
ASK_SECONDS = 0.2
"""Shortest time between two questions for what is missing, and between two answers."""
PATIENCE_SECONDS = 2.0
"""Wait for an acknowledgement. It doubles with each probe, up to `MAX_PATIENCE_SECONDS`."""
MAX_PATIENCE_SECONDS = 16.0


class Limits(NamedTuple):
    """Limits of what the other end has not acknowledged."""

    frames: int = 1 << 16
    bytes: int = 64 << 20
    """A single longer frame is kept all the same."""


class Taken(NamedTuple):
    """The result of taking a frame."""

    body: bytes | None
    """New content, the next in order; None: it has none, or not now."""
    replies: list[bytes]
    """Frames to send back now."""


class Session:
    """One end of the session `name`, drawn by `new_session`."""

    def __init__(self, name: bytes, limits: Limits = Limits()) -> None:  # noqa: B008 - immutable
        self.name = name
        self._limits = limits
        self._unacknowledged: deque[tuple[int, bytes, int]] = deque()
        self._bytes = 0
        self._sent = 0
        self._taken = 0
        self.dropped = 0
        """Frames that came a second time or too early."""
        self.count_resent: Callable[[int], None] = lambda _frames: None
        self._owed = 0
        self._owed_since: float | None = None
        self._asked = self._answered = float("-inf")
        self._answer_at: float | None = None
        self._probe_at: float | None = None
        self._patience = PATIENCE_SECONDS

    @property
    def unacknowledged(self) -> int:
        """Number of frames that the other end may lack."""
        return len(self._unacknowledged)

    def send(self, body: bytes, now: float, *, urgent: bool = False) -> bytes:
        """Return the frame for a body, kept until acknowledged. Raises SessionFull."""
        waiting = self._unacknowledged
        if waiting and (
            len(waiting) >= self._limits.frames or self._bytes + len(body) > self._limits.bytes
        ):
            raise SessionFull(
                f"{len(waiting)} frames of {self._bytes} bytes in all were not acknowledged"
            )
        self._sent += 1
        flags = URGENT if urgent else 0
        waiting.append((self._sent, body, flags))
        self._bytes += len(body)
        if self._probe_at is None:
            self._probe_at = now + self._patience
        return self._frame(self._sent, body, flags)

    def take(self, frame: bytes, now: float) -> Taken:
        """Process a frame of the other end. Raises FrameRefused if it is not of this session."""
        header = header_of(frame)
        if header.session != self.name:
            raise FrameRefused(Reason.UNEXPECTED, "a frame of another session under this name")
        if header.ack > self._sent:
            raise FrameRefused(
                Reason.UNEXPECTED, f"frame {header.ack} is acknowledged, {self._sent} were sent"
            )
        self._acknowledged(header.ack, now)
        replies: list[bytes] = []
        if header.flags & AGAIN and self._unacknowledged:
            if now - self._answered >= ASK_SECONDS:
                replies += self._again(now)
            elif self._answer_at is None:
                self._answer_at = self._answered + ASK_SECONDS
        body = self._content(header, frame, now, replies)
        if header.flags & PROBE:
            replies.append(self._question(now))
        elif self._owed >= ACK_FRAMES:
            replies.append(self._frame(0, b"", 0))
        return Taken(body, replies)

    def _content(
        self, header: Header, frame: bytes, now: float, replies: list[bytes]
    ) -> bytes | None:
        if header.number == 0:
            return None
        self._owed += 1
        if self._owed_since is None:
            self._owed_since = now
        if header.number == self._taken + 1:
            self._taken += 1
            return frame[HEADER_BYTES:]
        self.dropped += 1
        if header.number > self._taken and now - self._asked >= ASK_SECONDS:
            replies.append(self._question(now))
        return None

    def rerouted(self, now: float) -> list[bytes]:
        """Ask and resend after the route has changed: frames may be lost on the old one."""
        return [self._question(now), *self._again(now)]

    def abandon(self) -> None:
        """Forget what a lost other end did not acknowledge. Late frames may still come."""
        self._unacknowledged.clear()
        self._bytes = 0
        self._probe_at = self._answer_at = None

    @property
    def next_due(self) -> float | None:
        """Time at which `due` has something to send; None until something is sent or taken."""
        times = [self._probe_at, self._answer_at]
        if self._owed_since is not None:
            times.append(self._owed_since + ACK_SECONDS)
        return min((one for one in times if one is not None), default=None)

    def due(self, now: float, *, leaves: bool = False) -> list[bytes]:
        """Return frames that are due; if something leaves anyway, acknowledgements too."""
        frames: list[bytes] = []
        if self._answer_at is not None and now >= self._answer_at:
            frames += self._again(now)
        if self._probe_at is not None and now >= self._probe_at:
            frames += self.probe(now)
        since = self._owed_since
        if since is not None and (leaves or now >= since + ACK_SECONDS):
            frames.append(self._frame(0, b"", 0))
        return frames

    def probe(self, now: float) -> list[bytes]:
        """Return the oldest unacknowledged frame, as a question for what is missing."""
        if not self._unacknowledged:
            return []
        number, body, flags = self._unacknowledged[0]
        self._patience = min(2 * self._patience, MAX_PATIENCE_SECONDS)
        self._probe_at = now + self._patience
        self.count_resent(1)
        return [self._frame(number, body, flags | PROBE | URGENT)]

    def _acknowledged(self, ack: int, now: float) -> None:
        waiting = self._unacknowledged
        if not waiting or ack < waiting[0][0]:
            return
        while waiting and waiting[0][0] <= ack:
            self._bytes -= len(waiting.popleft()[1])
        self._patience = PATIENCE_SECONDS
        self._probe_at = now + self._patience if waiting else None

    def _again(self, now: float) -> list[bytes]:
        self._answered, self._answer_at = now, None
        if self._unacknowledged:
            self._probe_at = now + self._patience
            self.count_resent(len(self._unacknowledged))
        return [self._frame(*one) for one in self._unacknowledged]

    def _question(self, now: float) -> bytes:
        self._asked = now
        return self._frame(0, b"", AGAIN | URGENT)

    def _frame(self, number: int, body: bytes, flags: int) -> bytes:
        self._owed, self._owed_since = 0, None
        return encode(Header(self.name, number, self._taken, flags), body)
