"""A discrete-event simulation around the live scheduler: generators, one trainer, and delays.

    scheduler ── commands ──► generators (`sim_generator`), trainer ── due events ──► scheduler

The trainer processes groups one after the other, each as soon as it has arrived, and does the
optimizer step when all groups of the declared step are processed.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.simulation.cost import Costs
from asyncrl.simulation.lengths import Lengths, Survival
from asyncrl.simulation.sim_generator import GeneratorSetting, SimGenerator, SimRequest
from rollout.trajectory import SampleId
from scheduler import commands, events
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Setting:
    """What a simulated run is given."""

    config: SchedulerConfig
    generators: int
    slots: int
    """Of each generator."""
    steps: int
    cost: Costs
    """Seconds of decoding, scoring, training and messages."""
    lengths: Lengths
    """Draws the length of an answer."""
    known: Mapping[SampleId, int] = field(default_factory=dict)
    """Lengths of answers that are not drawn, to repeat a real run."""
    prompt_tokens: float = 200
    """Tokens of every prompt."""
    drift: float = 3e-4
    """Total variation per token and optimizer step."""
    redraft: float = 0.7
    """Chance that a token of the old continuation is accepted as a draft after a rejection."""
    new_length: float = 0.0
    """Chance that a rejected answer gets another length, drawn among those longer than what stays;
    otherwise it keeps the one that it had."""
    survival: Survival = field(default_factory=Survival)
    """How much of a sample verification accepts."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Results of a simulated run, over the steps after the first `warm_up` ones."""

    step_seconds: float
    """Mean seconds of a step."""
    tokens_per_second: float
    """Response tokens trained on."""
    generator_idle: float
    """Share of the generators' time in which they neither decode nor score, 0 to 1."""
    trainer_idle: float
    """Share of the trainer's time in which it processes no group, 0 to 1."""
    staleness_mean: float
    """Mean over the tokens trained on, in steps."""
    staleness_max: int
    """Largest staleness of a token trained on, in steps."""
    regenerated: float
    """Tokens rejected by verification over tokens trained on."""
    mean_length: float
    """Response tokens of a sample."""
    events: int
    """Events that the scheduler was told, in the whole run."""


@dataclass(frozen=True, slots=True)
class _FinishedReport:
    """The message that a sample is finished; outdated if the sample was resumed since."""

    generator: str
    request: SimRequest
    finishes: int
    """`request.finishes` when the message was sent."""


Due = events.Event | str | _FinishedReport
"""What is due: an event for the scheduler, the name of a generator whose next request is done, or
the message that a sample is finished."""


@dataclass(slots=True)
class _Trainer:
    """One queue of groups."""

    free_at: float = 0.0
    """Time at which the groups that it has are processed."""
    busy: float = 0.0
    """Seconds spent on groups."""
    groups: dict[int, float] = field(default_factory=dict)
    """Time at which each delivered group of the current step is processed."""
    declared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of the declared steps that are not trained yet."""
    step: int = 0
    """The current step; groups of later steps wait."""
    waiting: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By step: (group, seconds) of the groups that wait for it."""

    def take(self, group: int, step: int, seconds: float, now: float) -> None:
        """Take a group that arrives at the time `now`."""
        if step != self.step:
            self.waiting.setdefault(step, []).append((group, seconds))
            return
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        self.groups[group] = self.free_at

    def finish(self, step: int, now: float) -> None:
        """Finish a step, and take the groups that wait for the next one."""
        self.step = step + 1
        for group, seconds in self.waiting.pop(self.step, []):
            self.take(group, self.step, seconds, now)


