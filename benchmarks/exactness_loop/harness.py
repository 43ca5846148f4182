"""One run's loop in one process: scheduler, generator and engine are real, the trainer is not.

    Scheduler ─► commands ─► GeneratorProcess ─► engine ─► trajectories ─► Trainer
        ▲                         │                                          │
        └──── news, late ◄────────┴──────── published weights, late ◄────────┘

The trainer learns nothing: two fixed sets of weights take turns, so that what each step must be
distributed as is known. It publishes a given number of *engine steps* after its step was complete,
so that updates land in the middle of rollouts that run ahead, each at another depth; news of the
generator reaches the scheduler some engine steps late, as over a network. Neither depends on text
that is not drawn yet. (Where nothing is left to draw, nothing is waited for.)

pump        consumes: news of the generator. produces: events, commands. waits for: news, engine
            steps. bounded by: the deadline of `run`.
trainer     consumes: declared steps. produces: weights, `StepFinished`. waits for: engine steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.processes.activity import Activity
from asyncrl.processes.controller_line import ControllerLine
from asyncrl.processes.generation import SampleGenerator
from asyncrl.processes.generator import GeneratorProcess
from asyncrl.processes.reports import GeneratorRecords
from asyncrl.processes.sample_rewards import SampleRewards
from asyncrl.run.sample_requests import sample_seed
from engine.protocol import Engine, SamplingParams
from monitoring.metrics import GeneratorMetrics, new_registry
from monitoring.timeline import Timeline
from rollout.trajectory import SampleId, Trajectory
from scheduler import commands as cmd
from scheduler import events as ev
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from wire.frames import decode_trajectory
from wire.messages import data
from wire.messages import from_generator as fg
from wire.messages import to_generator as tg
from wire.weights.layout import WeightManifest
from wire.weights.writer import WeightPublisher

NAME = "g0"
DEADLINE = 600.0
"""Seconds for a whole run."""


@dataclass(frozen=True)
class Setting:
    """How a loop is run."""

    scheduler: SchedulerConfig
    steps: int
    sampling: SamplingParams
    """`seed` is ignored: each sample has its own."""
    depths: tuple[int, ...] = (0, 1, 2, 3, 5, 8)
    """Engine steps from a whole batch to new weights; drawn from these, step by step."""
    latency: tuple[int, ...] = (0, 1, 2)
    """Engine steps until news of the generator is heard; drawn from these, message by message."""
    after_install: int = 0
    """More engine steps until it is heard that new weights are installed: how far samples are
    written on under them before their verification is ordered."""
    seed: int = 0
    nap: float = 0.0003
    """Seconds between looks at the engine's counters. Not 0: the torch engine steps in a thread,
    and polling without a pause holds the interpreter lock that it needs (10 times slower)."""


@dataclass(frozen=True)
class Delivered:
    """A trajectory that a step was trained on."""

    step: int
    prompt: int
    """Its index."""
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
    """Order in which samples were first reported finished (some were then still verified)."""
    verified: int = 0
    """Tokens of older versions that verification kept,"""
    rejected: int = 0
    """and that it did not."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    steps: int = 0
    """Of the engine."""
    cut: int = 0
    """Samples that were being written when new weights were commanded, summed over updates."""


class Wire:
    """The generator's end of a line."""

    def __init__(self, hear: Callable[[Any], None]) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._hear = hear

    async def send(self, message: Any) -> None:
        """To the other side."""
        self._hear(message)

    async def receive(self) -> Any:
        """From the other side."""
        return await self.inbox.get()


class Rewards:
    """Takes a few turns of the loop, so that updates find samples that wait for their reward."""

    waiting = running = failed = 0

    async def score(self, _prompt: str, text: str, _row: Any) -> float:
        """See `reward_of`."""
        for _ in range(4):
            await asyncio.sleep(0)
        return reward_of(map(int, text.split()))


def reward_of(tokens: Iterator[int] | Sequence[int]) -> float:
    """Differs for nearly all texts: a delivered reward must be that of the delivered text."""
    value = 0.0
    for token in tokens:
        value = (value * 31 + token + 1) % 65_521
    return value


