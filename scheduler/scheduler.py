"""The conductor's decisions: events in, commands out. No I/O, no clock, no randomness.

             GeneratorJoined              SampleFinished                SampleDelivered
                   │                            │                             │
data order ─► open steps ─► place ─► start samples ─► DeliverGroup ─► arrived ─► DeclareStep
                   ▲                            ▲                                   │
                   │ WeightsPublished           │ WeightsInstalled                  ▼
                   └─────────────── InstallWeights ◄────────────────────── StepFinished

Which steps are open is `scheduler.admission` (there the synchronous and the asynchronous loop stand
side by side, as tables of what each loop consumes, produces, waits for, is unblocked by and is
bounded by); where a group goes is `scheduler.placement`; how its samples move is `scheduler.work`;
what was consumed is `scheduler.ledger`. This module says what each event means for them.

What holds, and is checked by `Scheduler.check`:
- each sample of each group in flight is in exactly one `SampleState`, at one generator;
- at most (max_off_policy_steps + 1) * groups_per_step groups, and with `on_update: verify`
  max_runahead_groups more, are issued and not consumed;
- no generator has more RUNNING samples than its limit, or more than one install outstanding;
- a token is at most max_off_policy_steps older than the policy that trains on it: older work is
  not begun, or (`verify`) verified before it is delivered;
- each group is consumed by the one step that it belongs to, or reported failed, never both.

Losses. A lost generator's samples that the trainer has not acknowledged are written again
elsewhere, under the same id. An acknowledgement is believed even if it comes after the loss. A
sample that was started max_attempts times fails; a sample that fails takes its group with it.
The membership of a step is declared when each of its groups is *acknowledged* or failed, not
when delivery was commanded: a generator that dies in between could still take a group away.

Stopping. `StopRequested` finishes the step in hand (its samples are still started, and restarted
after a loss) and those later ones that are declared already, since the trainer will not wait. The
work of all others is withdrawn at once. Then `FinishRun`. If nothing of the step in hand
was started, or no generator is left to write it, the run ends at once. A paused run is resumed for
that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.trajectory import SampleId
from scheduler import commands as out
from scheduler import events as ev
from scheduler import invariants, report
from scheduler.admission import Admission
from scheduler.commands import Command, RunOutcome
from scheduler.config import SchedulerConfig
from scheduler.errors import SchedulerError
from scheduler.events import Event
from scheduler.ledger import Ledger
from scheduler.placement import prompt_key
from scheduler.records import DELIVERED, DELIVERING, QUEUED, RUNNING, VERIFYING, Generator, Group
from scheduler.view import SchedulerView
from scheduler.work import Work


class Scheduler:
    """A deterministic state machine; the same object runs live and in simulations.

    Args:
        config: bounds and sizes.
        first_step: step to begin with; more than 0 when a run is resumed.
        total_steps: steps of the whole run; the last one is `total_steps - 1`.
        group_key: prompt index of a group, so that a prompt prefers the generator that wrote it in
            the epoch before; None for no such preference.

    Raises:
        SchedulerError: from `on_event`, when an event cannot have happened (a bug, or a liar on
            the wire). Repeated and late events are not errors; they yield no commands.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        first_step: int,
        total_steps: int,
        group_key: Callable[[int], int] | None = None,
    ) -> None:
        if not 0 <= first_step < total_steps:
            raise SchedulerError(
                f"first_step {first_step} must be at least 0 and below total_steps {total_steps}"
            )
        self.config = config
        self.admission = Admission.of(config)
        self.ledger = Ledger(groups_per_step=config.groups_per_step, first_step=first_step)
        self.work = Work(config, self.admission)
        """Groups in flight and who has them."""
        self.total_steps = total_steps
        self.last_step = total_steps - 1
        """The last step to be trained; a stop makes it an earlier one."""
        self.published = first_step
        """Newest version whose weights can be installed, once the trainer has joined."""
        self.next_declared = first_step
        """The first step whose membership is not declared yet."""
        self.trainer_joined = False
        self.stopping = False
        self.finished: out.FinishRun | None = None
        self.samples_finished = 0
        self.tokens_finished = 0
        self.staleness_max = 0
        self._group_key = group_key
        self._lost: set[str] = set()
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.GeneratorJoined: self._on_generator_joined,
            ev.GeneratorLost: self._on_generator_lost,
            ev.SampleFinished: self._on_sample_finished,
            ev.SampleFailed: self._on_sample_failed,
            ev.SampleDelivered: self._on_sample_delivered,
            ev.WeightsInstalled: self._on_weights_installed,
            ev.KvUsed: self._on_kv_used,
            ev.WeightsPublished: self._on_weights_published,
            ev.StepFinished: self._on_step_finished,
            ev.TrainerJoined: self._on_trainer_joined,
            ev.StopRequested: self._on_stop,
            ev.PauseRequested: self._on_pause,
            ev.ResumeRequested: self._on_resume,
        }

    # ------------------------------------------------------------------ public

    def on_event(self, event: Event) -> list[Command]:
        """Take note of a fact and decide what follows, in the order to be carried out."""
        self.work.commands = []
        self._handlers[type(event)](event)
        return self.work.commands

    def snapshot(self) -> SchedulerView:
        """The state in numbers, and what each wait waits for."""
        return report.snapshot(self)

    def check(self) -> None:
        """Recount everything. O(in flight). Raises SchedulerError when an invariant is broken."""
        invariants.check(self)

    @property
    def step(self) -> int:
        """The step to be trained next, or in hand."""
        return self.ledger.next_step

    @property
    def newest_open_group(self) -> int:
        """Work is admitted for groups up to this one."""
        per_step = self.config.groups_per_step
        if not self.trainer_joined or self.finished is not None:
            return self.step * per_step - 1
        # A version can be published before its StepFinished is known: still the old window.
        version = min(self.published, self.step)
        return min(self.admission.last_group_to_start(version), (self.last_step + 1) * per_step - 1)

    @property
    def newest_open_step(self) -> int:
        """The step of the newest open group; below `step` when there is none."""
        return self.newest_open_group // self.config.groups_per_step

    # -------------------------------------------------------------- generators

    def _on_generator_joined(self, event: ev.GeneratorJoined) -> None:
        known = self.work.generators.get(event.generator)
        if event.generator in self._lost or (known is not None and known.slots == event.slots):
            return
        if known is not None:
            raise SchedulerError(
                f"generator {event.generator} joined before, with {known.slots} slots instead of "
                f"{event.slots}; one that comes back needs a new name, or late news of the old one "
                "would be taken for news of the new one"
            )
        if event.slots < 1 or event.policy_version > self.published:
            raise SchedulerError(
                f"generator {event.generator} joined with {event.slots} slots and policy version "
                f"{event.policy_version}; the newest published version is {self.published}"
            )
        generator = self.work.placement.add(
            event.generator,
            slots=event.slots,
            limit=self.config.in_flight_limit(event.slots),
            version=event.policy_version,
        )
        self._bring_up_to_date(generator)
        if self.work.paused:
            self.work.commands.append(out.PauseGenerator(generator.name))
        self.work.place_waiting()
        self.work.start(generator)

    def _on_generator_lost(self, event: ev.GeneratorLost) -> None:
        self._lost.add(event.generator)
        generator = self.work.generators.get(event.generator)
        if generator is None:  # lost before, or before it was known to have joined
            return
        groups = self.work.placement.remove(generator)
        for group in groups:
            hopeless = self.work.take_back(group)
            if hopeless is not None:
                self._fail(
                    group,
                    f"sample {group.index}.{hopeless} was started "
                    f"{self.config.max_attempts} times (scheduler.max_attempts) and its generator "
                    f"was lost each time, the last one was {generator.name}",
                )
        self._declare()
        for group in groups:
            if group.index in self.work.groups:
                self.work.place(group)
        if self.stopping:
            self._finish_if_stuck()

    # ----------------------------------------------------------------- samples

    def _on_sample_finished(self, event: ev.SampleFinished) -> None:
        generator = self._generator(event.generator)
        group = self._group(event.sample)
        sample = event.sample.sample
        if generator is None or group is None or group.owner is not generator:
            return
        staleness = group.step - event.oldest_version
        too_old = staleness > self.config.max_off_policy_steps
        state = group.states[sample]
        if state != RUNNING and (state != VERIFYING or too_old):
            return  # late or repeated: what comes out of a verification is not too old
        if (too_old and not self.admission.verifies) or event.oldest_version > self.published:
            raise SchedulerError(
                f"sample {event.sample} of {generator.name} has tokens of policy version "
                f"{event.oldest_version}, but is for step {group.step}, with max_off_policy_steps "
                f"{self.config.max_off_policy_steps} and version {self.published} published"
            )
        if not too_old:
            self.samples_finished += 1
            self.tokens_finished += event.length
            self.staleness_max = max(self.staleness_max, staleness)
        self.work.finished(generator, group, sample, oldest_version=event.oldest_version)
        self._wrote(generator)

    def _on_sample_failed(self, event: ev.SampleFailed) -> None:
        generator = self._generator(event.generator)
        group = self._group(event.sample)
        if generator is None or group is None or group.owner is not generator:
            return
        if group.states[event.sample.sample] in (QUEUED, DELIVERED):
            return
        self._fail(group, f"sample {event.sample} of {generator.name}: {event.reason}")
        self._declare()
        if self.finished is None:
            self._wrote(generator)

    def _on_sample_delivered(self, event: ev.SampleDelivered) -> None:
        generator = self._generator(event.generator)
        group = self._group(event.sample)
        sample = event.sample.sample
        if group is None or group.states[sample] == DELIVERED:
            return
        owner = group.owner
        state = group.states[sample]
        if not group.sent[sample] or (owner is generator is not None and state != DELIVERING):
            raise SchedulerError(
                f"sample {event.sample} was acknowledged by the trainer, but generator "
                f"{event.generator} was not told to deliver it"
            )
        self.work.delivered(group, sample, generator)
        if group.delivered == self.config.group_size:
            self._arrive(group)
        else:
            self.work.deliver_if_complete(group)
        if owner is not None and self.finished is None:
            self._wrote(owner)

    # ------------------------------------------------------------------ groups

    def _arrive(self, group: Group) -> None:
        """The trainer has the whole group."""
        self.work.forget(group)
        self.ledger.arrive(group.index)
        self._declare()

    def _fail(self, group: Group, reason: str) -> None:
        """Leave a group out, tell the user, and free what it occupies."""
        self.work.discard([group])
        self.ledger.fail(group.index)
        self.work.commands.append(out.ReportGroupFailed(group.index, reason))

    def _declare(self) -> None:
        """Declare each step whose membership is final, in order; end the run if one is empty."""
        while self.finished is None:
            step = self.next_declared
            members = self.ledger.membership(step)
            if members is None:
                return
            if not members:
                if step == self.step:  # otherwise the steps before it are still trained
                    self._finish(RunOutcome.FAILED, f"every group of step {step} failed")
                return
            self.next_declared += 1
            self.work.commands.append(out.DeclareStep(step, members))

    # ----------------------------------------------------------- trainer, steps

    def _on_trainer_joined(self, event: ev.TrainerJoined) -> None:
        if self.trainer_joined and not self.work.anything_sent:
            return
        if self.trainer_joined:
            raise SchedulerError(
                "the trainer joined again after groups were delivered to it; a trainer that "
                "restarts has lost them, so the run must be resumed from its checkpoint"
            )
        if event.policy_version != self.published:
            raise SchedulerError(
                f"the trainer joined with policy version {event.policy_version}, but version "
                f"{self.published} is expected; resume the run from that checkpoint"
            )
        self.trainer_joined = True
        for generator in self.work.generators.values():
            self._bring_up_to_date(generator)
        self._open_steps()

    def _on_weights_published(self, event: ev.WeightsPublished) -> None:
        if event.policy_version <= self.published:
            return
        if not self.trainer_joined or event.policy_version > self.next_declared:
            raise SchedulerError(
                f"weights of policy version {event.policy_version} were published, but step "
                f"{event.policy_version - 1} cannot have been trained yet"
            )
        self.published = event.policy_version
        for generator in self.work.generators.values():
            self._bring_up_to_date(generator)
        self._open_steps()

    def _on_step_finished(self, event: ev.StepFinished) -> None:
        if event.step < self.step or self.finished is not None:
            return
        self.ledger.consume(event.step, event.groups)
        if self.step == self.total_steps:
            self._finish(RunOutcome.DONE)
        elif self.step > self.last_step:
            self._finish(RunOutcome.STOPPED)
        else:
            self._declare()
            self._open_steps()

    def _open_steps(self) -> None:
        """Issue all groups that the policy admits now, in data order."""
        last = self.newest_open_group
        while self.ledger.next_group <= last:
            index = self.ledger.next_group
            key = None if self._group_key is None else prompt_key(self._group_key(index))
            self.ledger.issue()
            self.work.issue(index, self.ledger.step_of(index), key)

    # ----------------------------------------------------------------- weights

    def _bring_up_to_date(self, generator: Generator) -> None:
        """Command the newest version, unless it has it or an install is still outstanding."""
        if not self.trainer_joined:
            return
        if generator.installing is None and generator.version < self.published:
            writing = generator.running + generator.verifying
            generator.draining = bool(writing) and not self.config.partial_rollout
            if not generator.draining:
                generator.installing = self.published
                self.work.commands.append(out.InstallWeights(generator.name, self.published))
        self.work.placement.offer(generator, self.published)

    def _wrote(self, generator: Generator) -> None:
        """It has a sample less to write: install what waits for that, or start another."""
        if generator.draining:
            self._bring_up_to_date(generator)
        else:
            self.work.start(generator)

    def _on_kv_used(self, event: ev.KvUsed) -> None:
        generator = self.work.generators.get(event.generator)
        if generator is None:  # its reports may be quicker than the news that it joined
            return
        generator.kv_used = event.share
        self.work.start(generator)

    def _on_weights_installed(self, event: ev.WeightsInstalled) -> None:
        generator = self._generator(event.generator)
        if generator is None:
            return
        if event.policy_version > self.published or not self.trainer_joined:
            raise SchedulerError(
                f"generator {generator.name} installed policy version {event.policy_version}, "
                f"which was never published (newest: {self.published})"
            )
        if event.policy_version < generator.version:
            return
        target = generator.installing
        if target is not None and event.policy_version == generator.version:
            if self.next_declared <= target:
                return  # newer weights cannot be under way: this is an old answer, repeated
            if target == self.published:
                # Overwritten while it was read; asking again before the newer weights are
                # published would go round in circles.
                generator.installing = None
                self.work.placement.offer(generator, self.published)
                self.work.start(generator)
                return
        before, generator.version = generator.version, event.policy_version
        generator.installing, generator.draining = None, False
        # What is verified is written as well: with `partial_rollout: false` the next install waits.
        self.work.verify_due(generator, before)
        self._bring_up_to_date(generator)
        self.work.place_waiting()
        self.work.start(generator)

    # -------------------------------------------------------- pause, stop, end

    def _on_pause(self, _: ev.PauseRequested) -> None:
        if self.work.paused or self.finished is not None:
            return
        self.work.paused = True
        self.work.commands.extend(out.PauseGenerator(name) for name in self.work.generators)

    def _on_resume(self, _: ev.ResumeRequested) -> None:
        if not self.work.paused:
            return
        self.work.paused = False
        for generator in list(self.work.generators.values()):
            self.work.commands.append(out.ResumeGenerator(generator.name))
            self.work.start(generator)

    def _on_stop(self, _: ev.StopRequested) -> None:
        if self.stopping or self.finished is not None:
            return
        self.stopping = True
        last = self.last_step = max(self.step, self.next_declared - 1)
        self.work.discard([group for group in self.work.groups.values() if group.step > last])
        self.ledger.withdraw_after(last)
        in_hand = self.work.groups.values()
        settled = sum(self.ledger.progress(self.step))
        if not settled and all(group.untouched for group in in_hand):
            self._finish(RunOutcome.STOPPED)
            return
        self._on_resume(ev.ResumeRequested())
        for generator in list(self.work.generators.values()):
            self._wrote(generator)
        self._finish_if_stuck()

    def _finish_if_stuck(self) -> None:
        """While stopping: do not wait for a generator that may never join."""
        if self.finished is None and self.work.groups and not self.work.generators:
            self._finish(
                RunOutcome.STOPPED,
                f"step {self.step} was not trained, since no generator is left to "
                f"write {len(self.work.groups)} of its groups",
            )

    def _finish(self, outcome: RunOutcome, reason: str = "") -> None:
        self.work.discard(list(self.work.groups.values()))
        self.finished = out.FinishRun(outcome, reason)
        self.work.commands.append(self.finished)

    # ----------------------------------------------------------------- look-up

    def _generator(self, name: str) -> Generator | None:
        """The generator of that name; None if it was lost. Raises SchedulerError if unknown."""
        generator = self.work.generators.get(name)
        if generator is None and name not in self._lost:
            raise SchedulerError(f"an event of generator {name}, which never joined")
        return generator

    def _group(self, sample: SampleId) -> Group | None:
        """The group of a sample; None if settled. Raises SchedulerError if never issued."""
        group = self.work.groups.get(sample.group)
        if group is None and sample.group >= self.ledger.issued_below:
            raise SchedulerError(f"an event of sample {sample}, whose group was never issued")
        if not 0 <= sample.sample < self.config.group_size:
            raise SchedulerError(
                f"an event of sample {sample}; groups have {self.config.group_size} samples"
            )
        return group
