"""Bytes that a faulty or hostile process might send, and sockets that send them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio

from wire.keys import LineKeys
from wire.messages import control, from_generator


def _tagged(tag: bytes, rest: bytes) -> bytes:
    """A map of two entries: the tag of a message type, and `rest`, a key and its value."""
    return b"\x82\xa4type" + bytes([0xA0 + len(tag)]) + tag + rest


DEEP = b"\x91" * 100_000
CORPUS = {
    "empty": b"",
    "zeros": b"\0" * 64,
    "unused opcode": b"\xc1",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "tag not UTF-8": b"\x81\xa4type\xa4\xff\xfe\xff\xfe",
    "string not UTF-8": _tagged(b"generator.Goodbye", b"\xa9generator\xa2\xff\xff"),
    "key not UTF-8": _tagged(b"generator.Goodbye", b"\xa2\xff\xff\x01"),
    "unknown tag": msgspec.msgpack.encode({"type": "Rm", "path": "/"}),
    "no tag": msgspec.msgpack.encode({"generator": "g"}),
    "not a map": msgspec.msgpack.encode([1, 2, 3]),
    "deep list": DEEP,
    "deep field": _tagged(b"generator.Goodbye", b"\xa9generator" + DEEP),
    "deep unknown field": _tagged(b"StatusRequest", b"\xa1x" + DEEP + b"\xc0"),
    "huge list": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge string": _tagged(b"StatusRequest", b"\xdb\xff\xff\xff\xff"),
    "bad timestamp": _tagged(b"StatusReply", b"\xa6status\x81\xa1k\xc7\x0c\xff" + b"\xff" * 12),
    "other direction": msgspec.msgpack.encode(control.Accepted("yes")),
    "wrong type": msgspec.msgpack.encode(
        {"type": "generator.SampleFinished", "generator": 1, "sample": "x"}
    ),
    "cut short": msgspec.msgpack.encode(from_generator.Goodbye("generator-0"))[:-3],
    "too long": b"\x00" * 70_000,
}
"""By what is wrong with each. None is a message from a generator."""


@contextlib.contextmanager
def raw_peer(address: str, keys: LineKeys) -> Iterator[zmq.asyncio.Socket]:
    """A socket that connects to a hub with these keys and sends any parts."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, keys.identity)
    socket.curve_serverkey = keys.hub
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
