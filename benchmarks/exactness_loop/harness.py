"""The loop of a run in one process: scheduler, generator and engine are real, the trainer is not.

    Scheduler ─► commands ─► GeneratorProcess ─► engine ─► trajectories ─► Trainer
        ▲                         │                                          │
        └── delayed messages ◄────┴──────── published weights, delayed ◄─────┘

The trainer learns nothing. Two fixed sets of weights take turns, so that the distribution of each
step's trajectories is known. It publishes new weights a given number of *engine steps* after its
batch is complete, so that updates arrive in the middle of run-ahead rollouts, at various depths.
Messages of the generator reach the scheduler some engine steps late, as over a network. Neither
delay depends on text that is not drawn yet. (When the engine has no work left, delays end at once.)

messages    consumes: messages of the generator. produces: events, commands. waits for: messages,
            engine steps. bounded by: DEADLINE_SECONDS.
trainer     consumes: declared steps. produces: weights, `StepFinished`. waits for: engine steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.processes.generator.activity import Activity
from asyncrl.processes.generator.controller_line import ControllerLine
from asyncrl.processes.generator.generation import SampleGenerator
from asyncrl.processes.generator.process import GeneratorProcess
from asyncrl.processes.generator.reports import GeneratorRecords
from asyncrl.processes.generator.sample_rewards import SampleRewards
from asyncrl.rewards.calls import Reward
from asyncrl.run.sample_requests import sample_seed
from engine.protocol import Engine, SamplingParams
from monitoring.metrics import GeneratorMetrics, new_registry
from monitoring.timeline import Timeline
from rollout.trajectory import SampleId, Trajectory
from scheduler import commands, events
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from wire.frames import decode_trajectory
from wire.messages import data
from wire.messages import from_generator as fg
from wire.messages import to_generator as tg
from wire.records import RewardCounts
from wire.weights.layout import WeightManifest
from wire.weights.writer import WeightPublisher

NAME = "g0"
DEADLINE_SECONDS = 600.0
"""Of a whole run."""


@dataclass(frozen=True)
class LoopSettings:
    """How a loop is run."""

    scheduler: SchedulerConfig
    steps: int
    sampling: SamplingParams
    """`seed` is ignored: each sample has its own."""
    publish_delays: tuple[int, ...]
    """Engine steps between a complete batch and its new weights; one is drawn for each step."""
    message_delays: tuple[int, ...] = (0, 1, 2)
    """Engine steps that a message of the generator takes; one is drawn for each message."""
    lose_trainer_every: int = 0
    """In each so many steps the trainer once trains other policies than it should, for about a step
    or two, and is lost. Another one continues from the version before. 0: never."""
    install_delay: int = 0
    """Additional engine steps of the message that new weights are installed. So many steps samples
    continue under the new weights before their verification is requested."""
    seed: int = 0
    poll_seconds: float = 0.0003
    """Between looks at the engine's counters. Not 0: the torch engine steps in a thread, and
    polling without a pause holds the interpreter lock that it needs (10 times slower)."""


@dataclass(frozen=True)
class Delivered:
    """A trajectory that a step was trained on."""

    step: int
    prompt: int
    """Index of its prompt."""
    trajectory: Trajectory
    reward: float

    @property
    def text(self) -> tuple[int, ...]:
        """Response tokens."""
        return tuple(map(int, self.trajectory.tokens))


@dataclass(repr=False)
class Outcome:
    """What the trainer got."""

    delivered: list[Delivered] = field(default_factory=list)
    finished: dict[SampleId, int] = field(default_factory=dict)
    """Order in which samples were first reported finished (some were verified afterwards)."""
    verified: int = 0
    """Tokens of older versions that verification accepted."""
    rejected: int = 0
    """Tokens of older versions that verification rejected."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    rewinds: int = 0
    """How often the trainer was lost."""
    cut: int = 0
    """Requests that were running when the installation of new weights was commanded, summed."""


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


def reward_of(tokens: Iterator[int] | Sequence[int]) -> float:
    """A reward that differs between nearly all texts, so that a reward of another text shows."""
    value = 0.0
    for token in tokens:
        value = (value * 31 + token + 1) % 65_521
    return value


