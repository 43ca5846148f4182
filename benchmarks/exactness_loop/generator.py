"""A real generator process on fake lines, with rewards that take a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncrl.processes.generator.activity import Activity
from asyncrl.processes.generator.controller_line import ControllerLine
from asyncrl.processes.generator.generation import SampleGenerator
from asyncrl.processes.generator.process import GeneratorProcess
from asyncrl.processes.generator.reports import GeneratorRecords
from asyncrl.processes.generator.sample_rewards import SampleRewards
from asyncrl.rewards.calls import Reward
from benchmarks.exactness_loop.outcome import reward_of
from engine.protocol import Engine, SamplingParams
from monitoring.metrics import GeneratorMetrics, new_registry
from monitoring.timeline import Timeline
from wire.records import RewardCounts

NAME = "g0"


class EngineClock:
    """Time in steps of an engine.

    Args:
        engine: counts its steps.
        poll_seconds: between two looks at its counters.
    """

    def __init__(self, engine: Engine, poll_seconds: float) -> None:
        self._engine = engine
        self._poll_seconds = poll_seconds

    @property
    def now(self) -> int:
        """Steps that the engine has made."""
        return self._engine.stats().steps

    async def until(self, step: int) -> None:
        """Wait until the engine has made so many steps or has no work left."""
        while True:
            stats = self._engine.stats()
            if stats.steps >= step or not stats.running + stats.waiting:
                return
            await asyncio.sleep(self._poll_seconds)


class FakeLine:
    """The generator's end of a connection: what it sends goes to a function."""

    def __init__(self, on_send: Callable[[Any], None]) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._on_send = on_send

    async def send(self, message: Any) -> None:
        """Pass a message to the other side."""
        self._on_send(message)

    async def receive(self) -> Any:
        """Wait for a message from the other side."""
        return await self.inbox.get()


class SlowRewards:
    """Take a few turns of the event loop, so that updates find samples without a reward."""

    waiting = running = 0
    counts = RewardCounts()

    async def score(
        self, _prompt: str, text: str, _example: Any, *, example_id: str = ""
    ) -> Reward:
        """Compute `reward_of` a text."""
        del example_id
        for _ in range(4):
            await asyncio.sleep(0)
        return Reward(reward_of(map(int, text.split())))


def generator_process(
    engine: Engine, sampling: SamplingParams, control: FakeLine, trainer: FakeLine
) -> tuple[GeneratorProcess, SampleGenerator]:
    """A generator on this engine, and its part that counts verified tokens."""
    metrics = GeneratorMetrics.register(new_registry(), NAME)
    fakes: Any = (SlowRewards(), control, trainer)
    pool, control_line, trainer_line = fakes
    rewards = SampleRewards(pool, lambda tokens: " ".join(map(str, tokens)), metrics)
    generator = SampleGenerator(engine, rewards, sampling)
    process = GeneratorProcess(
        engine,
        generator,
        ControllerLine(NAME, control_line),
        trainer_line,
        GeneratorRecords(metrics, Activity(Timeline(None, NAME), metrics)),
    )
    return process, generator
