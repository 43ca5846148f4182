"""Generators of the loop that leave in mid-run, with samples that move, and others that join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.run_config import parse_config
from asyncrl.controller.unfinished_work import Moves
from asyncrl.scheduler import commands, events
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from benchmarks.exactness_loop.generator import EngineClock
from benchmarks.exactness_loop.outcome import LoopSettings

if TYPE_CHECKING:
    from benchmarks.exactness_loop.member import Member


class Turnover:
    """Orders generators to leave, as `asyncrl scale` does; the real `Moves` of a run.

    When one leaves, and where its samples go, does not depend on text that is not drawn yet.
    """

    def __init__(
        self,
        settings: LoopSettings,
        directory: Path,
        requests: SampleRequests,
        clock: EngineClock,
        rng: np.random.Generator,
        tell: Callable[[events.Event], None],
    ) -> None:
        self._every = settings.leave_every
        self._groups_per_step = settings.scheduler.groups_per_step
        self._clock = clock
        self._rng = rng
        self._tell = tell
        config = parse_config({"scheduler": settings.scheduler.model_dump()}, source="the loop")
        self._moves = Moves(config, directory, requests, print)
        self._joined = 0

    async def after(self, version: int, members: dict[str, Member]) -> None:
        """A version was published; perhaps a generator leaves some engine steps later."""
        await self._moves.forget_before(version * self._groups_per_step)
        if not self._every or version % self._every:
            return
        await self._clock.until(self._clock.now + int(self._rng.integers(0, 30)))
        if len(members) > 1:
            self._tell(events.GeneratorLeaves(str(self._rng.choice(sorted(members)))))

    def request(self, command: commands.ReleaseSamples) -> tg.Release:
        """The message to a generator that leaves."""
        return self._moves.request(command, 0)

    async def take(self, generator: str, answer: fg.Released) -> None:
        assert not answer.reason, answer.reason
        await self._moves.take(generator, answer)
        self._tell(events.SamplesReleased(generator))

    async def next_name(self, left: str) -> str:
        """The name of the generator that joins on the engine of one that has left, soon after."""
        await self._clock.until(self._clock.now + int(self._rng.integers(0, 10)))
        self._joined += 1
        return f"{left.partition('.')[0]}.{self._joined}"