class World:
    """One simulated run, from the first join to its end. Use once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._scheduler = Scheduler(setting.config, first_step=0, total_steps=setting.steps)
        self._rng = random.Random(setting.seed)  # noqa: S311 - a simulation
        self._now = 0.0
        self._due: list[tuple[float, int, Due]] = []
        """Heap of (time, order of scheduling, what is due)."""
        self._count = 0
        self._events = 0
        self._generators: dict[str, SimGenerator] = {}
        self._wake_at: dict[str, float] = {}
        """By generator: when its next request is done, if nothing changes."""
        self._trainer = _Trainer()
        self._delivered: dict[int, list[tuple[int, float, int]]] = {}
        """By step, one entry per group: (largest staleness, sum of staleness, response tokens)."""
        self._ended = False
        self._verifies: dict[str, tuple[commands.VerifySamples, ...]] = {}
        """By generator: what it verifies as soon as the weights of its install are swapped in."""
        self._message = setting.cost.message_seconds
        self._rewards_cost = setting.cost.reward(0) > 0
        self._rewards_free: dict[str, float] = {}
        """By generator: time at which all rewards requested so far are computed."""

    def run(self, warm_up: int = 2, end: int | None = None) -> Outcome:
        """Simulate the run; the outcome covers the steps from `warm_up` on, up to `end`."""
        setting = self._setting
        shared = GeneratorSetting(
            setting.cost, setting.lengths, setting.known, setting.prompt_tokens, setting.drift,
            setting.redraft, setting.new_length, setting.survival,
            setting.config.on_update == "recompute",
        )  # fmt: skip
        for index in range(setting.generators):
            name = f"g{index}"
            rng = random.Random(self._rng.random())  # noqa: S311 - a simulation
            self._generators[name] = SimGenerator(name, setting.slots, shared, rng)
            self._tell(events.GeneratorJoined(name, setting.slots, 0))
        gc.collect()
        gc.freeze()  # later collections do not scan the objects made so far
        try:
            return self._play(min(warm_up, setting.steps - 1), end)
        finally:
            gc.unfreeze()

    def _play(self, warm_up: int, end: int | None) -> Outcome:
        """Process what is due, in time order, until the run ends."""
        self._tell(events.TrainerJoined(0))
        marks: dict[int, tuple[float, float, float, float]] = {}
        while not self._ended:
            self._now, _, due = heapq.heappop(self._due)
            if isinstance(due, str):
                self._wake(due)
            elif isinstance(due, _FinishedReport):
                self._report(due)
            else:
                self._tell(due)
            step = self._scheduler.state.step
            if step not in marks:
                marks[step] = self._mark()
        return self._sum_up(marks, warm_up, max(marks) if end is None else end)

    # -------------------------------------------------------------- generators

    def _wake(self, name: str) -> None:
        """Take the finished requests of a generator, unless its plan has changed since."""
        if self._wake_at.get(name) != self._now:
            return
        generator = self._generators[name]
        del self._wake_at[name]
        generator.advance(self._now)
        while (request := generator.next_finished()) is not None:
            report = _FinishedReport(name, request, request.finishes)
            self._push(self._now + self._message, report)
            if self._rewards_cost and not request.rewarded_at:
                # Rewards are computed outside the slots, one at a time; delivery waits for them.
                free = max(self._now, self._rewards_free.get(name, 0.0))
                request.rewarded_at = free + self._setting.cost.reward(generator.decoding)
                self._rewards_free[name] = request.rewarded_at
        self._plan(generator)

    def _report(self, report: _FinishedReport) -> None:
        name, request = report.generator, report.request
        if self._generators[name].holds(request) and request.finishes == report.finishes:
            sample, length = request.sample, request.length
            self._tell(events.SampleFinished(name, sample, length, request.oldest_version))

    def _plan(self, generator: SimGenerator) -> None:
        """Wake the generator when its next request is done."""
        end = generator.next_end()
        if end is not None:
            end = max(end, self._now)
            self._wake_at[generator.name] = end
            self._push(end, generator.name)

    # ----------------------------------------------------- events and commands

    def _tell(self, event: events.Event) -> None:
        if isinstance(event, events.WeightsInstalled):
            generator = self._generators[event.generator]
            generator.advance(self._now)
            generator.install(event.policy_version)
            for due in self._verifies.pop(event.generator, ()):
                generator.verify(due.samples, due.min_version)
            self._plan(generator)
        self._events += 1
        touched: dict[str, SimGenerator] = {}
        for command in self._scheduler.on_event(event):
            self._carry_out(command, touched)
        for generator in touched.values():
            self._plan(generator)
        if isinstance(event, events.StepFinished) and not self._ended:
            self._trainer.finish(event.step, self._now)
            self._train()
            self._after(self._message, events.WeightsPublished(event.step + 1))

    def _carry_out(self, command: commands.Command, touched: dict[str, SimGenerator]) -> None:
        match command:
            case commands.StartSample(generator=name, sample=sample, priority=priority):
                self._touch(name, touched).start(sample, priority)
            case commands.VerifySamples(generator=name, samples=samples, min_version=version):
                self._touch(name, touched).verify(samples, version)
            case commands.InstallWeights(generator=name, policy_version=version, verify=due):
                self._verifies[name] = due
                staged = self._message + self._setting.cost.stage_seconds
                self._after(staged, events.WeightsInstalled(name, version))
            case commands.DeliverGroup():
                self._deliver(command, touched)
            case commands.DeclareStep(step=step, groups=groups):
                self._trainer.declared[step] = groups
                self._train()
            case commands.DiscardSamples(generator=name, samples=samples):
                self._touch(name, touched).release(samples)
            case commands.FinishRun():
                self._ended = True
            case _:
                pass

    def _touch(self, name: str, touched: dict[str, SimGenerator]) -> SimGenerator:
        """A generator, advanced to now; its plan is made again after the event."""
        generator = touched.get(name)
        if generator is None:
            generator = touched[name] = self._generators[name]
            generator.advance(self._now)
        return generator

    # ----------------------------------------------------------------- trainer

    def _deliver(self, command: commands.DeliverGroup, touched: dict[str, SimGenerator]) -> None:
        """Give a group to the trainer once all its rewards are computed."""
        tokens, arrives = 0.0, self._now
        segments: list[tuple[int, float]] = []
        for name, sample in command.samples:
            request = self._touch(name, touched).held(sample)
            tokens += request.length + self._setting.prompt_tokens
            segments += request.segments
            arrives = max(arrives, request.rewarded_at)
            touched[name].release((sample,))
        seconds = tokens * self._setting.cost.train_token_seconds
        arrives += self._message
        self._trainer.take(command.group, command.step, seconds, arrives)
        for name, sample in command.samples:
            self._push(arrives, events.SampleDelivered(name, sample))
        ages = [(command.step - version, count) for version, count in segments]
        response = sum(count for _, count in ages)
        weighted = sum(age * count for age, count in ages)
        oldest = max(age for age, _ in ages)
        self._delivered.setdefault(command.step, []).append((oldest, weighted, round(response)))

    def _train(self) -> None:
        """Schedule the end of the current step, if the step is declared."""
        trainer = self._trainer
        groups = trainer.declared.pop(trainer.step, None)
        if groups is not None:
            end = max(trainer.groups.pop(group) for group in groups)
            end = max(end, self._now) + self._setting.cost.optimizer_seconds
            self._push(end, events.StepFinished(trainer.step, groups))

    # ----------------------------------------------------------------- results

    def _mark(self) -> tuple[float, float, float, float]:
        """(time, busy seconds of the generators, of the trainer, rejected tokens) so far."""
        for generator in self._generators.values():
            generator.advance(self._now)
        tallies = [generator.tally for generator in self._generators.values()]
        return (
            self._now,
            sum(tally.busy for tally in tallies),
            self._trainer.busy,
            sum(tally.rejected for tally in tallies),
        )

    def _sum_up(
        self, marks: dict[int, tuple[float, float, float, float]], first: int, last: int
    ) -> Outcome:
        began, ended = marks[first], marks[last]
        seconds = max(1e-9, ended[0] - began[0])
        groups = [entry for step in range(first, last) for entry in self._delivered.get(step, [])]
        tokens = max(1, sum(count for _, _, count in groups))
        samples = len(groups) * self._setting.config.group_size
        return Outcome(
            step_seconds=seconds / (last - first),
            tokens_per_second=tokens / seconds,
            generator_idle=1 - (ended[1] - began[1]) / seconds / self._setting.generators,
            trainer_idle=1 - (ended[2] - began[2]) / seconds,
            staleness_mean=sum(weighted for _, weighted, _ in groups) / tokens,
            staleness_max=max((oldest for oldest, _, _ in groups), default=0),
            regenerated=(ended[3] - began[3]) / tokens,
            mean_length=tokens / max(1, samples),
            events=self._events,
        )

    def _after(self, seconds: float, event: events.Event) -> None:
        self._push(self._now + seconds, event)

    def _push(self, when: float, due: Due) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, due))
