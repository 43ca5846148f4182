"""The header of a session's frame.

    session  8 bytes   drawn by the child at its start; a replacement draws another one
    number   uint64    of this frame in its direction, from 1; 0: it has no content
    ack      uint64    the last number that its sender has, all before it included
    flags    uint8

The content follows: one message or several (`asyncrl.wire.transport.outbox`).
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from asyncrl.wire.transport.decoding import FrameRefused, Reason

_HEADER = struct.Struct("<8sQQB")
HEADER_BYTES = _HEADER.size

AGAIN = 1
"""Its sender lacks what follows `ack`: send it again."""
PROBE = 2
"""Its sender has waited for an acknowledgement for long: answer at once, with AGAIN."""
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
    """A random name of a session."""
    return os.urandom(8)


def encode(header: Header, body: bytes = b"") -> bytes:
    """The frame."""
    return _HEADER.pack(*header) + body


def header_of(frame: bytes) -> Header:
    """The header of a frame.

    Raises:
        FrameRefused: it has none.
    """
    if len(frame) < HEADER_BYTES:
        raise FrameRefused(Reason.MALFORMED, f"a session's frame of {len(frame)} bytes")
    header = Header._make(_HEADER.unpack_from(frame))
    if header.flags & ~_FLAGS or (header.number == 0) != (len(frame) == HEADER_BYTES):
        raise FrameRefused(Reason.UNEXPECTED, "the header of a session's frame makes no sense")
    return header


def is_urgent(frame: bytes) -> bool:
    """Whether a relay passes it on at once. A frame without a header is, so that it is refused."""
    return len(frame) < HEADER_BYTES or bool(frame[HEADER_BYTES - 1] & URGENT)
