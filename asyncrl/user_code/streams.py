"""Frames on the standard streams of a process that runs user code, and texts that errors quote.

A frame is four bytes of length (little-endian) and then MessagePack. A pool first sends a worker
its setup, which the worker answers with `Ready` or `Refused`. Import-light: workers and the
processes of `task.map` and of chat templates load this file.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec

TRACEBACK_LINES = 8
MESSAGE_LINES = 4
"""Lines of the exception itself; further ones are counted."""
MESSAGE_CHARACTERS = 4000
_NOT_THEIRS = (f"{Path(__file__).parents[1]}{os.sep}", importlib.__file__, "<frozen importlib")
"""Beginnings of the files of frames that call the user's code."""


def last_lines() -> str:
    """Return the end of the traceback of the exception being handled, from the user's code on."""
    error = sys.exception()
    if error is None:
        raise RuntimeError("no exception is being handled")
    shown = traceback.TracebackException.from_exception(error)
    theirs = [not frame.filename.startswith(_NOT_THEIRS) for frame in shown.stack]
    first = theirs.index(True) if any(theirs) else -1  # a built-in one: where it was raised
    frames = list(shown.stack)[first:]
    more = len("".join(shown.format_exception_only()).strip().splitlines()) - MESSAGE_LINES
    while True:  # whole frames, so that no line stands without the one that it belongs to
        shown.stack = traceback.StackSummary.from_list(frames)
        lines = "".join(shown.format()).strip().splitlines()
        if more > 0:
            lines[-more:] = [f"... ({more:,} more lines)"]
        if len(lines) <= TRACEBACK_LINES or len(frames) <= 1:
            return bounded("\n".join(lines[-TRACEBACK_LINES:]))
        del frames[0]


def bounded(text: str) -> str:
    """Return the text shortened to `MESSAGE_CHARACTERS`, with unencodable characters escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    half = MESSAGE_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The user's code is loaded."""

    asynchronous: bool = False
    """Rewards: at least one function is async, so several calls may run at once."""
    notes: list[str] = []
    """Notes for the user about an environment, a sentence each."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The user's code cannot be loaded; `message` says why."""

    message: str


MAX_FRAME = 64 << 20
"""Longest MessagePack of a frame, in bytes."""

_HEAD_BYTES = 4


def pack(message: object) -> bytes:
    """Return one frame, its length included. Raises what msgspec raises if it cannot be encoded."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_HEAD_BYTES, "little") + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove the first frame; None if it is incomplete. Raises ValueError if it is too long."""
    if len(buffer) < _HEAD_BYTES:
        return None
    length = int.from_bytes(buffer[:_HEAD_BYTES], "little")
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    end = _HEAD_BYTES + length
    if len(buffer) < end:
        return None
    frame = bytes(buffer[_HEAD_BYTES:end])
    del buffer[:end]
    return frame


class Streams:
    """The process's ends of the streams, out of reach of the user's print and input."""

    def __init__(self) -> None:
        self._inbox: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._outbox: BinaryIO = os.fdopen(os.dup(1), "wb")
        self._process = os.getpid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def read(self) -> bytes | None:
        """Return the next frame; None at the end of the stream, or if it is broken."""
        head = self._inbox.read(_HEAD_BYTES)
        length = int.from_bytes(head, "little")
        if len(head) < _HEAD_BYTES or length > MAX_FRAME:
            return None
        body = self._inbox.read(length)
        return body if len(body) == length else None

    def send(self, message: object) -> None:
        """Send a message. A fork of this process exits instead."""
        if os.getpid() != self._process:
            os._exit(0)
        self._outbox.write(pack(message))
        self._outbox.flush()
