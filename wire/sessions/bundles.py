r"""Bundles: many frames of many sessions in one frame between a relay and the controller.

    b"\xc1" + MessagePack [[peer, frame], ...]

`peer` is the routing id of a child: its name and its pass, which the controller checks. No
MessagePack begins with 0xc1, so a bundle is no message.

`Gatherer` decides what leaves a relay when: what is urgent at once, with all that waits; the rest
at once if nothing has left for `GATHER_SECONDS`, otherwise after that time at the latest. So a
relay with little to do delays nothing, and one with much to do sends few frames.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncrl.wire.transport.decoding import FrameRefused, Reason

GATHER_SECONDS = 0.05
"""Longest wait of a frame that is not urgent."""
MAX_FRAMES = 256
"""Frames that leave at once, however urgent."""
MAX_BYTES = 1 << 20
"""Bytes of the frames in a bundle of several, at most. A longer frame goes alone."""
EXTRA_BYTES = 4096
"""Of a bundle of one frame, beyond its message: more than the headers need."""

_MARK = b"\xc1"
_FRAME_BYTES = 64
"""Counted for what a frame has besides its bytes."""

Entry = tuple[bytes, bytes]
"""A routing id and a frame."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Entry]).decode


def is_bundle(body: bytes) -> bool:
    """Whether it is a bundle, and no message."""
    return body[:1] == _MARK


def bundles_of(entries: list[Entry]) -> Iterator[bytes]:
    """The bundles in which frames travel, in their order."""
    first = size = 0
    for index, (_, frame) in enumerate(entries):
        length = len(frame) + _FRAME_BYTES
        if index > first and size + length > MAX_BYTES:
            yield _MARK + _encode(entries[first:index])
            first, size = index, 0
        size += length
    if first < len(entries):
        yield _MARK + _encode(entries[first:] if first else entries)


def entries_of(body: bytes) -> list[Entry]:
    """The frames of a bundle.

    Raises:
        FrameRefused: it is none.
    """
    try:
        return _decode(memoryview(body)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameRefused(Reason.MALFORMED, f"no bundle: {error}") from error


class Gatherer:
    """What waits in a relay for its way to the controller. No sockets, no clock."""

    def __init__(self) -> None:
        self._waiting: list[Entry] = []
        self._bytes = 0
        self._left = float("-inf")
        self._due: float | None = None

    def add(self, peer: bytes, frame: bytes, now: float, *, urgent: bool) -> None:
        """Take a frame of a child."""
        self._waiting.append((peer, frame))
        self._bytes += len(frame)
        if urgent or len(self._waiting) >= MAX_FRAMES or self._bytes >= MAX_BYTES:
            self._due = now
        elif self._due is None:
            self._due = max(now, self._left + GATHER_SECONDS)

    @property
    def waiting(self) -> int:
        """Frames that have not left."""
        return len(self._waiting)

    @property
    def due(self) -> float | None:
        """When what waits is to leave; None: nothing waits."""
        return self._due

    def leave(self, now: float) -> list[Entry]:
        """Everything that waits, if it is time for any of it."""
        if self._due is None or now < self._due:
            return []
        leaving, self._waiting = self._waiting, []
        self._bytes, self._due, self._left = 0, None, now
        return leaving
