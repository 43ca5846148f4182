"""A generator hears the ranks of the trainer, whoever of them speaks."""

from __future__ import annotations

import asyncio

from generator_harness import FakeLine

from asyncrl.generator.deliveries import TrainerLines
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages.data import Received


def test_what_any_rank_says_is_heard_once_also_after_a_call_was_cancelled() -> None:
    async def check() -> None:
        fakes = [FakeLine() for _ in range(3)]
        lines = TrainerLines(fakes)  # type: ignore[arg-type]
        assert [lines.to(rank) for rank in range(3)] == fakes
        waiting = asyncio.create_task(lines.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        said = [Received(SampleId(number, 0)) for number in range(4)]
        fakes[2].inbox.put_nowait(said[0])
        assert await lines.receive() == said[0]
        for rank in (0, 1, 1):
            fakes[rank].inbox.put_nowait(said[1 + rank])
        heard = [await lines.receive() for _ in range(3)]
        assert sorted(one.sample.group for one in heard) == [1, 2, 2]

    asyncio.run(asyncio.wait_for(check(), 60))