class Harness:
    """Runs the loop. Use once: `await Harness(...).run()`.

    Args:
        engine: started, with the weights of version 0: `policies[0]`.
        policies: state dicts that take turns: version v has `policies[v % len(policies)]`.
        prompts: visited in turn, each once in every epoch.
        settings: how the loop is run.
        directory: for published weights.
    """

    def __init__(
        self,
        engine: Engine,
        policies: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[int]],
        settings: LoopSettings,
        directory: Path,
    ) -> None:
        self.outcome = Outcome()
        self._engine = engine
        self._policies = policies
        self._prompts = [np.array(prompt, np.int32) for prompt in prompts]
        self._settings = settings
        self._publisher = WeightPublisher(directory, f"loop-{id(self):x}")
        self._manifest: WeightManifest | None = None
        self._rng = np.random.default_rng(settings.seed)
        self._scheduler = Scheduler(
            settings.scheduler,
            first_step=0,
            total_steps=settings.steps,
            group_key=lambda group: group % len(prompts),
        )
        self._messages: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._control = FakeLine(self._delay)
        self._trainer_line = FakeLine(self._receive)
        metrics = GeneratorMetrics.register(new_registry(), NAME)
        fakes: Any = (SlowRewards(), self._control, self._trainer_line)
        pool, control, trainer = fakes
        rewards = SampleRewards(pool, lambda tokens: " ".join(map(str, tokens)), metrics)
        self._generator = SampleGenerator(engine, rewards, settings.sampling)
        self._process = GeneratorProcess(
            engine,
            self._generator,
            ControllerLine(NAME, control),
            trainer,
            GeneratorRecords(metrics, Activity(Timeline(None, NAME), metrics)),
        )
        self._received: dict[SampleId, Delivered] = {}
        self._work: asyncio.TaskGroup | None = None
        self._last_arrival = self._reports = self._lineage = 0
        self._doomed_after: int | None = None
        """The trainer will be lost; later versions are other policies than they should be."""
        self._lost_at: set[int] = set()

    async def run(self) -> Outcome:
        """Run until the scheduler ends the run. Raises the error of a part, or TimeoutError."""
        with self._publisher:
            self._publish(0)
            async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as work:
                self._work = work
                messages = work.create_task(self._handle_messages())
                serving = work.create_task(self._process.run(metrics_port=None))
                await asyncio.wait([serving])
                messages.cancel()
        stats, counted = self._engine.stats(), self._generator.tokens
        self.outcome.accepted = stats.tokens.accepted
        self.outcome.verified = counted.verified
        self.outcome.rejected = counted.rejected
        return self.outcome

    # Messages of the generator, and time

    async def _engine_steps(self, until: int) -> None:
        """Wait until the engine has made so many steps or has no work left."""
        while True:
            stats = self._engine.stats()
            if stats.steps >= until or not stats.running + stats.waiting:
                return
            await asyncio.sleep(self._settings.poll_seconds)

    def _delay(self, message: Any) -> None:
        """Have a message arrive late, and after the messages before it."""
        if isinstance(message, fg.GeneratorReport):
            return
        delay = int(self._rng.choice(self._settings.message_delays))
        if isinstance(message, fg.WeightsInstalled):
            delay += self._settings.install_delay
        arrival = self._engine.stats().steps + delay
        self._last_arrival = max(self._last_arrival, arrival)
        self._messages.put_nowait((self._last_arrival, message))

    async def _handle_messages(self) -> None:
        while True:
            arrival, message = await self._messages.get()
            await self._engine_steps(arrival)
            match message:
                case fg.GeneratorReady():
                    self._tell(events.TrainerJoined(0))
                    self._tell(events.GeneratorJoined(NAME, message.slots, message.policy_version))
                case fg.SampleFinished():
                    self._reports += 1
                    self.outcome.finished.setdefault(message.sample, self._reports)
                    self._tell(
                        events.SampleFinished(
                            NAME,
                            message.sample,
                            message.length,
                            message.oldest_version,
                        )
                    )
                case fg.SampleDelivered():
                    self._tell(events.SampleDelivered(NAME, message.sample))
                case fg.WeightsInstalled():
                    self._tell(events.WeightsInstalled(NAME, message.policy_version))
                case fg.Rewound():
                    self._tell(
                        events.GeneratorRewound(NAME, message.lineage, message.policy_version)
                    )
                case fg.Goodbye():
                    return
                case _:
                    raise AssertionError(f"unexpected: {message}")

    # Commands of the scheduler

    def _tell(self, event: events.Event) -> None:
        """Pass an event to the scheduler and carry out its commands, as the controller does."""
        for command in self._scheduler.on_event(event):
            self._carry_out(command)

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.StartSample(sample=sample, priority=priority):
                prompt = self._payload(sample.group)
                seed = self._seed("training", sample)
                self._send(tg.Generate(sample, prompt, seed, priority))
            case commands.VerifySamples(samples=samples, min_version=version):
                seeds = tuple(
                    self._seed("verify", sample, version, self._lineage) for sample in samples
                )
                self._send(tg.Verify(samples, seeds, version))
            case commands.InstallWeights():
                assert self._manifest is not None
                self.outcome.cut += self._engine.stats().running
                rebuild = self._settings.scheduler.on_update == "recompute"
                self._send(tg.InstallWeights(self._manifest, rebuild, self._lineage))
            case commands.RewindGenerator(policy_version=version, lineage=lineage):
                self._send(tg.Rewind(version, lineage))
            case commands.DiscardSamples(samples=samples):
                self._send(tg.Discard(samples))
            case commands.DeliverGroup(step=step, samples=samples):
                ids = tuple(sample for _, sample in samples)
                self._send(tg.Deliver(step, ids, self._lineage))
            case commands.DeclareStep(step=step, groups=groups):
                assert self._work is not None
                self._work.create_task(self._train(step, groups))
            case commands.FinishRun(outcome=outcome):
                assert outcome is commands.RunOutcome.DONE, outcome
                self._send(tg.Shutdown())
            case _:
                raise AssertionError(f"unexpected: {command}")

    def _send(self, message: tg.ToGenerator) -> None:
        self._control.inbox.put_nowait(message)

    def _seed(self, purpose: str, sample: SampleId, *what: object) -> int:
        """The seed that the controller would choose."""
        return sample_seed(self._settings.seed, purpose, sample.group, sample.sample, *what)

    def _payload(self, group: int) -> tg.PromptPayload:
        index = group % len(self._prompts)
        tokens = self._prompts[index].astype("<i4").tobytes()
        return tg.PromptPayload(f"p{index}", tokens, {"prompt": f"{index}"})

    # The trainer

    def _receive(self, message: data.TrajectoryDelivery) -> None:
        if message.lineage != self._lineage:
            return
        trajectory = decode_trajectory(message)
        index = trajectory.id.group % len(self._prompts)
        assert trajectory.id not in self._received
        assert message.prompt_id == f"p{index}"
        self._received[trajectory.id] = Delivered(message.step, index, trajectory, message.reward)
        self._trainer_line.inbox.put_nowait(data.Received(trajectory.id, self._lineage))

    async def _train(self, step: int, groups: tuple[int, ...]) -> None:
        """Take the trajectories of a step and publish the next version some engine steps later."""
        scheduler = self._settings.scheduler
        per_step = scheduler.groups_per_step
        assert groups == tuple(range(step * per_step, (step + 1) * per_step))
        taken = [
            self._received.pop(SampleId(group, sample))
            for group in groups
            for sample in range(scheduler.group_size)
        ]
        assert {one.step for one in taken} == {step}
        lineage, every = self._lineage, self._settings.lose_trainer_every
        dooms = every and step % every == 1 and step not in self._lost_at
        if dooms and step + every < self._settings.steps:
            self._doomed_after = step
            self._lost_at.add(step)
        await self._engine_steps(self._engine.stats().steps + self._a_delay())
        if self._lineage != lineage:
            return
        if self._doomed_after is None:
            self.outcome.delivered += taken
        self._publish(step + 1)
        self._tell(events.WeightsPublished(step + 1))
        self._tell(events.StepFinished(step, groups))
        if self._doomed_after == step:
            await self._lose_trainer(step)

    def _a_delay(self) -> int:
        return int(self._rng.choice(self._settings.publish_delays))

    async def _lose_trainer(self, step: int) -> None:
        """Lose the trainer a few engine steps later; another one continues with this step."""
        await self._engine_steps(self._engine.stats().steps + 5 + self._a_delay())
        self._tell(events.TrainerLost())
        self._received.clear()
        self._doomed_after = None
        self._lineage += 1
        self.outcome.rewinds += 1
        self._publish(step)
        self._tell(events.TrainerJoined(step, self._lineage))

    def _publish(self, version: int) -> None:
        doomed = self._doomed_after is not None and version > self._doomed_after
        weights = self._policies[(version + doomed) % len(self._policies)]
        self._manifest = self._publisher.publish(weights.items(), version)
