"""Events in time order around the scheduler that runs live: generators, a trainer, their delays.

    scheduler ── commands ──► generators (`fleet`), trainer ── due events ──► scheduler

The trainer runs a group's tokens as soon as it has the group, one after the other, and steps when
all groups of the declared step are done.
"""

from __future__ import annotations

import gc
import heapq
import random
from dataclasses import dataclass, field

from asyncrl.simulation.cost import Costs
from asyncrl.simulation.fleet import Behaviour, Row, SimGenerator
from asyncrl.simulation.lengths import Lengths, Survival
from scheduler import commands as cmd
from scheduler import events as ev
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Setting:
    """One simulated run."""

    config: SchedulerConfig
    generators: int
    slots: int
    steps: int
    cost: Costs
    lengths: Lengths
    prompt_tokens: int = 200
    drift: float = 3e-4
    """Total variation per token and optimizer step."""
    redraft: float = 0.7
    """Chance that a token of the old continuation is accepted as a draft after a rejection."""
    survival: Survival = field(default_factory=Survival)
    """What verification keeps."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What came out, of the steps after the first `warm_up`."""

    step_seconds: float
    tokens_per_second: float
    generator_idle: float
    trainer_idle: float
    staleness_mean: float
    staleness_max: int
    regenerated: float
    """Tokens thrown away by verification over tokens trained on."""
    mean_length: float
    events: int


@dataclass(frozen=True, slots=True)
class _Report:
    """News of a sample that was written, void if it was begun again meanwhile."""

    generator: str
    row: Row
    finishes: int


Due = ev.Event | str | _Report
"""What happens: an event for the scheduler; a generator whose next row is done; ..."""


@dataclass(slots=True)
class _Trainer:
    """One queue of groups."""

    free_at: float = 0.0
    busy: float = 0.0
    groups: dict[int, float] = field(default_factory=dict)
    """When each delivered group will have been run."""
    plans: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Members of declared steps that are not trained."""
    step: int = 0
    """In hand; groups of later ones wait."""
    waiting: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By step: (group, seconds) of groups that came early."""

    def take(self, group: int, step: int, seconds: float, now: float) -> None:
        """A group has arrived."""
        if step != self.step:
            self.waiting.setdefault(step, []).append((group, seconds))
            return
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        self.groups[group] = self.free_at

    def finish(self, step: int, now: float) -> None:
        """A step is done: what came early for the next one can be run."""
        self.step = step + 1
        for group, seconds in self.waiting.pop(self.step, []):
            self.take(group, self.step, seconds, now)