class House:
    """The loop. Use once: `await House(...).run()`.

    Args:
        engine: started, with the weights of version 0: `policies[0]`.
        policies: state dicts that take turns: version v has `policies[v % len(policies)]`.
        prompts: visited in turn, so that each comes again in every epoch of so many groups.
        setting: the rest.
        directory: for published weights.
    """

    def __init__(
        self,
        engine: Engine,
        policies: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[int]],
        setting: Setting,
        directory: Path,
    ) -> None:
        self.outcome = Outcome()
        self._engine = engine
        self._policies = policies
        self._prompts = [np.array(prompt, np.int32) for prompt in prompts]
        self._setting = setting
        self._publisher = WeightPublisher(directory, f"loop-{id(self):x}")
        self._manifest: WeightManifest | None = None
        self._chance = np.random.default_rng(setting.seed)
        self.scheduler = Scheduler(
            setting.scheduler,
            first_step=0,
            total_steps=setting.steps,
            group_key=lambda group: group % len(prompts),
        )
        self._news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.control = Wire(self._hear)
        self.line = Wire(self._receive)
        metrics = GeneratorMetrics.register(new_registry(), NAME)
        fakes: Any = (Rewards(), self.control, self.line)
        pool, control, trainer = fakes
        rewards = SampleRewards(pool, lambda tokens: " ".join(map(str, tokens)), metrics)
        self._generator = SampleGenerator(engine, rewards, setting.sampling)
        self.process = GeneratorProcess(
            engine,
            self._generator,
            ControllerLine(NAME, control),
            trainer,
            GeneratorRecords(metrics, Activity(Timeline(None, NAME), metrics)),
        )
        self._received: dict[SampleId, Delivered] = {}
        self._work: asyncio.TaskGroup | None = None
        self._last_heard = self._reports = 0

    async def run(self) -> Outcome:
        """Until the scheduler ends the run. Raises what broke it, or TimeoutError."""
        with self._publisher:
            self._publish(0)
            async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as work:
                self._work = work
                pump = work.create_task(self._pump())
                serving = work.create_task(self.process.run(metrics_port=None))
                await asyncio.wait([serving])
                pump.cancel()
        stats, counted = self._engine.stats(), self._generator.tokens
        self.outcome.steps = stats.steps
        self.outcome.accepted = stats.tokens.accepted
        self.outcome.verified = counted.verified
        self.outcome.rejected = counted.rejected
        return self.outcome

    # ------------------------------------------------------------------ time

    async def _engine_steps(self, until: int) -> None:
        """Let the engine come to its `until`-th step, or to the end of its work."""
        while True:
            stats = self._engine.stats()
            if stats.steps >= until or not stats.running + stats.waiting:
                return
            await asyncio.sleep(self._setting.nap)

    def _hear(self, message: Any) -> None:
        """News is heard late, but in order."""
        if isinstance(message, fg.GeneratorReport):
            return
        late = int(self._chance.choice(self._setting.latency))
        if isinstance(message, fg.WeightsInstalled):
            late += self._setting.after_install
        self._last_heard = max(self._last_heard, self._engine.stats().steps + late)
        self._news.put_nowait((self._last_heard, message))

    async def _pump(self) -> None:
        while True:
            due, message = await self._news.get()
            await self._engine_steps(due)
            match message:
                case fg.GeneratorReady():
                    self.tell(ev.TrainerJoined(0))
                    self.tell(ev.GeneratorJoined(NAME, message.slots, message.policy_version))
                case fg.SampleFinished():
                    self._reports += 1
                    self.outcome.finished.setdefault(message.sample, self._reports)
                    self.tell(
                        ev.SampleFinished(
                            NAME,
                            message.sample,
                            message.length,
                            message.oldest_version,
                        )
                    )
                case fg.SampleDelivered():
                    self.tell(ev.SampleDelivered(NAME, message.sample))
                case fg.WeightsInstalled():
                    self.tell(ev.WeightsInstalled(NAME, message.policy_version))
                case fg.Goodbye():
                    return
                case _:
                    raise AssertionError(f"unexpected: {message}")

    # -------------------------------------------------------------- commands

    def tell(self, event: ev.Event) -> None:
        """A fact for the scheduler; its commands are carried out as the controller does."""
        for command in self.scheduler.on_event(event):
            self._carry_out(command)

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartSample(sample=sample, priority=priority):
                prompt = self._payload(sample.group)
                seed = self.seed_of("training", sample)
                self._say(tg.Generate(sample, prompt, seed, priority))
            case cmd.VerifySamples(samples=samples, min_version=version):
                seeds = tuple(self.seed_of("verify", sample, version) for sample in samples)
                self._say(tg.Verify(samples, seeds, version))
            case cmd.InstallWeights():
                assert self._manifest is not None
                self.outcome.cut += self._engine.stats().running
                rebuild = self._setting.scheduler.on_update == "recompute"
                self._say(tg.InstallWeights(self._manifest, rebuild))
            case cmd.DeliverGroup(step=step, samples=samples):
                self._say(tg.Deliver(step, tuple(sample for _, sample in samples)))
            case cmd.DeclareStep(step=step, groups=groups):
                assert self._work is not None
                self._work.create_task(self._train(step, groups))
            case cmd.FinishRun(outcome=outcome):
                assert outcome is cmd.RunOutcome.DONE, outcome
                self._say(tg.Shutdown())
            case _:
                raise AssertionError(f"unexpected: {command}")

    def _say(self, message: tg.ToGenerator) -> None:
        self.control.inbox.put_nowait(message)

    def seed_of(self, purpose: str, sample: SampleId, *what: object) -> int:
        """As `asyncrl.run.controller` has it."""
        return sample_seed(self._setting.seed, purpose, sample.group, sample.sample, *what)

    def _payload(self, group: int) -> tg.PromptPayload:
        index = group % len(self._prompts)
        tokens = self._prompts[index].astype("<i4").tobytes()
        return tg.PromptPayload(f"p{index}", tokens, {"prompt": f"{index}"})

    # --------------------------------------------------------------- trainer

    def _receive(self, message: data.TrajectoryDelivery) -> None:
        trajectory = decode_trajectory(message)
        index = trajectory.id.group % len(self._prompts)
        assert trajectory.id not in self._received
        assert message.prompt_id == f"p{index}"
        self._received[trajectory.id] = Delivered(message.step, index, trajectory, message.reward)
        self.line.inbox.put_nowait(data.Received(trajectory.id))

    async def _train(self, step: int, groups: tuple[int, ...]) -> None:
        """Take a step's trajectories; publish the next version after some engine steps."""
        size, per_step = self._setting.scheduler.group_size, self._setting.scheduler.groups_per_step
        assert groups == tuple(range(step * per_step, (step + 1) * per_step))
        for group in groups:
            for sample in range(size):
                one = self._received.pop(SampleId(group, sample))
                assert one.step == step
                self.outcome.delivered.append(one)
        wait = int(self._chance.choice(self._setting.depths))
        await self._engine_steps(self._engine.stats().steps + wait)
        self._publish(step + 1)
        self.tell(ev.WeightsPublished(step + 1))
        self.tell(ev.StepFinished(step, groups))

    def _publish(self, version: int) -> None:
        weights = self._policies[version % len(self._policies)]
        self._manifest = self._publisher.publish(weights.items(), version)
