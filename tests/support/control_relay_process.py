"""A relay's hub in a process of its own; its options come on standard input."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from asyncrl.relay.control import ControlRelay
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.transport.keys import LineKeys


class Options(msgspec.Struct):
    address: str
    secret: bytes
    controller: str
    keys: LineKeys


async def main(options: Options) -> None:
    relay = ControlRelay(
        options.address,
        options.secret,
        options.controller,
        options.keys,
        to_generator.ToGenerator,
    )
    relay.line.send_soon(from_generator.Goodbye("the relay is here"))
    await relay.run()


if __name__ == "__main__":
    asyncio.run(main(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Options)))
