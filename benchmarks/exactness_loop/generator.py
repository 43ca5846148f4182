"""A real generator process on fake lines, with rewards that take a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrl.engine.protocol import Engine, SamplingParams
from asyncrl.generator.activity import Activity
from asyncrl.generator.controller_line import ControllerLine
from asyncrl.generator.process import GeneratorProcess
from asyncrl.generator.reports import GeneratorRecords
from asyncrl.generator.sample_rewards import SampleRewards
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import SampleId, Trajectory, VerifiableTrajectory
from asyncrl.wire.records.reward_counts import RewardCounts
from benchmarks.exactness_loop.outcome import reward_of


class EngineClock:
    """Time in steps of some engines, summed."""

    def __init__(self, engines: Sequence[Engine], poll_seconds: float) -> None:
        self._engines = engines
        self._poll_seconds = poll_seconds

    @property
    def now(self) -> int:
        return sum(engine.stats().steps for engine in self._engines)

    async def until(self, step: int) -> None:
        """Wait until the engines have made so many steps or have no work left."""
        while True:
            all_stats = [engine.stats() for engine in self._engines]
            steps = sum(stats.steps for stats in all_stats)
            work = sum(stats.running + stats.waiting for stats in all_stats)
            if steps >= step or not work:
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

    def send_soon(self, message: Any, *, urgent: bool | None = None) -> None:  # noqa: ARG002
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
        del example_id
        for _ in range(4):
            await asyncio.sleep(0)
        return Reward(reward_of(map(int, text.split())))


class DeliveredLists:
    """In place of a generator's sample recorder: keeps what does not travel to the trainer."""

    def __init__(self) -> None:
        self._held: dict[SampleId, VerifiableTrajectory] = {}

    def consider(self, held: HeldSample, *, reward: float, step: int) -> None:
        del reward, step
        self._held[held.trajectory.id] = held.trajectory

    def rewind(self) -> None:
        """Samples for a lost trainer are delivered again."""
        self._held.clear()

    def of(self, received: Trajectory) -> VerifiableTrajectory:
        """The trajectory that was delivered as this one."""
        held = self._held.pop(received.id)
        assert np.array_equal(held.tokens, received.tokens)
        assert np.array_equal(held.behaviour_logprobs, received.behaviour_logprobs)
        assert held.segments == received.segments
        return held


def generator_process(
    name: str,
    engine: Engine,
    sampling: SamplingParams,
    control: FakeLine,
    trainer: FakeLine,
) -> tuple[GeneratorProcess, SampleGenerator, DeliveredLists]:
    """A generator on this engine, its part that counts verified tokens, and what it delivered."""
    metrics = GeneratorMetrics.register(new_registry(), name)
    delivered = DeliveredLists()
    fakes: Any = (SlowRewards(), control, trainer, delivered)
    pool, control_line, trainer_line, recorder = fakes
    rewards = SampleRewards(pool, lambda tokens: " ".join(map(str, tokens)), metrics)
    generator = SampleGenerator(engine, rewards, sampling)
    process = GeneratorProcess(
        engine,
        generator,
        ControllerLine(name, control_line),
        trainer_line,
        GeneratorRecords(metrics, Activity(Timeline(None, name), metrics), samples=recorder),
    )
    return process, generator, delivered
