"""The loop of a run in one process: scheduler, generators and engines are real, the trainer is not.

    Scheduler ─► commands ─► GeneratorProcess ─► engine ─► trajectories ─► Trainer
        ▲                    (one per engine)                                │
        └── delayed messages ◄────┴──────── published weights, delayed ◄─────┘

The trainer learns nothing. Two fixed sets of weights take turns, so that the distribution of each
step's trajectories is known. It publishes new weights a given number of *engine steps* after its
batch is complete, so that updates arrive in the middle of run-ahead rollouts, at various depths.
Messages of the generator reach the scheduler some engine steps late, as over a network. Neither
delay depends on text that is not drawn yet. (When the engine has no work left, delays end at once.)

In a fleet of several engines each group goes to one of them. If the run is killed, the next one may
give a group to another engine than the one that wrote its samples ahead, which verifies and
continues them. `Outcome.moved` counts them.

messages    consumes: messages of a generator. produces: events, commands. waits for: messages,
            engine steps. bounded by: DEADLINE_SECONDS.
trainer     consumes: declared steps. produces: weights, `StepFinished`. waits for: engine steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrl.config.run_config import parse_config
from asyncrl.controller.unfinished_work import UnfinishedWork
from asyncrl.engine.protocol import Engine
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.resuming import unfinished_folder
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.scheduler import Scheduler
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import data
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages.data import decode_trajectory
from asyncrl.wire.messages.to_generator import ToGenerator
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher
from whole_loop.member import EngineClock, Member, Turnover
from whole_loop.outcome import Delivered, LoopSettings, Outcome

_POLL_SECONDS = 0.001


class RunAhead:
    def __init__(
        self,
        generators: Callable[[], Sequence[str]],
        scheduler: SchedulerConfig,
        directory: Path,
        requests: SampleRequests,
        send: Callable[[str, ToGenerator], None],
    ) -> None:
        self._generators = generators
        self._directory = directory
        self._send = send
        config = parse_config({"scheduler": scheduler.model_dump()}, source="the loop")
        fleet: Any = SimpleNamespace(
            generators=lambda: [SimpleNamespace(name=name) for name in generators()],
            send=self._send_to,
            files=SimpleNamespace(bring_to_all=_bring),
        )
        self._work = UnfinishedWork(config, directory, fleet, requests, print)

    async def _send_to(self, name: str, message: ToGenerator) -> None:
        self._send(name, message)

    async def save(self, version: int, *, published: int) -> None:
        """The checkpoint of this version is written; returns when the run-ahead is on the disk."""
        await self._work.save(version, published=published)
        folder = unfinished_folder(self._directory, version)
        asked = set(self._generators())

        def missing() -> bool:
            asked.intersection_update(self._generators())  # one that leaves may not write it
            return not all((folder / f"{name}.bin").exists() for name in asked)

        while missing():  # noqa: ASYNC110 - threads write them
            await asyncio.sleep(_POLL_SECONDS)

    async def restore(self, version: int) -> None:
        await self._work.restore(version)


async def _bring(_paths: Iterable[str]) -> list[str]:
    return []


class Faults:
    """Chooses versions after which a trainer trains other policies than the next one will."""

    def __init__(self, settings: LoopSettings, first_step: int, *, resumed: bool) -> None:
        self.kills_run = settings.kill_run_every > 0
        """Whether the run is lost with its trainer."""
        self.after: int | None = None
        """Later versions will be lost. None: none will."""
        self._every = settings.kill_run_every or settings.lose_trainer_every
        self._steps = settings.steps
        self._chosen = {first_step} if resumed else set[int]()

    def begins(self, version: int) -> bool:
        """Whether the versions after this one, which was published now, will be lost."""
        if self.after is not None or not self._every or version % self._every != 1:
            return False
        if version in self._chosen or version + self._every >= self._steps:
            return False
        self.after = version
        self._chosen.add(version)
        return True

    def will_be_lost(self, version: int) -> bool:
        """Whether the next trainer publishes another policy under this number."""
        return self.after is not None and version > self.after


DEADLINE_SECONDS = 600.0
"""Of a whole run."""


class Harness:
    """Runs the loop. Use once: `await Harness(...).run()`."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        policies: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[int]],
        settings: LoopSettings,
        directory: Path,
        outcome: Outcome | None = None,
    ) -> None:
        self.outcome = outcome or Outcome()
        self._policies = policies
        self._settings = settings
        self._clock = EngineClock(list(engines.values()), settings.poll_seconds)
        self._publisher = WeightPublisher(directory, f"loop-{id(self):x}")
        self._newest: WeightManifest
        start = self.outcome.resumed
        self._first_step = self.outcome.next_step
        self._rng = np.random.default_rng((settings.seed, start) if start else settings.seed)
        self._requests = _requests(prompts, settings.seed, start)
        self._scheduler = Scheduler(
            settings.scheduler,
            first_step=self._first_step,
            total_steps=settings.steps,
            group_key=self._requests.prompt_index,
        )
        self._members = {
            name: Member(name, engine, settings, self._rng, self)
            for name, engine in engines.items()
        }
        self._run_ahead = RunAhead(
            self._staying, settings.scheduler, directory, self._requests, self._send
        )
        self._turnover = Turnover(
            settings, directory, self._requests, self._clock, self._rng, self._tell
        )
        self._received: dict[SampleId, Delivered] = {}
        self._work: asyncio.TaskGroup | None = None
        self._reports = self._lineage = 0
        self._faults = Faults(settings, self._first_step, resumed=start > 0)
        self._saving: asyncio.Task[None] | None = None
        self._killed = asyncio.Event()
        self._finished = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._serving = 0
        self._has_begun = self._is_over = False
        self._ready: dict[str, int] = {}
        """Version of each generator that has the weights with which training begins."""

    async def run(self) -> Outcome:
        """Run until the scheduler ends the run, or until it is killed.

        Raises the error of a part, or TimeoutError.
        """
        with self._publisher:
            self._publish(self._first_step)
            await self._run_ahead.restore(self._first_step)
            async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as work:
                self._work = work
                for member in self._members.values():
                    self._begin(member)
                ends = [work.create_task(one.wait()) for one in (self._finished, self._killed)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not self._killed.is_set():
                    self.outcome.next_step = self._settings.steps
                for task in (*ends, *self._tasks):
                    task.cancel()
        for member in self._members.values():
            self.outcome.count(member.tokens)
        return self.outcome

    def _begin(self, member: Member) -> None:
        """Have a generator serve, until it leaves or the run ends."""
        assert self._work is not None
        self._serving += 1
        self._tasks.append(self._work.create_task(member.pass_on_messages()))
        self._tasks.append(self._work.create_task(self._serve(member)))

    async def _serve(self, member: Member) -> None:
        await member.serve()
        if member.name in self._members:  # the run has ended
            self._serving -= 1
            if not self._serving:
                self._finished.set()
            return
        self.outcome.count(member.tokens)
        name = await self._turnover.next_name(member.name)
        self._serving -= 1
        if self._is_over:
            if not self._serving:
                self._finished.set()
            return
        self._members[name] = joiner = member.successor(name)
        self._begin(joiner)

    # Messages of the generators

    def on_message(self, member: Member, message: Any) -> None:
        """Tell the scheduler what a generator has reported."""
        name = member.name
        match message:
            case fg.GeneratorReady():
                member.slots = min(message.slots, self._settings.slots or message.slots)
                self._join(member, message.policy_version)
            case fg.SampleFinished():
                self._reports += 1
                self.outcome.finished.setdefault(message.sample, self._reports)
                self._tell(
                    events.SampleFinished(
                        name, message.sample, message.length, message.oldest_version
                    )
                )
            case fg.SampleDelivered():
                self._tell(events.SampleDelivered(name, message.sample))
            case fg.Released():
                assert self._work is not None
                self._work.create_task(self._turnover.take(name, message))
            case fg.WeightsInstalled() if not self._has_begun:
                self._join(member, message.policy_version)
            case fg.WeightsInstalled():
                self._tell(events.WeightsInstalled(name, message.policy_version))
            case fg.Rewound():
                self._tell(events.GeneratorRewound(name, message.lineage, message.policy_version))
            case _:
                raise AssertionError(f"unexpected: {message}")

    def _join(self, member: Member, version: int) -> None:
        """Training begins as soon as all generators have the weights that it begins with."""
        if self._has_begun:
            assert member.slots is not None
            self._tell(events.GeneratorJoined(member.name, member.slots, version))
            return
        if version < self._first_step:
            member.send(self._installation(()))
            return
        self._ready[member.name] = version
        if len(self._ready) < len(self._members):
            return
        self._has_begun = True
        self._tell(events.TrainerJoined(self._first_step))
        for name, ready in self._ready.items():
            slots = self._members[name].slots
            assert slots is not None
            self._tell(events.GeneratorJoined(name, slots, ready))

    # Commands of the scheduler

    def _tell(self, event: events.Event) -> None:
        """Pass an event to the scheduler and carry out its commands, as the controller does."""
        for command in self._scheduler.on_event(event):
            match command:
                case commands.ReleaseSamples(generator=name):
                    self._send(name, self._turnover.request(command))
                case commands.EndGenerator(generator=name):
                    self._send(name, tg.Shutdown())
                    del self._members[name]
                case _:
                    self._carry_out(command)

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.StartSample(generator=name, sample=sample, priority=priority):
                request = self._requests.generate(sample, priority)
                self.outcome.begins(name, request)
                self._send(name, request)
            case commands.VerifySamples(generator=name, samples=samples, min_version=version):
                self._send(name, self._requests.verify(samples, version, lineage=self._lineage))
            case commands.InstallWeights(generator=name, verify=due):
                self.outcome.cut += self._members[name].running
                self._send(name, self._installation(due))
            case commands.RewindGenerator(generator=name, policy_version=version, lineage=lineage):
                self._send(name, tg.Rewind(version, lineage))
            case commands.DiscardSamples(generator=name, samples=samples):
                self._send(name, tg.Discard(samples))
            case commands.DeliverGroup(step=step, samples=samples):
                for name in {holder for holder, _ in samples}:
                    ids = tuple(sample for holder, sample in samples if holder == name)
                    self._send(name, tg.Deliver(step, ids, self._lineage))
            case commands.DeclareStep(step=step, groups=groups):
                assert self._work is not None
                self._work.create_task(self._train(step, groups))
            case commands.FinishRun(outcome=outcome):
                assert outcome is commands.RunOutcome.DONE, outcome
                self._is_over = True
                for name in self._members:
                    self._send(name, tg.Shutdown())
            case _:
                raise AssertionError(f"unexpected: {command}")

    def _staying(self) -> list[str]:
        """Generators that have joined and do not leave."""
        known = self._scheduler.state.generators
        return [name for name, generator in known.items() if not generator.leaving]

    def _send(self, name: str, message: tg.ToGenerator) -> None:
        self._members[name].send(message)

    def _installation(self, due: Sequence[commands.VerifySamples]) -> tg.InstallWeights:
        """The command to install the newest published weights."""
        rebuild = self._settings.scheduler.on_update == "recompute"
        return _installation(self._newest, self._requests, due, rebuild, self._lineage)

    # The trainer

    def on_delivery(self, member: Member, message: data.TrajectoryDelivery) -> None:
        """The trainer receives a trajectory, unless it was for one that is gone."""
        if message.lineage != self._lineage:
            return
        trajectory = member.lists.of(decode_trajectory(message))
        index = self._requests.prompt_index(trajectory.id.group)
        assert trajectory.id not in self._received
        assert message.prompt_id == f"p{index}"
        self._received[trajectory.id] = Delivered(
            message.step, index, trajectory, message.reward, member.name
        )
        member.acknowledge(data.Received(trajectory.id, self._lineage))

    async def _train(self, step: int, groups: tuple[int, ...]) -> None:
        """Take the trajectories of a step and publish the next version some engine steps later."""
        assert self._work is not None
        scheduler = self._settings.scheduler
        per_step = scheduler.groups_per_step
        assert groups == tuple(range(step * per_step, (step + 1) * per_step))
        taken = [
            self._received.pop(SampleId(group, sample))
            for group in groups
            for sample in range(scheduler.group_size)
        ]
        assert {one.step for one in taken} == {step}
        lineage = self._lineage
        await self._clock.until(self._clock.now + self._a_delay())
        if self._lineage != lineage:
            return
        if self._faults.after is None:
            self.outcome.delivered += taken
        self._publish(step + 1)
        self._tell(events.WeightsPublished(step + 1))
        self._work.create_task(self._turnover.after(step + 1, self._members))
        self._tell(events.StepFinished(step, groups))
        if self._settings.depth_by_tokens and lineage == self._lineage:
            depth = sum(len(one.trajectory.tokens) for one in taken) % 4
            changed = scheduler.model_copy(update={"max_runahead_groups": depth * per_step})
            first = self._scheduler.state.first_free_step
            self._tell(events.BoundsChanged({first: changed}))
        if self._faults.after == step:
            await self._lose(step)
        elif self._faults.begins(step + 1) and self._faults.kills_run:
            self._saving = self._work.create_task(self._save_run_ahead(step + 1))

    def _a_delay(self) -> int:
        return int(self._rng.choice(self._settings.publish_delays))

    async def _save_run_ahead(self, step: int) -> None:
        """The checkpoint of a version is written soon after it was published, or later."""
        await self._clock.until(self._clock.now + int(self._rng.choice((0, 8))))
        await self._run_ahead.save(step, published=self._newest.policy_version)

    async def _lose(self, step: int) -> None:
        """Lose the trainer a few engine steps later; another one continues with this step.

        Or lose the whole run. Then `outcome` says where another one continues.
        """
        await self._clock.until(self._clock.now + 5 + self._a_delay())
        self._received.clear()
        self._lineage += 1
        if self._saving is not None:
            await self._saving
            self.outcome.resumed += 1
            self.outcome.next_step = step
            self._killed.set()
            return
        self._tell(events.TrainerLost())
        self._faults.after = None
        self.outcome.rewinds += 1
        self._publish(step)
        self._tell(events.TrainerJoined(step, self._lineage))

    def _publish(self, version: int) -> None:
        other = self._faults.will_be_lost(version)
        weights = self._policies[(version + other) % len(self._policies)]
        self._newest = self._publisher.publish(weights.items(), version)


def _requests(prompts: Sequence[Sequence[int]], seed: int, start: int) -> SampleRequests:
    train = [
        Prompt(f"p{index}", np.array(tokens, np.int32), "", {"prompt": f"{index}"})
        for index, tokens in enumerate(prompts)
    ]
    requests = SampleRequests(Task(train, (), (), tokenizer=None), seed, start)
    requests.starts_from("the first of the policies")
    return requests


def _installation(
    newest: WeightManifest,
    requests: SampleRequests,
    due: Sequence[commands.VerifySamples],
    rebuild: bool,
    lineage: int,
) -> tg.InstallWeights:
    asked = (requests.verify(one.samples, one.min_version, lineage=lineage) for one in due)
    return tg.InstallWeights(newest, rebuild, lineage, tuple(asked))
