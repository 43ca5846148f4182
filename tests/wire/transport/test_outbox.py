"""Messages of one turn of the event loop travel together, and arrive one by one, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason
from asyncrl.wire.transport.outbox import MAX_BYTES, MAX_MESSAGES, ONE_PART, Outbox, body_of, split
from asyncrl.wire.transport.refusals import Refusals

KEY = RunKey.new()
DECODER: FrameDecoder[Any] = FrameDecoder(to_generator.ToGenerator, max_bytes=8 << 20)


def discard(number: int) -> to_generator.Discard:
    return to_generator.Discard((SampleId(number, 0),))


def sent_by(fill: Callable[[Outbox], None]) -> list[tuple[str, list[Any]]]:
    """The peer and the messages of each frame that an outbox sends."""
    frames: list[tuple[str, bytes]] = []

    async def main() -> None:
        fill(Outbox(lambda peer, body: frames.append((peer, body))))
        await asyncio.sleep(0)

    asyncio.run(main())
    return [(peer, DECODER.decode_all(body)) for peer, body in frames]


def test_the_messages_of_a_turn_are_one_frame_for_each_peer_in_order() -> None:
    def fill(outbox: Outbox) -> None:
        for number in range(5):
            outbox.add("ab"[number % 2], discard(number))

    assert sent_by(fill) == [
        ("a", [discard(0), discard(2), discard(4)]),
        ("b", [discard(1), discard(3)]),
    ]


def test_a_later_turn_sends_a_frame_of_its_own() -> None:
    frames: list[bytes] = []

    async def main() -> None:
        outbox = Outbox(lambda _peer, body: frames.append(body))
        outbox.add("a", discard(0))
        outbox.flush_peer("a")
        outbox.add("a", discard(1))
        await asyncio.sleep(0)
        outbox.add("a", discard(2))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [DECODER.decode_all(body) for body in frames] == [[discard(n)] for n in range(3)]


def test_a_frame_has_bounded_numbers_of_messages_and_bytes() -> None:
    def fill_with_short_ones(outbox: Outbox) -> None:
        for number in range(2 * MAX_MESSAGES + 3):
            outbox.add("a", discard(number))

    many = sent_by(fill_with_short_ones)
    assert [len(messages) for _, messages in many] == [MAX_MESSAGES, MAX_MESSAGES, 3]
    assert [m.samples[0].group for _, messages in many for m in messages] == list(range(2051))
    prompt = to_generator.PromptPayload("p", b"x" * (MAX_BYTES // 3), {})
    long = to_generator.Generate(SampleId(0, 0), prompt, 1)

    def fill_with_long_ones(outbox: Outbox) -> None:
        for _ in range(7):
            outbox.add("a", long)

    assert [len(messages) for _, messages in sent_by(fill_with_long_ones)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "body",
    [
        b"\xdc\x00\x00",
        body_of([msgspec.msgpack.encode(discard(1)), b"\xc0"]),
        body_of([msgspec.msgpack.encode(discard(1)), b"\x01"]),
        body_of([msgspec.msgpack.encode(discard(1))] * 2)[:-1],
        body_of([msgspec.msgpack.encode(discard(1))] * 2) + b"\x00",
        b"\xdc\xff\xff",
        b"",
    ],
)
def test_a_body_with_a_message_that_is_none_is_refused_as_a_whole(body: bytes) -> None:
    with pytest.raises(FrameRefused):
        DECODER.decode_all(body)


@pytest.fixture
def address() -> Iterator[str]:
    runtime = RuntimeDirectory()
    yield runtime.address("control")
    runtime.close()


Talk = Callable[[Hub[Any], Line[Any]], Awaitable[None]]


def between(address: str, talk: Talk, refusals: Refusals | None = None) -> None:
    """Run `talk` with a hub and a line to it, named "g"."""

    async def main() -> None:
        hub: Hub[Any] = Hub(address, KEY.hub("control"), from_generator.FromGenerator, refusals)
        line: Line[Any] = Line(address, KEY.line("control", "g"), to_generator.ToGenerator)
        try:
            async with asyncio.timeout(60):
                await talk(hub, line)
        finally:
            hub.close()
            line.close()

    asyncio.run(main())


def delivered(number: int) -> from_generator.SampleDelivered:
    return from_generator.SampleDelivered("g", SampleId(number, 0))


def test_both_ends_send_together_and_receive_one_by_one(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(hub: Hub[Any], line: Line[Any]) -> None:
        for number in range(200):
            line.send_soon(delivered(number))
        await line.send(from_generator.Goodbye("g"))  # goes after what waits
        assert [await hub.receive() for _ in range(201)] == [
            *(("g", delivered(number)) for number in range(200)),
            ("g", from_generator.Goodbye("g")),
        ]
        for number in range(200):
            hub.send_soon("g", discard(number))
        hub.send_soon("nobody", discard(1))
        await hub.send("g", to_generator.Pause())
        received = [await line.receive() for _ in range(201)]
        assert received == [*(discard(number) for number in range(200)), to_generator.Pause()]

    between(address, talk)
    assert "a message could not be sent to nobody" in caplog.text


def test_what_waits_is_sent_when_the_socket_closes(address: str) -> None:
    async def talk(hub: Hub[Any], line: Line[Any]) -> None:
        line.send_soon(delivered(1))
        line.close()
        assert await hub.receive() == ("g", delivered(1))

    between(address, talk)


def test_the_rest_of_a_frame_of_a_peer_that_is_cut_off_is_dropped(address: str) -> None:
    refusals = Refusals()

    async def talk(hub: Hub[Any], line: Line[Any]) -> None:
        for number in range(400):
            line.send_soon(delivered(number))
        received = 0
        while not refusals.is_cut_off("g"):
            assert await hub.receive() == ("g", delivered(received))
            received += 1
            refusals.refuse("g", FrameRefused(Reason.IMPOSSIBLE_EVENT, "made up"))
        other: Line[Any] = Line(address, KEY.line("control", "h"), to_generator.ToGenerator)
        other.send_soon(delivered(0))
        assert (await hub.receive())[0] == "h", "frames of the peer that is cut off were read"
        assert received < 400
        other.close()

    between(address, talk, refusals)


def test_a_caller_whose_time_is_up_loses_no_message(address: str) -> None:
    async def talk(hub: Hub[Any], line: Line[Any]) -> None:
        for number in range(200):
            line.send_soon(delivered(number))
        received = [await hub.receive()]
        while len(received) < 200:
            waiting = asyncio.create_task(hub.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                received.append(waiting.result())
        assert received == [("g", delivered(number)) for number in range(200)]

    between(address, talk)


def test_a_body_that_is_not_to_be_split_is_one_part() -> None:
    frames: list[bytes] = []

    async def main() -> None:
        outbox = Outbox(lambda _peer, body: frames.append(body), max_bytes=ONE_PART)
        for _ in range(100):
            outbox.add("a", to_generator.Discard(tuple(SampleId(n, 0) for n in range(500))))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(frames) > 1
    assert all(len(split(body)) == 1 for body in frames)
    assert sum(len(DECODER.decode_all(body)) for body in frames) == 100
