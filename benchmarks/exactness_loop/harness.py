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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.run.sample_requests import SampleRequests
from asyncrl.tasks.prompts import LoadedTask, Prompt
from benchmarks.exactness_loop.faults import Faults
from benchmarks.exactness_loop.generator import NAME, EngineClock, FakeLine, generator_process
from benchmarks.exactness_loop.outcome import Delivered, LoopSettings, Outcome
from benchmarks.exactness_loop.run_ahead import RunAhead
from engine.protocol import Engine
from rollout.trajectory import SampleId
from scheduler import commands, events
from scheduler.scheduler import Scheduler
from wire.frames import decode_trajectory
from wire.messages import data
from wire.messages import from_generator as fg
from wire.messages import to_generator as tg
from wire.weights.layout import WeightManifest
from wire.weights.writer import WeightPublisher

DEADLINE_SECONDS = 600.0
"""Of a whole run."""


class Harness:
    """Runs the loop. Use once: `await Harness(...).run()`.

    Args:
        engine: started, with the weights of version 0: `policies[0]`.
        policies: state dicts that take turns: version v has `policies[v % len(policies)]`.
        prompts: visited in the order of a run, each once in every epoch.
        settings: how the loop is run.
        directory: for published weights and saved run-ahead.
        outcome: of the run that this one resumes; None if it is the first.
    """

    def __init__(
        self,
        engine: Engine,
        policies: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[int]],
        settings: LoopSettings,
        directory: Path,
        outcome: Outcome | None = None,
    ) -> None:
        self.outcome = outcome or Outcome()
        self._engine = engine
        self._policies = policies
        self._settings = settings
        self._clock = EngineClock(engine, settings.poll_seconds)
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
        self._messages: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._control = FakeLine(self._delay)
        self._trainer_line = FakeLine(self._receive)
        self._process, self._generator, self._lists = generator_process(
            engine, settings.sampling, self._control, self._trainer_line
        )
        self._run_ahead = RunAhead(settings.scheduler, directory, self._requests, self._send)
        self._received: dict[SampleId, Delivered] = {}
        self._work: asyncio.TaskGroup | None = None
        self._last_arrival = self._reports = self._lineage = 0
        self._faults = Faults(settings, self._first_step, resumed=start > 0)
        self._saving: asyncio.Task[None] | None = None
        self._killed = asyncio.Event()
        self._slots: int | None = None
        """Of the generator, until the scheduler is told of it."""

    async def run(self) -> Outcome:
        """Run until the scheduler ends the run, or until it is killed.

        Returns:
            The outcome so far. The run is complete if it has every step (`Outcome.next_step`).

        Raises the error of a part, or TimeoutError.
        """
        with self._publisher:
            self._publish(self._first_step)
            await self._run_ahead.restore(self._first_step)
            async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as work:
                self._work = work
                messages = work.create_task(self._handle_messages())
                serving = work.create_task(self._process.run(metrics_port=None))
                killed = work.create_task(self._killed.wait())
                await asyncio.wait([serving, killed], return_when=asyncio.FIRST_COMPLETED)
                if not self._killed.is_set():
                    self.outcome.next_step = self._settings.steps
                for task in (serving, killed, messages):
                    task.cancel()
        stats, counted = self._engine.stats(), self._generator.tokens
        self.outcome.accepted += stats.tokens.accepted
        self.outcome.verified += counted.verified
        self.outcome.rejected += counted.rejected
        return self.outcome

    # Messages of the generator, and time

    def _delay(self, message: Any) -> None:
        """Have a message arrive late, and after the messages before it."""
        if isinstance(message, fg.GeneratorReport):
            return
        delay = int(self._rng.choice(self._settings.message_delays))
        if isinstance(message, fg.WeightsInstalled):
            delay += self._settings.install_delay
        self._last_arrival = max(self._last_arrival, self._clock.now + delay)
        self._messages.put_nowait((self._last_arrival, message))

    async def _handle_messages(self) -> None:
        while True:
            arrival, message = await self._messages.get()
            await self._clock.until(arrival)
            match message:
                case fg.GeneratorReady():
                    self._slots = message.slots
                    self._join(message.policy_version)
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
                case fg.WeightsInstalled() if self._slots is not None:
                    self._join(message.policy_version)
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

    def _join(self, version: int) -> None:
        """Training begins as soon as the generator has the weights that it begins with."""
        if version < self._first_step:
            self._send(self._installation(()))
            return
        assert self._slots is not None
        slots, self._slots = self._slots, None
        self._tell(events.TrainerJoined(self._first_step))
        self._tell(events.GeneratorJoined(NAME, slots, version))

    # Commands of the scheduler

    def _tell(self, event: events.Event) -> None:
        """Pass an event to the scheduler and carry out its commands, as the controller does."""
        for command in self._scheduler.on_event(event):
            self._carry_out(command)

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.StartSample(sample=sample, priority=priority):
                request = self._requests.generate(sample, priority)
                continues = self.outcome.restored
                (continues.add if request.unfinished else continues.discard)(sample)
                self._send(request)
            case commands.VerifySamples(samples=samples, min_version=version):
                self._send(self._requests.verify(samples, version, lineage=self._lineage))
            case commands.InstallWeights(verify=due):
                self.outcome.cut += self._engine.stats().running
                self._send(self._installation(due))
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

    def _installation(self, due: Sequence[commands.VerifySamples]) -> tg.InstallWeights:
        """The command to install the newest published weights."""
        rebuild = self._settings.scheduler.on_update == "recompute"
        return _installation(self._newest, self._requests, due, rebuild, self._lineage)

    # The trainer

    def _receive(self, message: data.TrajectoryDelivery) -> None:
        if message.lineage != self._lineage:
            return
        trajectory = self._lists.of(decode_trajectory(message))
        index = self._requests.prompt_index(trajectory.id.group)
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
        lineage = self._lineage
        await self._clock.until(self._clock.now + self._a_delay())
        if self._lineage != lineage:
            return
        if self._faults.after is None:
            self.outcome.delivered += taken
        self._publish(step + 1)
        self._tell(events.WeightsPublished(step + 1))
        self._tell(events.StepFinished(step, groups))
        if self._faults.after == step:
            await self._lose(step)
        elif self._faults.begins(step + 1) and self._faults.kills_run:
            assert self._work is not None
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
    requests = SampleRequests(LoadedTask(train, (), (), tokenizer=None), seed, start)
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
