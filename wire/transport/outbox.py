"""Messages that leave together: those for one peer travel in one frame.

    outbox = Outbox(send)          # send(peer, body)
    outbox.add("generator-0", to_generator.Discard(...))
    outbox.add("generator-0", to_generator.Deliver(...))
    # at the end of this turn of the event loop: one frame with both, in this order

A frame costs its sender and its receiver tens of microseconds each (system calls, encryption, a
turn of the event loop), and a message in it a few. An engine step that ends thirty samples is
therefore told in one frame. A body is one message, or a MessagePack array of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from asyncrl.wire.transport.message_chunks import PART_BYTES

MAX_MESSAGES = 1024
"""Messages of a body at most."""
MAX_BYTES = 1 << 20
"""Bytes of the messages in a body of several, at most. A longer message goes alone."""
_ARRAY_BYTES = 3
ONE_PART = PART_BYTES - _ARRAY_BYTES
"""As `max_bytes`: a body of several is never split. A long body that is put together from parts
needs new memory, which costs its receiver more than a few frames."""


class Outbox:
    """Gathers messages by peer until the event loop has had its turn. Used from one event loop.

    Args:
        send: sends a body to a peer; called in the order of the peers' first messages.
        max_bytes: of the messages in a body of several. A longer message goes alone.
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
    """The body of 1 to `MAX_MESSAGES` encoded messages."""
    if len(messages) == 1:
        return messages[0]
    return b"".join([b"\xdc", len(messages).to_bytes(2, "big"), *messages])
