"""Hub and Line on real sockets, among peers that send anything."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio
from hostile_frames import CORPUS, raw_peer

from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.transport.decoding import Reason
from asyncrl.wire.transport.refusals import LIMIT, Refusals

GOODBYE = from_generator.Goodbye("g")


KEY = RunKey.new()
HOSTILE = KEY.line("control", "hostile")


@pytest.fixture
def runtime() -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory()
    yield directory
    directory.close()


class Ends:
    """A hub, a line to it named `g`, and what the hub refused."""

    def __init__(self, runtime: RuntimeDirectory) -> None:
        self.address = runtime.address("control")
        self.refused: Counter[Reason] = Counter()
        self.cut_off: list[str] = []
        refusals = Refusals(lambda reason: self.refused.update([reason]))
        refusals.on_cut_off = lambda name, _: self.cut_off.append(name)
        self.hub: Hub[from_generator.FromGenerator] = Hub(
            self.address,
            KEY.hub("control"),
            from_generator.FromGenerator,
            refusals,
            max_bytes=1 << 16,
        )
        self.line: Line[to_generator.ToGenerator] = Line(
            self.address, KEY.line("control", "g"), to_generator.ToGenerator
        )

    async def still_talk(self) -> None:
        """The line gets through to the hub, whatever came before."""
        await self.line.send(GOODBYE)
        async with asyncio.timeout(60):
            assert await self.hub.receive() == ("g", GOODBYE)

    def close(self) -> None:
        self.hub.close()
        self.line.close()


def test_a_hub_takes_any_frames(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        ends = Ends(runtime)
        bodies = [body for body in CORPUS.values() if len(body) < 1 << 16]
        messages = [[body] for body in bodies]
        messages += [[], [b"", b""], [b"a"] * 500, [b"x", bodies[3]]]
        with raw_peer(ends.address, HOSTILE) as peer:
            for parts in messages:
                await peer.send_multipart(parts or [b""])
            await ends.still_talk()
            while sum(ends.refused.values()) < len(messages):
                await ends.still_talk()
        assert ends.refused[Reason.PARTS] == 3
        assert {Reason.NOT_TEXT, Reason.MALFORMED, Reason.UNEXPECTED} < ends.refused.keys()
        ends.close()

    asyncio.run(talk())


def test_a_peer_that_keeps_sending_nonsense_is_no_longer_decoded(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        ends = Ends(runtime)
        with raw_peer(ends.address, HOSTILE) as peer:
            for _ in range(5 * LIMIT.frames):
                await peer.send(b"\xff")
            while sum(ends.refused.values()) < 5 * LIMIT.frames:
                await ends.still_talk()
        assert ends.cut_off == ["hostile"]
        assert ends.refused[Reason.CUT_OFF] == 4 * LIMIT.frames - 1
        ends.close()

    asyncio.run(talk())


def test_a_message_longer_than_the_limit_closes_its_connection_only(
    runtime: RuntimeDirectory,
) -> None:
    async def talk() -> None:
        ends = Ends(runtime)
        with raw_peer(ends.address, HOSTILE) as peer:
            await peer.send(b"\0" * (1 << 17))
            await ends.still_talk()
        ends.close()

    asyncio.run(talk())


def test_bytes_that_are_no_zeromq_greeting_change_nothing(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        ends = Ends(runtime)
        raw = []
        for greeting in (
            b"\xff" * 64,
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\0\0\0\0\0\0\0\1\x7f\3",
        ):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(ends.address.removeprefix("ipc://"))
            connection.sendall(greeting)
            raw.append(connection)
        await ends.still_talk()
        for connection in raw:
            connection.close()
        await ends.still_talk()
        ends.close()

    asyncio.run(talk())


def test_a_flood_of_nonsense_leaves_turns_for_other_tasks(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        ends = Ends(runtime)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        with raw_peer(ends.address, HOSTILE) as peer:
            for _ in range(20 * LIMIT.frames):
                await peer.send(b"\xff")
            other = asyncio.create_task(count_turns())
            while sum(ends.refused.values()) < 20 * LIMIT.frames:
                await ends.still_talk()
            other.cancel()
        assert turns > 20
        ends.close()

    asyncio.run(talk())


def test_a_line_takes_any_frames(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        refused: list[Reason] = []
        address = runtime.address("control")
        router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        router.curve_server, router.curve_secretkey = True, KEY.hub("control").secret
        router.bind(address)
        line: Line[to_generator.ToGenerator] = Line(
            address, KEY.line("control", "g"), to_generator.ToGenerator, Refusals(refused.append)
        )
        await line.send(GOODBYE)
        name, _ = await router.recv_multipart()
        bodies = list(CORPUS.values())
        for body in bodies:
            await router.send_multipart([name, body])
        await router.send_multipart([name, b"a", b"b"])
        await router.send_multipart([name, b"\x81\xa4type\xa5Pause"])
        assert await line.receive_within(60, what="a command") == to_generator.Pause()
        assert len(refused) == len(bodies) + 1
        assert refused[-1] is Reason.PARTS
        line.close()
        router.close(linger=0)

    asyncio.run(talk())
