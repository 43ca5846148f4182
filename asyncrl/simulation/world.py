"""A discrete-event simulation around the live scheduler: generators, one trainer, and delays."""

import gc
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from asyncrl.errors import UserError
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.run_ahead import RunAhead
from asyncrl.scheduler.scheduler import Scheduler
from asyncrl.simulation.fleet import Agenda, Due, FinishedReport, Fleet, FromTrainer
from asyncrl.simulation.network import BYTES_PER_TOKEN
from asyncrl.simulation.outcome import Mark, Outcome, rates
from asyncrl.simulation.setting import Setting
from asyncrl.simulation.sim_generator import SimGenerator

REPORT_SECONDS = 0.5
"""Interval between two reports of the number of samples that wait for their environment."""
DAY_SECONDS = 86400.0
"""A simulated run ends if it does not finish a step for a day."""


@dataclass(slots=True)
class SimTrainer:
    """Processes the groups of its current step as they arrive."""

    free_at: float = 0.0
    """Time at which the present groups are processed."""
    busy: float = 0.0
    groups: dict[int, float] = field(default_factory=dict)
    """Time at which each delivered group of the current step is processed."""
    declared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of the declared steps that are not trained yet."""
    step: int = 0
    waiting: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """(group, seconds) of the groups that wait, by step."""
    lineage: int = 0
    """Number of trainers lost before; their messages no longer count."""

    def take(self, group: int, step: int, seconds: float, now: float) -> None:
        """Take a group that arrives at time `now`."""
        if step != self.step:
            self.waiting.setdefault(step, []).append((group, seconds))
            return
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        self.groups[group] = self.free_at

    def end_of_step(self, now: float) -> tuple[float, tuple[int, ...]] | None:
        """Return (time, groups) of the last group of the current step; None if not declared."""
        groups = self.declared.pop(self.step, None)
        if groups is None:
            return None
        return max(now, *(self.groups.pop(group) for group in groups)), groups

    def finish(self, step: int, now: float) -> None:
        """Finish a step, and take the groups that wait for the next one."""
        self.step = step + 1
        for group, seconds in self.waiting.pop(self.step, []):
            self.take(group, self.step, seconds, now)

    def lose(self, now: float, checkpoint_every: int) -> None:
        """Lose the trainer; the next one has only the newest checkpoint."""
        self.lineage += 1
        self.step = self.step // checkpoint_every * checkpoint_every
        self.busy -= max(0.0, self.free_at - now)
        self.free_at = now
        self.groups.clear()
        self.declared.clear()
        self.waiting.clear()


class World:
    """One simulated run. Use once; `run` raises UserError if too much is lost."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        config = setting.config
        self._ahead = RunAhead(shared=False, groups_per_step=config.groups_per_step)
        self._scheduler = Scheduler(
            config.with_run_ahead(self._ahead.groups),
            first_step=0,
            total_steps=setting.steps,
            sessions=setting.sessions,
        )
        self._agenda = Agenda()
        rng = random.Random(setting.seed)  # noqa: S311 - a simulation
        self._fleet = Fleet(setting, self._agenda, rng)
        self._trainer = SimTrainer()
        self._intake_free = 0.0
        """Time at which the trainer's links have taken in all trajectories sent so far."""
        self._told: Counter[type] = Counter()
        self._commanded: Counter[type] = Counter()
        self._data_bytes = 0.0
        self._delivered: dict[int, list[tuple[int, float, int]]] = {}
        """(largest staleness, sum of staleness, response tokens) of each group, by step."""
        self._marks: dict[int, Mark] = {}
        self._step_ended = 0.0
        self._ended: commands.FinishRun | None = None
        self._message = setting.cost.message_seconds + setting.network.latency_seconds
        # Losses use a separate generator, so that other draws do not depend on them.
        self._loss_rng = random.Random(f"failures {setting.seed}")  # noqa: S311 - a simulation
        self._trainer_rng = random.Random(f"trainer failures {setting.seed}")  # noqa: S311

    def run(self, warm_up: int = 2, end: int | None = None) -> Outcome:
        """Simulate the run; the outcome covers the steps from `warm_up` up to `end`."""
        setting = self._setting
        for number in range(setting.generators):
            self._add(number)
        was_enabled = gc.isenabled()
        gc.disable()  # a run makes no cycles, and each collection would visit all its objects
        try:
            self._play()
        finally:
            if was_enabled:
                gc.enable()
        last = max(self._marks) if end is None else end
        return self._sum_up(min(warm_up, setting.steps - 1), last)

    def _play(self) -> None:
        self._tell(events.TrainerJoined(0))
        agenda = self._agenda
        self._expect_loss()
        self._expect_trainer_loss()
        if self._setting.environments is not None:
            agenda.after(REPORT_SECONDS, self._report_environments)
        began = 0.0
        while self._ended is None:
            self._process(agenda.next())
            step = self._scheduler.state.ledger.next_step
            if step not in self._marks:
                self._marks[step] = self._mark()
                began = agenda.now
            elif agenda.now - began > DAY_SECONDS:
                raise UserError(
                    f"the simulated run did not finish step {step} within a day; lower --failures "
                    "or --restart"
                )
        if self._ended.outcome is not commands.RunOutcome.DONE:
            raise UserError(f"the simulated run failed: {self._ended.reason}")

    def _process(self, due: Due) -> None:
        if isinstance(due, str):
            self._fleet.wake(due)
        elif isinstance(due, FinishedReport):
            self._tell_finished(due)
        elif isinstance(due, FromTrainer):
            if due.lineage == self._trainer.lineage:
                for happened in due.events:
                    self._tell(happened)
        elif isinstance(due, events.WeightsInstalled):
            if self._fleet.swap(due):
                self._tell(due)
                if (speed := self._fleet.speed(due.generator)) is not None:
                    self._tell(speed)
        elif callable(due):
            due()
        else:
            self._tell(due)

    def _tell_finished(self, report: FinishedReport) -> None:
        """Report a finished sample, and with dynamic sampling its reward once it is known."""
        if (event := self._fleet.finished(report)) is None:
            return
        self._tell(event)
        if self._setting.config.dynamic_sampling.enabled:
            known = max(self._agenda.now, report.request.rewarded_at + self._message)
            self._agenda.at(known, lambda: self._tell_reward(report))

    def _report_environments(self) -> None:
        self._agenda.after(REPORT_SECONDS, self._report_environments)
        for waits in self._fleet.environment_waits():
            self._tell(waits)

    def _tell_reward(self, report: FinishedReport) -> None:
        if (event := self._fleet.rewarded(report)) is not None:
            self._tell(event)

    def _tell(self, event: events.Event) -> None:
        self._told[type(event)] += 1
        touched: dict[str, SimGenerator] = {}
        for command in self._scheduler.on_event(event):
            self._carry_out(command, touched)
        for generator in touched.values():
            self._fleet.plan(generator)
        if isinstance(event, events.StepFinished) and self._ended is None:
            self._trainer.finish(event.step, self._agenda.now)
            self._train()
            self._publish(event.step + 1)
            if self._setting.config.chooses_run_ahead:
                self._choose_run_ahead(event.step)

    def _choose_run_ahead(self, step: int) -> None:
        """Measure the step as `asyncrl.controller.training` does, and change the depth."""
        state, ahead = self._scheduler.state, self._ahead
        seconds = self._agenda.now - self._step_ended
        self._step_ended = self._agenda.now
        groups = ahead.groups
        ahead.on_step(
            step,
            seconds=seconds,
            tokens=sum(count for _, _, count in self._delivered[step]),
            next_free=state.first_free_step,
            last=self._setting.steps - 1,
        )
        if ahead.groups != groups:
            config = self._setting.config.with_run_ahead(ahead.groups)
            self._tell(events.BoundsChanged({state.first_free_step: config}))

    def _carry_out(self, command: commands.Command, touched: dict[str, SimGenerator]) -> None:
        fleet = self._fleet
        self._commanded[type(command)] += 1
        match command:
            case commands.StartSample(generator=name, sample=sample, priority=priority):
                fleet.touch(name, touched).start(sample, priority)
            case commands.VerifySamples(generator=name):
                fleet.verify(fleet.touch(name, touched), command)
            case commands.InstallWeights():
                fleet.install(command)
            case commands.RewindGenerator():
                self._agenda.after(self._message, fleet.rewind(command, touched))
            case commands.DeliverGroup():
                self._deliver(command, touched)
            case commands.DeclareStep(step=step, groups=groups):
                self._trainer.declared[step] = groups
                self._train()
            case commands.DiscardSamples(generator=name, samples=samples):
                fleet.touch(name, touched).release(samples)
            case commands.FinishRun():
                self._ended = command
            case _:
                pass

    def _expect_loss(self) -> None:
        rate = self._setting.failures.per_node_hour * self._setting.nodes / 3600
        if rate:
            self._agenda.after(self._loss_rng.expovariate(rate), self._lose_unit)

    def _expect_trainer_loss(self) -> None:
        rate = self._setting.failures.trainer_per_hour / 3600
        if rate:
            self._agenda.after(self._trainer_rng.expovariate(rate), self._lose_trainer)

    def _lose_unit(self) -> None:
        setting = self._setting
        if setting.failures.scope == "generator":
            numbers = [self._loss_rng.randrange(setting.generators)]
        else:
            first = self._loss_rng.randrange(setting.nodes) * setting.generators_per_node
            after = min(first + setting.generators_per_node, setting.generators)
            numbers = list(range(first, after))
        for number in numbers:
            if (lost := self._fleet.lose(number)) is not None:
                self._agenda.after(setting.failures.restart_seconds, partial(self._add, number))
                self._tell(lost)
        self._expect_loss()

    def _add(self, number: int) -> None:
        self._tell(self._fleet.add(number))

    def _lose_trainer(self) -> None:
        """Lose the trainer; the next one returns to the newest checkpoint."""
        failures, agenda = self._setting.failures, self._agenda
        self._trainer.lose(agenda.now, failures.checkpoint_every)
        for step in [step for step in self._delivered if step >= self._trainer.step]:
            del self._delivered[step]
        self._tell(events.TrainerLost())
        agenda.after(failures.restart_seconds, self._return_trainer)

    def _return_trainer(self) -> None:
        trainer, now = self._trainer, self._agenda.now
        trainer.free_at = self._intake_free = now
        self._fleet.installs.published = {trainer.step: now}
        self._tell(events.TrainerJoined(trainer.step, trainer.lineage))
        self._expect_trainer_loss()

    def _deliver(self, command: commands.DeliverGroup, touched: dict[str, SimGenerator]) -> None:
        setting, now = self._setting, self._agenda.now
        tokens, arrives = 0.0, now
        segments: list[tuple[int, float]] = []
        for name, sample in command.samples:
            request = self._fleet.touch(name, touched).held(sample)
            tokens += request.length + setting.prompt_tokens + request.observed
            segments += request.segments
            arrives = max(arrives, request.rewarded_at)
        for name in {name: None for name, _ in command.samples}:
            touched[name].release(tuple(s for owner, s in command.samples if owner == name))
        size = tokens * BYTES_PER_TOKEN
        self._data_bytes += size
        if taken := setting.network.link_seconds(size) / setting.trainer_nodes:
            arrives = self._intake_free = max(self._intake_free, arrives) + taken
        arrives += self._message
        seconds = tokens * setting.cost.train_token_seconds
        self._trainer.take(command.group, command.step, seconds, arrives)
        arrived = tuple(events.SampleDelivered(name, sample) for name, sample in command.samples)
        self._agenda.at(arrives, FromTrainer(self._trainer.lineage, arrived))
        ages = [(command.step - version, count) for version, count in segments]
        response = sum(count for _, count in ages)
        weighted = sum(age * count for age, count in ages)
        oldest = max(age for age, _ in ages)
        self._delivered.setdefault(command.step, []).append((oldest, weighted, round(response)))

    def _train(self) -> None:
        trainer, now = self._trainer, self._agenda.now
        ended = trainer.end_of_step(now)
        if ended is not None:
            end, groups = ended
            done = FromTrainer(trainer.lineage, (events.StepFinished(trainer.step, groups),))
            self._agenda.at(end + self._setting.cost.optimizer_seconds, done)

    def _publish(self, version: int) -> None:
        """Start the transfer of weights from the trainer's node, and tell the controller."""
        self._fleet.installs.published[version] = self._agenda.now
        told = FromTrainer(self._trainer.lineage, (events.WeightsPublished(version),))
        self._agenda.after(self._message, told)

    def _mark(self) -> Mark:
        return Mark(
            self._agenda.now, self._trainer.busy, self._told.copy(), self._commanded.copy(),
            self._data_bytes, self._fleet.tally(),
        )  # fmt: skip

    def _sum_up(self, first: int, last: int) -> Outcome:
        began, ended = self._marks[first], self._marks[last]
        seconds = max(1e-9, ended.seconds - began.seconds)
        groups = [entry for step in range(first, last) for entry in self._delivered.get(step, [])]
        tokens = max(1, sum(count for _, _, count in groups))
        samples = len(groups) * self._setting.config.group_size
        view = self._scheduler.snapshot()
        looked_at = view.groups_consumed + view.groups_without_signal
        installs, busy = self._fleet.installs.seconds, ended.tally.busy - began.tally.busy
        everything = sum(count for step in self._delivered.values() for _, _, count in step)
        return Outcome(
            step_seconds=seconds / (last - first),
            tokens_per_second=tokens / seconds,
            generator_idle=1 - busy / seconds / self._setting.generators,
            trainer_idle=1 - (ended.trained - began.trained) / seconds,
            staleness_mean=sum(weighted for _, weighted, _ in groups) / tokens,
            staleness_max=max((oldest for oldest, _, _ in groups), default=0),
            regenerated=(ended.tally.rejected - began.tally.rejected) / tokens,
            mean_length=tokens / max(1, samples),
            events=self._told.total(),
            run_ahead=f"{self._ahead.steps} steps: {self._ahead.why}"
            if self._setting.config.chooses_run_ahead
            else "",
            told=rates(began.told, ended.told, seconds),
            commanded=rates(began.commanded, ended.commanded, seconds),
            data_bytes_per_second=(ended.data_bytes - began.data_bytes) / seconds,
            weights_seconds_mean=sum(installs) / max(1, len(installs)),
            weights_seconds_max=max(installs, default=0.0),
            generators_lost=self._fleet.losses,
            trainers_lost=self._trainer.lineage,
            groups_failed=self._commanded[commands.ReportGroupFailed],
            without_signal=view.groups_without_signal / max(1, looked_at),
            left_over=view.groups_left_over / self._setting.steps,
            lost=self._fleet.lost_tokens / max(1, everything),
            **self._of_environments(began, ended),
        )

    def _of_environments(self, began: Mark, ended: Mark) -> dict[str, float]:
        if self._setting.environments is None:
            return {}
        setting, first, last = self._setting, began.tally, ended.tally
        seconds = max(1e-9, ended.seconds - began.seconds) * setting.generators
        turns = max(1, last.turns - first.turns)
        return {
            "environment_idle": (last.environment - first.environment) / seconds,
            "slots_used": (last.rows - first.rows) / seconds / setting.slots,
            "turns_discarded": (last.turns_discarded - first.turns_discarded) / turns,
            "prefilled_again": (last.prefilled_again - first.prefilled_again) / turns,
        }
