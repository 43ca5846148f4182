"""Decides what generators and trainer do: events in, commands out.

No I/O, clock or randomness.

             GeneratorJoined              SampleFinished                SampleDelivered
                   │                            │                             │
data order ─► open steps ─► place ─► start samples ─► DeliverGroup ─► arrived ─► DeclareStep
                   ▲                            ▲                                   │
                   │ WeightsPublished           │ WeightsInstalled                  ▼
                   └─────────────── InstallWeights ◄────────────────────── StepFinished

    admission     which groups may be started and how old a token may be; the synchronous and the
                  asynchronous loop side by side
    state         all known facts: the groups in flight (`records`), the `ledger`, versions, flags
    placement     which generator a group goes to
    sample_transitions  moves of samples between their states; which are verified when; publishing
                  and installing policy versions
    steps         issuing groups, declaring steps, the end of the run; events of samples and users
    dynamic_sampling  which groups a step takes if all must carry signal (`dynamic_ledger`)
    view          a snapshot for people; invariants: what `Scheduler.check` verifies

Invariants, checked by `Scheduler.check`:
- Each sample of each group in flight is in exactly one `SampleState`, at one generator.
- At most (max_off_policy_steps + 1) * groups_per_step groups, plus max_runahead_groups with
  `on_update: verify`, are issued and not consumed.
- No generator has more RUNNING samples than its limit, or more than one outstanding install. While
  samples wait for their environment, others take their slots, up to the number of open sessions.
- A token is at most max_off_policy_steps older than the policy that trains on it. Older work is
  never started, or (`verify`) is verified before it is delivered.
- Each group is either consumed by the one step that it belongs to, or reported failed; with
  `dynamic_sampling`, or reported without signal. Membership of steps depends on the data order, on
  failures and on rewards, never on what finishes first.

**A generator is lost.** Its samples that the trainer has not acknowledged are generated again
elsewhere, under the same id. An acknowledgement counts even if it arrives after the loss. A sample
that was started max_attempts times fails, and a failed sample fails its group. The membership of a
step is declared when each of its groups is *acknowledged* or failed: a generator that dies after a
commanded delivery could still take a group away.

**The user stops the run.** `StopRequested` finishes the current step, restarts after losses
included, and all later steps that are already declared, since the trainer trains those without
asking. All other work is withdrawn at once; `FinishRun` follows. The run ends at once if no sample
of the current step was started, no generator is left, or the controller gives the step up
(`StepGivenUp`). A paused run is resumed so that it can stop. `DrainRequested` is a stop after the
last step of which every group is begun: no other group is begun, and begun groups of later steps
are withdrawn.

**A generator leaves** because the user has ordered it:

    GeneratorLeaves ──► ReleaseSamples ──► SamplesReleased ──► other generators start the samples
                                                  │
    acknowledgements of what is being delivered ──┴──► EndGenerator

It gets no new work from then on, and its untouched groups go to others. With `on_update: verify`,
its other samples are written to a file and move with their tokens, which the next generator
verifies. Groups that are on their way to the trainer stay until it has acknowledged them. The
leaving generator installs no weights any more. With `keep` and `recompute` tokens that were drawn
elsewhere cannot be judged, so its begun groups stay until they are delivered, and it installs
weights like the others. The controller decides how long this may take; then it kills the generator,
which is a loss.

**The trainer is lost**, and another one continues from the newest checkpoint, of version v; the
lost one had trained up to version s >= v (and may not have reported its last step). The policies v
+ 1 to s are gone: the new trainer will train other ones under these numbers. So everything that
depends on them is undone, and the steps of the surviving policies consume each group once:

    ledger           returns to step v; the steps from v on consume their groups again
    trainer          groups that were in it, or partly or perhaps in it, are generated again
    generators       receive `RewindGenerator`: they relabel tokens of later versions as those of
                     an unknown policy and install weights of the new trainer
    `verify`         keeps all other work. Held samples count as too old until their generator has
                     verified them, or has answered that they need no verification
    `keep`, `recompute`   discard all work if a version is gone; these modes cannot verify a token

A kept group may lie ahead of the groups that are issued again; it is delivered when it has been
issued.

From `RewindGenerator` to `GeneratorRewound` a generator's reports may be of the old lineage:
acknowledgements are ignored, and the version of a finished sample counts as unknown.
Acknowledgements of a generator that is lost before it answered are ignored for good.

Without a trainer, generators continue, no group is issued, and nothing is delivered. A
stopping run does not wait for another trainer: it ends, and resumes from the newest checkpoint.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events, invariants
from asyncrl.scheduler.admission import Bounds
from asyncrl.scheduler.commands import Command, RunOutcome
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.dynamic_sampling import DynamicSampling
from asyncrl.scheduler.errors import ImpossibleEvent, SenderOutOfStep
from asyncrl.scheduler.events import Event
from asyncrl.scheduler.records import DELIVERED, DELIVERING, STARTED, Generator
from asyncrl.scheduler.sample_transitions import Weights, Work
from asyncrl.scheduler.state import SchedulerState
from asyncrl.scheduler.steps import EventHandlers, RunControl, SampleEvents, Steps
from asyncrl.scheduler.view import SchedulerView, view_of


class Rewind(EventHandlers):
    """Handles the events of trainers: the first one, lost ones, and those that replace them."""

    def on_trainer_joined(self, event: events.TrainerJoined) -> None:
        """Begin, or return to the version of a trainer that replaces a lost one."""
        state = self._state
        first = not state.had_trainer
        if not first and event.lineage <= state.lineage:
            return
        version, expected = event.policy_version, state.published
        if version != expected if first else version > state.next_undeclared:
            raise SenderOutOfStep(
                f"the trainer joined with policy version {version}, but version {expected} is "
                "expected; resume the run from the checkpoint of that version"
            )
        state.trainer_joined, state.trainer_lost = True, False
        state.lineage = event.lineage
        if first:
            self._weights.update_all()
            self._steps.open()
        elif not self._has_ended(version):
            self._return_to(version)
        elif version == state.published:
            for generator in state.generators.values():
                generator.installing = None  # the lost trainer's weights are removed
            self._weights.update_all()

    def on_trainer_lost(self, _: events.TrainerLost) -> None:
        """Deliver nothing until another trainer joins; end a run that is stopping."""
        state = self._state
        if not state.trainer_joined:
            return
        state.trainer_joined, state.trainer_lost = False, True
        for generator in state.generators.values():
            generator.draining = False  # there are no new weights to wait for
        if state.stopping and state.finished is None:
            self._steps.end_run(
                RunOutcome.STOPPED,
                f"step {state.step} was not trained, since the trainer was lost while the run was "
                "stopping",
            )

    def on_generator_rewound(self, event: events.GeneratorRewound) -> None:
        """Give a generator work again."""
        state = self._state
        generator = state.generator(event.generator)
        if generator is None or not generator.rewinding or event.lineage != state.lineage:
            return
        generator.rewinding = False
        if state.places is not None:
            state.places.changed = True
        self._weights.has_version(generator, min(event.policy_version, state.published))
        for group in list(generator.groups.values()):
            self._work.deliver_if_complete(group)

    def _has_ended(self, version: int) -> bool:
        """Return True if the run is over. A run that was done is not if its last steps are gone."""
        state = self._state
        done = state.finished is not None and state.finished.outcome is RunOutcome.DONE
        if done and not state.stopping and version < state.total_steps:
            state.finished = None
        return state.finished is not None

    def _return_to(self, version: int) -> None:
        state = self._state
        are_gone = version < state.published
        # These were trained, but the trainer was lost before it said so.
        for step in range(state.step, version):
            state.ledger.consume(step, state.ledger.membership(step) or ())
        state.ledger.rewind(version)
        if state.places is not None:
            state.places.restart()
        state.published = state.next_undeclared = version
        state.outdated |= state.lost
        keeps_work = state.admission.verifies or not are_gone
        groups = list(state.groups.values())
        # The lost trainer had a sample of these, or may have had one.
        sent = [g for g in groups if DELIVERED in g.states or DELIVERING in g.states]
        self._work.discard(sent if keeps_work else groups)
        for group in state.groups.values():
            group.sent = bytearray(len(group.sent))
            if state.admission.verifies:
                self._work.suspect(group)
        for generator in state.generators.values():
            generator.version, generator.installing = -1, version
            generator.requested = {}
            generator.rewinding, generator.draining = True, False
            state.placement.offer(generator, version)
            state.commands.append(commands.RewindGenerator(generator.name, version, state.lineage))
        self._steps.open()
        self._work.place_waiting()


class Leaving:
    """Takes the work of leaving generators away, and ends those that have none left."""

    def __init__(self, state: SchedulerState, work: Work, run_control: RunControl) -> None:
        self._state, self._work, self._run_control = state, work, run_control

    def on_leaves(self, event: events.GeneratorLeaves) -> None:
        """Withdraw untouched groups; release the rest, if tokens can be verified."""
        state = self._state
        generator = state.generators.get(event.generator)
        if generator is None and event.generator not in state.lost:
            # It has not joined yet, and so it has nothing. Its join, if it still comes, is late.
            state.lost.add(event.generator)
            state.commands.append(commands.EndGenerator(event.generator))
        if generator is None or generator.leaving:
            return
        generator.leaving = True
        state.leaving[generator.name] = generator
        state.placement.withdraw(generator)
        self._move(generator, begun=False)
        if not state.admission.verifies:
            return
        generator.draining = False  # it no longer installs weights
        samples = tuple(
            SampleId(index, sample)
            for index, group in sorted(generator.groups.items())
            for sample, sample_state in enumerate(group.states)
            if sample_state in STARTED
        )
        if samples:
            state.commands.append(commands.ReleaseSamples(generator.name, samples))

    def on_released(self, event: events.SamplesReleased) -> None:
        """Start the released samples elsewhere."""
        generator = self._state.generator(event.generator)
        if generator is not None and generator.leaving and self._state.admission.verifies:
            self._move(generator, begun=True)

    def end_those_without_work(self) -> None:
        """End the leaving generators without groups, after an event."""
        state = self._state
        for generator in list(state.leaving.values()):
            if generator.groups:
                continue
            del state.leaving[generator.name]
            state.lost.add(generator.name)
            if generator.rewinding:
                state.outdated.add(generator.name)
            state.placement.remove(generator)
            state.commands.append(commands.EndGenerator(generator.name))
            self._run_control.end_if_stuck()

    def _move(self, generator: Generator, *, begun: bool) -> None:
        """Give groups that are not being delivered to others; with `begun`, begun ones too."""
        stays = (DELIVERING,) if begun else (DELIVERING, *STARTED)
        groups = [
            group
            for _, group in sorted(generator.groups.items())
            if not any(state in stays for state in group.states)
        ]
        for group in groups:
            self._work.take_away(group)
        for group in groups:
            self._work.place(group)


class Scheduler:
    """A deterministic state machine; the same object runs live and in simulations.

    Args:
        config: bounds and sizes.
        first_step: the step to begin with; above 0 when a run is resumed.
        total_steps: steps of the whole run; the last one is `total_steps - 1`.
        group_key: prompt index of a group, so that a prompt returns to its generator of the
            previous epoch; None for no such preference.
        changes: other bounds (`asyncrl.scheduler.admission`), by the first step with each.
        first_groups: with dynamic sampling, the beginnings of `first_step` and earlier steps.
        sessions: most samples that a generator may have while some wait for their environment, if
            that is more than its limit; 0 without environments.

    Raises:
        SchedulerError: from the constructor, without a step to train; from `on_event`, if an
            event is impossible (ImpossibleEvent: the sender is faulty, nothing was changed).
            Repeated and late events are not errors; they yield no commands.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        first_step: int,
        total_steps: int,
        group_key: Callable[[int], int] | None = None,
        changes: Mapping[int, SchedulerConfig] = MappingProxyType({}),
        first_groups: Mapping[int, int] = MappingProxyType({}),
        sessions: int = 0,
    ) -> None:
        self._sessions = sessions
        self.state = SchedulerState.new(config, first_step, total_steps, changes, first_groups)
        """Read-only."""
        self._work = Work(self.state)
        self._steps = Steps(self.state, self._work, group_key)
        self._weights = Weights(self.state, self._work)
        self._run_control = RunControl(self.state, self._work, self._steps, self._weights)
        self._leaving = Leaving(self.state, self._work, self._run_control)
        rewind = Rewind(self.state, self._work, self._steps, self._weights)
        samples = SampleEvents(self.state, self._work, self._steps, self._weights)
        self._dynamic: DynamicSampling | None = None
        if config.dynamic_sampling.enabled:
            self._dynamic = DynamicSampling(self.state, self._work, self._steps, self._weights)
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.GeneratorJoined: self._on_generator_joined,
            events.GeneratorLost: self._on_generator_lost,
            events.GeneratorLeaves: self._leaving.on_leaves,
            events.SamplesReleased: self._leaving.on_released,
            events.KvUsed: self._on_kv_used,
            events.EnvironmentWaits: self._on_environment_waits,
            events.SpeedMeasured: self._on_speed_measured,
            events.SampleFinished: samples.on_finished,
            events.SampleRewarded: samples.on_rewarded,
            events.SampleFailed: samples.on_failed,
            events.SampleDelivered: samples.on_delivered,
            events.TrainerJoined: rewind.on_trainer_joined,
            events.TrainerLost: rewind.on_trainer_lost,
            events.GeneratorRewound: rewind.on_generator_rewound,
            events.StepFinished: self._steps.on_step_finished,
            events.WeightsPublished: self._on_weights_published,
            events.WeightsInstalled: self._weights.on_weights_installed,
            events.BoundsChanged: self._on_bounds_changed,
            events.DrainRequested: self._run_control.on_drain,
            events.StopRequested: self._run_control.on_stop,
            events.StepGivenUp: self._run_control.on_given_up,
            events.PauseRequested: self._run_control.on_pause,
            events.ResumeRequested: self._run_control.on_resume,
        }

    def on_event(self, event: Event) -> list[Command]:
        """Record a fact and decide what follows; commands are in the order of execution."""
        issued = self.state.commands
        issued.clear()
        self._handlers[type(event)](event)
        if self._dynamic is not None:
            self._dynamic.settle()
        if self.state.leaving:
            self._leaving.end_those_without_work()
        return issued[:]

    def snapshot(self, unscored: int = 0, about: str = "") -> SchedulerView:
        """Return the state in numbers, with the reason of each wait.

        `unscored` samples to be delivered have no reward yet; `about` is added to that reason.
        """
        return view_of(self.state, unscored, about)

    def check(self) -> None:
        """Recount everything. O(in flight). Raises SchedulerError if an invariant is broken."""
        invariants.check(self.state)

    def _on_generator_joined(self, event: events.GeneratorJoined) -> None:
        state = self.state
        known = state.generators.get(event.generator)
        if event.generator in state.lost or (known is not None and known.slots == event.slots):
            return
        if known is not None:
            raise ImpossibleEvent(
                f"generator {event.generator} joined before, with {known.slots} slots instead of "
                f"{event.slots}; a restarted generator needs a new name, because late messages of "
                "the old one would be attributed to it"
            )
        if event.slots < 1 or event.policy_version > state.published:
            raise SenderOutOfStep(
                f"generator {event.generator} joined with {event.slots} slots and policy version "
                f"{event.policy_version}; it needs at least 1 slot, and the latest published "
                f"version is {state.published}"
            )
        generator = state.placement.add(
            event.generator,
            slots=event.slots,
            limit=state.config.in_flight_limit(event.slots),
            most=self._sessions,
            version=event.policy_version,
        )
        self._weights.update(generator)
        if state.paused:
            state.commands.append(commands.PauseGenerator(generator.name))
        self._work.place_waiting()
        self._work.start(generator)

    def _on_generator_lost(self, event: events.GeneratorLost) -> None:
        state = self.state
        state.lost.add(event.generator)
        state.leaving.pop(event.generator, None)
        generator = state.generators.get(event.generator)
        if generator is None:  # lost before, or before its join was reported
            return
        if generator.rewinding:
            state.outdated.add(generator.name)
        groups = state.placement.remove(generator)
        for group in groups:
            exhausted = self._work.requeue(group)
            if exhausted is not None:
                self._steps.fail(
                    group,
                    f"sample {group.index}.{exhausted} was started {state.config.max_attempts} "
                    "times (scheduler.max_attempts) and its generator was lost each time; the "
                    f"last one was {generator.name}",
                )
        self._steps.declare()
        for group in groups:
            if group.index in state.groups:
                self._work.place(group)
        self._run_control.end_if_stuck()

    def _on_kv_used(self, event: events.KvUsed) -> None:
        generator = self.state.generators.get(event.generator)
        if generator is None:  # a report can arrive before the join
            return
        generator.kv_used = event.share
        self._work.start(generator)

    def _on_environment_waits(self, event: events.EnvironmentWaits) -> None:
        generator = self.state.generators.get(event.generator)
        if generator is None or generator.waiting == event.samples:
            return
        generator.waiting = event.samples
        self.state.placement.update(generator)
        self._work.start(generator)

    def _on_speed_measured(self, event: events.SpeedMeasured) -> None:
        generator = self.state.generators.get(event.generator)
        if generator is not None:
            self.state.placement.measured(generator, event.tokens_per_row_second)

    def _on_bounds_changed(self, event: events.BoundsChanged) -> None:
        state = self.state
        if min(event.configs, default=0) < state.first_free_step:
            raise ImpossibleEvent(
                f"cannot change the bounds of step {min(event.configs)}: some of its groups were "
                "issued already"
            )
        for step, config in event.configs.items():
            state.admission.change(Bounds.of(config, step))
        state.admission.forget_before(state.step)
        self._steps.open()
        self._work.place_waiting()

    def _on_weights_published(self, event: events.WeightsPublished) -> None:
        state, version = self.state, event.policy_version
        if version <= state.published:
            return
        if not state.had_trainer or version > state.next_undeclared:
            raise SenderOutOfStep(
                f"weights of policy version {version} were published, but step {version - 1} "
                "cannot have been trained yet"
            )
        state.published = version
        self._weights.update_all()
        self._steps.open()