class World:
    """A run from the first join to its end; use once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._scheduler = Scheduler(setting.config, first_step=0, total_steps=setting.steps)
        self._rng = random.Random(setting.seed)  # noqa: S311 - a simulation
        self._now = 0.0
        self._due: list[tuple[float, int, Due]] = []
        self._count = 0
        self._events = 0
        self._generators: dict[str, SimGenerator] = {}
        self._planned: dict[str, float] = {}
        self._trainer = _Trainer()
        self._arriving: dict[int, list[tuple[int, float, int]]] = {}
        self._trained: list[tuple[float, float, int, float, int]] = []
        self._ended = False
        self._message = setting.cost.message_seconds
        self._rewards_cost = setting.cost.reward(0) > 0
        self._rewards_free: dict[str, float] = {}
        """When a generator's last sample so far has its reward."""

    def run(self, warm_up: int = 2) -> Outcome:
        """Simulate, and sum up the steps from `warm_up` on."""
        setting = self._setting
        behaviour = Behaviour(
            setting.cost, setting.lengths, setting.prompt_tokens, setting.drift, setting.redraft,
            setting.survival, setting.config.on_update == "recompute",
        )  # fmt: skip
        for index in range(setting.generators):
            name = f"g{index}"
            rng = random.Random(self._rng.random())  # noqa: S311 - a simulation
            self._generators[name] = SimGenerator(name, setting.slots, behaviour, rng)
            self._tell(ev.GeneratorJoined(name, setting.slots, 0))
        gc.collect()
        gc.freeze()  # what is there stays; millions of objects need not be looked at again
        try:
            return self._follow(min(warm_up, setting.steps - 1))
        finally:
            gc.unfreeze()

    def _follow(self, warm_up: int) -> Outcome:
        """Event after event to the end of the run."""
        self._tell(ev.TrainerJoined(0))
        marks: dict[int, tuple[float, float, float, float]] = {}
        while not self._ended:
            self._now, _, what = heapq.heappop(self._due)
            if isinstance(what, str):
                self._wake(what)
            elif isinstance(what, _Report):
                self._report(what)
            else:
                self._tell(what)
            step = self._scheduler.state.step
            if step not in marks:
                marks[step] = self._mark()
        return self._sum_up(marks, warm_up)

    # Generators

    def _wake(self, name: str) -> None:
        """A row of this generator may be done."""
        if self._planned.get(name) != self._now:
            return
        generator = self._generators[name]
        del self._planned[name]
        generator.advance(self._now)
        while (row := generator.finished()) is not None:
            self._push(self._now + self._message, _Report(name, row, row.finishes))
            if self._rewards_cost and not row.rewarded_at:
                # Beside the slots, one sample after the other; delivery waits for it.
                free = max(self._now, self._rewards_free.get(name, 0.0))
                row.rewarded_at = free + self._setting.cost.reward(generator.decoding)
                self._rewards_free[name] = row.rewarded_at
        self._plan(generator)

    def _report(self, report: _Report) -> None:
        row = report.row
        if self._generators[report.generator].holds(row) and row.finishes == report.finishes:
            name = report.generator
            self._tell(ev.SampleFinished(name, row.sample, row.length, row.oldest))

    def _plan(self, generator: SimGenerator) -> None:
        """Look again when its next row is done."""
        end = generator.next_end()
        if end is not None:
            end = max(end, self._now)
            self._planned[generator.name] = end
            self._push(end, generator.name)

    # Events and commands

    def _tell(self, event: ev.Event) -> None:
        if isinstance(event, ev.WeightsInstalled):
            generator = self._generators[event.generator]
            generator.advance(self._now)
            generator.install(event.policy_version)
            self._plan(generator)
        self._events += 1
        touched: dict[str, SimGenerator] = {}
        for command in self._scheduler.on_event(event):
            self._carry_out(command, touched)
        for generator in touched.values():
            self._plan(generator)
        if isinstance(event, ev.StepFinished) and not self._ended:
            self._trainer.finish(event.step, self._now)
            self._train()
            self._after(self._message, ev.WeightsPublished(event.step + 1))

    def _carry_out(self, command: cmd.Command, touched: dict[str, SimGenerator]) -> None:
        match command:
            case cmd.StartSample(generator=name, sample=sample, priority=priority):
                self._touch(name, touched).start(sample, priority)
            case cmd.VerifySamples(generator=name, samples=samples, min_version=least):
                self._touch(name, touched).verify(samples, least)
            case cmd.InstallWeights(generator=name, policy_version=version):
                self._after(self._message, ev.WeightsInstalled(name, version))
            case cmd.DeliverGroup():
                self._deliver(command, touched)
            case cmd.DeclareStep(step=step, groups=groups):
                self._trainer.plans[step] = groups
                self._train()
            case cmd.DiscardSamples(generator=name, samples=samples):
                self._touch(name, touched).release(samples)
            case cmd.FinishRun():
                self._ended = True
            case _:
                pass

    def _touch(self, name: str, touched: dict[str, SimGenerator]) -> SimGenerator:
        generator = touched.get(name)
        if generator is None:
            generator = touched[name] = self._generators[name]
            generator.advance(self._now)
        return generator

    # The trainer

    def _deliver(self, command: cmd.DeliverGroup, touched: dict[str, SimGenerator]) -> None:
        tokens, arrives = 0.0, self._now
        versions: list[tuple[int, float]] = []
        for name, sample in command.samples:
            row = self._touch(name, touched).held(sample)
            tokens += row.length + self._setting.prompt_tokens
            versions += row.segments
            arrives = max(arrives, row.rewarded_at)
            touched[name].release((sample,))
        seconds = tokens * self._setting.cost.train_token_seconds
        arrives += self._message
        self._trainer.take(command.group, command.step, seconds, arrives)
        for name, sample in command.samples:
            self._push(arrives, ev.SampleDelivered(name, sample))
        ages = [(command.step - version, count) for version, count in versions]
        response = sum(count for _, count in ages)
        weighted = sum(age * count for age, count in ages)
        oldest = max(age for age, _ in ages)
        self._arriving.setdefault(command.step, []).append((oldest, weighted, round(response)))

    def _train(self) -> None:
        """The step in hand, once declared, ends when its last group has been run."""
        trainer = self._trainer
        groups = trainer.plans.pop(trainer.step, None)
        if groups is not None:
            end = max(trainer.groups.pop(group) for group in groups)
            end = max(end, self._now) + self._setting.cost.optimizer_seconds
            self._push(end, ev.StepFinished(trainer.step, groups))

    # Books

    def _mark(self) -> tuple[float, float, float, float]:
        """(time, generators' busy seconds, the trainer's, tokens rejected) so far."""
        for generator in self._generators.values():
            generator.advance(self._now)
        tallies = [generator.tally for generator in self._generators.values()]
        return (
            self._now,
            sum(tally.busy for tally in tallies),
            self._trainer.busy,
            sum(tally.rejected for tally in tallies),
        )

    def _sum_up(self, marks: dict[int, tuple[float, float, float, float]], first: int) -> Outcome:
        last = max(marks)
        began, ended = marks[first], marks[last]
        seconds = max(1e-9, ended[0] - began[0])
        rows = [row for step in range(first, last) for row in self._arriving.get(step, [])]
        tokens = max(1, sum(count for _, _, count in rows))
        samples = len(rows) * self._setting.config.group_size
        return Outcome(
            step_seconds=seconds / (last - first),
            tokens_per_second=tokens / seconds,
            generator_idle=1 - (ended[1] - began[1]) / seconds / self._setting.generators,
            trainer_idle=1 - (ended[2] - began[2]) / seconds,
            staleness_mean=sum(weighted for _, weighted, _ in rows) / tokens,
            staleness_max=max((oldest for oldest, _, _ in rows), default=0),
            regenerated=(ended[3] - began[3]) / tokens,
            mean_length=tokens / max(1, samples),
            events=self._events,
        )

    def _after(self, seconds: float, event: ev.Event) -> None:
        self._push(self._now + seconds, event)

    def _push(self, when: float, what: Due) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, what))
