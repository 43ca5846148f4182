"""Gathers messages for one peer in one frame, and splits long messages into parts.

A frame costs its sender and its receiver tens of microseconds each, and a message in it a few. A
body is one message, or a MessagePack array of messages.

CURVE copies each part several times into newly allocated memory. Beyond malloc's threshold that
memory comes from the system, and zeroing its pages cost more than the encryption. Parts below the
threshold reuse memory.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from asyncrl.wire.transport.decoding import FrameRefused, Reason

PART_BYTES = 96 << 10
"""Length of every part but the last. With CURVE's overhead it is below malloc's 128 KiB."""


def split(body: bytes) -> list[bytes | memoryview]:
    """Return the parts in which a message is sent. A short one is a single part."""
    if len(body) <= PART_BYTES:
        return [body]
    view = memoryview(body)
    return [view[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]


def join(parts: Sequence[bytes], *, max_bytes: int) -> bytes:
    """Join a message's parts. Raises FrameRefused for wrong parts, or more than `max_bytes`."""
    if len(parts) == 1:
        return parts[0]
    if not parts or not 0 < len(parts[-1]) <= PART_BYTES:
        raise FrameRefused(Reason.PARTS, f"{len(parts)} parts instead of 1")
    if any(len(part) != PART_BYTES for part in parts[:-1]):
        raise FrameRefused(Reason.PARTS, f"{len(parts)} parts that are not of {PART_BYTES} bytes")
    length = (len(parts) - 1) * PART_BYTES + len(parts[-1])
    if length > max_bytes:
        raise FrameRefused(Reason.TOO_LONG, f"{length} bytes; at most {max_bytes} are accepted")
    return b"".join(parts)


MAX_MESSAGES = 1024
MAX_BYTES = 1 << 20
"""Most bytes of the messages in a body of several. A longer message goes alone."""
_ARRAY_BYTES = 3
ONE_PART = PART_BYTES - _ARRAY_BYTES
"""A `max_bytes` with which a body of several is never split. Joining parts needs new memory, which
costs the receiver more than a few frames."""


class Outbox:
    """Gathers messages by peer until the event loop has had its turn. Used from one event loop.

    `send` is called in the order of the peers' first messages, with bodies of at most `max_bytes`
    or one message.
    """

    def __init__(self, send: Callable[[str, bytes], None], *, max_bytes: int = MAX_BYTES) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: dict[str, list[bytes]] = {}
        self._bytes: dict[str, int] = {}

    def add(self, peer: str, message: msgspec.Struct) -> None:
        """Queue a message; it is encoded now."""
        encoded = self._encoder.encode(message)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        elif self._bytes.get(peer, 0) + len(encoded) > self._max_bytes:
            self.flush_peer(peer)
        waiting = self._waiting.setdefault(peer, [])
        waiting.append(encoded)
        self._bytes[peer] = self._bytes.get(peer, 0) + len(encoded)
        if len(waiting) >= MAX_MESSAGES:
            self.flush_peer(peer)

    def flush(self) -> None:
        """Send everything now."""
        for peer in list(self._waiting):
            self.flush_peer(peer)

    def flush_peer(self, peer: str) -> None:
        """Send what waits for one peer."""
        messages = self._waiting.pop(peer, None)
        self._bytes.pop(peer, None)
        if messages is not None:
            self._send(peer, body_of(messages))


def body_of(messages: list[bytes]) -> bytes:
    """Return the body of 1 to `MAX_MESSAGES` encoded messages."""
    if len(messages) == 1:
        return messages[0]
    return b"".join([b"\xdc", len(messages).to_bytes(2, "big"), *messages])
