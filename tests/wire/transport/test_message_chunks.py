"""Long messages in parts: whole again on the other side, and nothing else is put together."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.outbox import PART_BYTES, join, split


@given(st.integers(0, 3), st.integers(-2, 2))
def test_what_is_split_is_joined_to_the_same_bytes(parts: int, more: int) -> None:
    length = max(0, parts * PART_BYTES + more)
    body = (bytes(range(251)) * (length // 251 + 1))[:length]
    sent = [bytes(part) for part in split(body)]
    assert len(sent) == max(1, -(-length // PART_BYTES))
    assert max(map(len, sent)) <= PART_BYTES
    assert join(sent, max_bytes=length) == body


FULL = bytes(PART_BYTES)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], Reason.PARTS),
        ([b"a", b"b"], Reason.PARTS),
        ([FULL, b""], Reason.PARTS),
        ([FULL, b"a", b"b"], Reason.PARTS),
        ([FULL, FULL + b"a"], Reason.PARTS),
        ([FULL + b"a", b"b"], Reason.PARTS),
        ([FULL, FULL, b"a"], Reason.TOO_LONG),
    ],
)
def test_other_parts_are_refused(parts: list[bytes], reason: Reason) -> None:
    with pytest.raises(FrameRefused) as refused:
        join(parts, max_bytes=2 * PART_BYTES)
    assert refused.value.reason is reason


def test_long_messages_go_both_ways() -> None:
    async def talk() -> None:
        key, runtime = RunKey.new(), RuntimeDirectory()
        address = runtime.address("control")
        hub: Hub[from_generator.FromGenerator] = Hub(
            address, key.hub("control"), from_generator.FromGenerator
        )
        line: Line[to_generator.ToGenerator] = Line(
            address, key.line("control", "g"), to_generator.ToGenerator
        )
        failure = from_generator.Failure("g", "x" * (3 * PART_BYTES), user_error=True)
        prompt = to_generator.PromptPayload("p", b"\1" * (3 * PART_BYTES), {})
        async with asyncio.timeout(60):
            await line.send(failure)
            assert await hub.receive() == ("g", failure)
            command = to_generator.Generate(SampleId(1, 2), prompt, 7)
            await hub.send("g", command)
            assert await line.receive() == command
        hub.close()
        line.close()
        runtime.close()

    asyncio.run(talk())
