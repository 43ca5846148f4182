"""One generator of the loop: a real generator process on a real engine, whose messages are late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import AsyncMock

import numpy as np

from asyncrl.config.run_config import parse_config
from asyncrl.controller.unfinished_work import SampleHandover
from asyncrl.engine.protocol import Engine, SamplingParams
from asyncrl.fleet.node_files import NodeFiles
from asyncrl.generator.activity import Activity
from asyncrl.generator.background import ControllerLine
from asyncrl.generator.process import GeneratorProcess
from asyncrl.generator.reports import GeneratorRecords
from asyncrl.generator.sample_rewards import SampleRewards
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import SampleId, Trajectory, VerifiableTrajectory
from asyncrl.scheduler import commands, events
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import data
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import TokenCounts
from whole_loop.outcome import LoopSettings, reward_of


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

    def send_soon(self, message: Any, *, urgent: bool | None = None) -> None:
        """Pass a message to the other side."""
        self._on_send(message)

    async def receive(self) -> Any:
        """Wait for a message from the other side."""
        return await self.inbox.get()


class SlowRewards:
    """Take a few turns of the event loop, so that updates find samples without a reward."""

    waiting = running = 0
    longest = ("", 0.0)
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
    name: str, engine: Engine, sampling: SamplingParams, control: FakeLine, trainer: FakeLine
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


class Turnover:
    """Orders generators to leave, as `asyncrl scale` does; the real `SampleHandover` of a run.

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
        files = AsyncMock(spec=NodeFiles)  # all see the same folder
        self._moves = SampleHandover(config, directory, requests, print, files)
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
        await self._moves.take(generator, answer, is_lost=lambda: False)
        self._tell(events.SamplesReleased(generator))

    async def next_name(self, left: str) -> str:
        """The name of the generator that joins on the engine of one that has left, soon after."""
        await self._clock.until(self._clock.now + int(self._rng.integers(0, 10)))
        self._joined += 1
        return f"{left.partition('.')[0]}.{self._joined}"


class Loop(Protocol):
    """The scheduler's and the trainer's side of a member's lines."""

    def on_message(self, member: Member, message: Any) -> None:
        """A message to the scheduler has arrived."""

    def on_delivery(self, member: Member, message: data.TrajectoryDelivery) -> None:
        """A trajectory has arrived at the trainer."""


class Member:
    """A generator and its lines to the scheduler and the trainer."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        settings: LoopSettings,
        rng: np.random.Generator,
        loop: Loop,
    ) -> None:
        self.name = name
        self.slots: int | None = None
        """That the scheduler is told of; None until the generator is ready."""
        self._engine = engine
        self._settings = settings
        self._rng = rng
        self._loop = loop
        self._accepted_before = engine.stats().tokens.accepted
        self._clock = EngineClock([engine], settings.poll_seconds)
        self._last_arrival = self._clock.now
        self._messages: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._control = FakeLine(self._delay)
        self._trainer = FakeLine(lambda message: loop.on_delivery(self, message))
        self._process, self._generator, self.lists = generator_process(
            name, engine, settings.sampling, self._control, self._trainer
        )

    def successor(self, name: str) -> Member:
        return Member(name, self._engine, self._settings, self._rng, self._loop)

    @property
    def running(self) -> int:
        return self._engine.stats().running

    @property
    def tokens(self) -> TokenCounts:
        """Verified and rejected tokens, and accepted drafts, of this run."""
        accepted = self._engine.stats().tokens.accepted - self._accepted_before
        return self._generator.tokens + TokenCounts(accepted=accepted)

    def send(self, message: tg.ToGenerator) -> None:
        self._control.inbox.put_nowait(message)

    def acknowledge(self, message: data.Received) -> None:
        self._trainer.inbox.put_nowait(message)

    async def serve(self) -> None:
        """Run the generator until it is told to shut down."""
        await self._process.run(metrics_port=None)

    async def pass_on_messages(self) -> None:
        """Pass each message on when it is due, the last one included."""
        while True:
            arrival, message = await self._messages.get()
            await self._clock.until(arrival)
            if isinstance(message, fg.Goodbye):
                return
            self._loop.on_message(self, message)

    def _delay(self, message: Any) -> None:
        """Have a message arrive late, and after the messages before it."""
        if isinstance(message, fg.GeneratorReport):
            return
        delays = self._settings.message_delays
        delay = delays[self._rng.integers(len(delays))]  # `choice` takes ten times as long
        if isinstance(message, fg.WeightsInstalled):
            delay += self._settings.install_delay
        self._last_arrival = max(self._last_arrival, self._clock.now + delay)
        self._messages.put_nowait((self._last_arrival, message))
