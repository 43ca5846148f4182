"""Steps from opening to end, and what moves them: samples, pause, resume and stop."""

from collections.abc import Callable

from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.errors import ImpossibleEvent, LedgerError, SenderOutOfStep
from asyncrl.scheduler.placement import prompt_key
from asyncrl.scheduler.records import (
    DELIVERED,
    DELIVERING,
    HELD,
    QUEUED,
    RUNNING,
    VERIFYING,
    Generator,
    Group,
)
from asyncrl.scheduler.sample_transitions import Weights, Work
from asyncrl.scheduler.state import SchedulerState


class Steps:
    """Issues groups in data order, settles them, and declares each step when it is settled.

    `group_key` returns a group's prompt index, for its placement; None for no preference.
    """

    def __init__(
        self, state: SchedulerState, work: Work, group_key: Callable[[int], int] | None
    ) -> None:
        self._state, self._work = state, work
        self._ledger, self._group_key = state.ledger, group_key

    def open(self) -> None:
        """Issue all groups that are admitted now; with dynamic sampling, after this event."""
        if self._state.places is None:
            self.issue()
        else:
            self._state.places.changed = True

    def issue(self) -> None:
        """Issue all groups that are admitted now, in data order."""
        state, ledger, last = self._state, self._ledger, self._state.last_open_group
        while (place := state.next_place) <= last:
            index = ledger.next_group
            key = None if self._group_key is None else prompt_key(self._group_key(index))
            ledger.issue()
            kept = state.groups.get(index)  # from before a rewind
            if state.places is not None:
                state.places.issued(kept)
            if kept is None:
                self._work.issue(index, place, key)
            else:
                self._work.deliver_if_complete(kept)
                self._settled()  # it may be judged already

    def arrive(self, group: Group) -> None:
        """Record that the trainer acknowledged the whole group."""
        self._work.forget(group)
        self._ledger.arrive(group.index)
        self._settled()
        self.declare()

    def fail(self, group: Group, reason: str) -> None:
        """Leave a group out, report it, and free what it occupies."""
        self._work.discard([group])
        if group.index >= self._ledger.next_group:
            return  # left over from before a rewind: it is tried again when it is issued
        self._ledger.fail(group.index)
        self._settled()
        self._state.commands.append(commands.ReportGroupFailed(group.index, reason))

    def _settled(self) -> None:
        if self._state.places is not None:
            self._state.places.changed = True

    def declare(self) -> None:
        """Declare each step whose membership is final, in order; end the run if one is empty."""
        state = self._state
        while state.finished is None and state.trainer_joined:
            step = state.next_undeclared
            members = self._ledger.membership(step)
            if members is None:
                return
            if not members:
                if step == state.step:  # otherwise the steps before it are trained first
                    self.end_run(RunOutcome.FAILED, self._why_empty(step))
                return
            state.next_undeclared += 1
            state.commands.append(commands.DeclareStep(step, members))

    def _why_empty(self, step: int) -> str:
        sampling = self._state.config.dynamic_sampling
        if not sampling.enabled:
            return f"every group of step {step} failed"
        return (
            f"none of the {self._state.config.max_groups_of_step} groups of step {step} carries "
            "signal: in each, all rewards are equal, or a sample failed "
            f"(scheduler.dynamic_sampling.max_batches is {sampling.max_batches}). The task is too "
            "easy or too hard for the policy, or the reward is constant; look at reward_mean"
        )

    def on_step_finished(self, event: events.StepFinished) -> None:
        """Consume the step's groups, then open further steps or end. Raises SenderOutOfStep."""
        state = self._state
        if event.step < state.step or state.finished is not None:
            return
        try:
            self._ledger.consume(event.step, event.groups)
        except LedgerError as error:
            raise SenderOutOfStep(str(error)) from error
        if state.step == state.total_steps:
            self.end_run(RunOutcome.DONE)
        elif state.step > state.last_step:
            self.end_run(RunOutcome.STOPPED)
        else:
            self.declare()
            self.open()

    def end_run(self, outcome: RunOutcome, reason: str = "") -> None:
        """Discard all work in flight and issue the last command."""
        state = self._state
        self._work.discard(list(state.groups.values()))
        state.finished = commands.FinishRun(outcome, reason)
        state.commands.append(state.finished)


class EventHandlers:
    """Handlers of some events, with the parts of the scheduler that they act on."""

    def __init__(self, state: SchedulerState, work: Work, steps: Steps, weights: Weights) -> None:
        self._state, self._work = state, work
        self._steps, self._weights = steps, weights


class RunControl(EventHandlers):
    """Pauses, resumes and stops a run; `asyncrl.scheduler.scheduler` describes what a stop does."""

    def on_pause(self, _: events.PauseRequested) -> None:
        """Pause every generator."""
        state = self._state
        if state.paused or state.finished is not None:
            return
        state.paused = True
        state.commands.extend(commands.PauseGenerator(name) for name in state.generators)

    def on_resume(self, _: events.ResumeRequested | None = None) -> None:
        """Resume every generator and start samples in its free slots."""
        state = self._state
        if not state.paused:
            return
        state.paused = False
        for generator in list(state.generators.values()):
            state.commands.append(commands.ResumeGenerator(generator.name))
            self._work.start(generator)

    def on_stop(self, _: events.StopRequested) -> None:
        """Withdraw the steps that need not be trained, and finish the current one."""
        state = self._state
        last = max(state.step, state.next_undeclared - 1)
        if state.finished is None and (not state.stopping or last < state.last_step):
            self._end_after(last)

    def on_given_up(self, event: events.StepGivenUp) -> None:
        """End a stopping run without its current step, unless the trainer has all of it."""
        state = self._state
        if state.stopping and state.finished is None and state.next_undeclared <= state.step:
            self._steps.end_run(
                RunOutcome.STOPPED, f"step {state.step} was not trained: {event.reason}"
            )

    def on_drain(self, _: events.DrainRequested) -> None:
        """Withdraw groups that are not begun or do not fill a step, and finish the rest."""
        state = self._state
        if not state.stopping and state.finished is None:
            self._end_after(state.last_begun_step)

    def _end_after(self, last: int) -> None:
        """Train up to this step, unless nothing of it is begun, and end."""
        state = self._state
        state.stopping = True
        if not state.trainer_joined or last < state.step:
            self._steps.end_run(RunOutcome.STOPPED)
            return
        state.last_step = last
        self._withdraw_after(last)
        settled = sum(state.ledger.progress(state.step))
        if not settled and all(group.untouched for group in state.groups.values()):
            self._steps.end_run(RunOutcome.STOPPED)
            return
        self.on_resume()
        for generator in list(state.generators.values()):
            self._weights.refill(generator)
        self.end_if_stuck()

    def _withdraw_after(self, last: int) -> None:
        """Withdraw the groups of later steps; with dynamic sampling, only those not begun."""
        state, ledger = self._state, self._state.ledger
        if state.places is None:
            self._work.discard([group for group in state.groups.values() if group.step > last])
            ledger.withdraw_from(ledger.end_of(last))
            return
        end = ledger.next_group
        while end > ledger.first_group and (group := state.groups.get(end - 1)) is not None:
            if not group.untouched or group.step <= last:
                break
            end -= 1
        self._work.discard([group for group in state.groups.values() if group.index >= end])
        ledger.withdraw_from(end)
        state.places.changed = True

    def end_if_stuck(self) -> None:
        """End a stopping run without generators, rather than wait for one to join."""
        state = self._state
        stuck = state.groups and not state.generators
        if state.stopping and state.finished is None and stuck:
            self._steps.end_run(
                RunOutcome.STOPPED,
                f"step {state.step} was not trained, since no generator is left to generate "
                f"{len(state.groups)} of its groups",
            )


class SampleEvents(EventHandlers):
    """Handles the events of samples. Late and repeated ones change nothing."""

    def on_finished(self, event: events.SampleFinished) -> None:
        """Hold the sample, verify it if it is too old, deliver its group if that is complete."""
        state, admission = self._state, self._state.admission
        generator = state.generator(event.generator)
        group = state.group(event.sample)
        sample, oldest = event.sample.sample, event.oldest_version
        if generator is None or group is None or group.owner is not generator:
            return
        too_old = oldest < admission.min_version(group.step)
        if group.signal is not None:
            too_old |= oldest < generator.will_verify(event.sample)
        if not self._awaits(generator, group, event.sample, oldest, too_old=too_old):
            return
        if generator.rewinding and admission.verifies:
            # Sent before the rewind: the version may be one that is gone. It is verified when due.
            oldest, too_old = UNKNOWN_VERSION, True
        # With dynamic sampling, a group may be in a later step than it was begun for.
        may_be_old = admission.verifies or group.signal is not None
        if (too_old and not may_be_old) or oldest > state.published:
            raise SenderOutOfStep(
                f"sample {event.sample} of {generator.name} has tokens of policy version "
                f"{oldest}, but is for step {group.step}, which allows none below "
                f"{admission.min_version(group.step)}, with version {state.published} published"
            )
        if group.signal is not None:
            group.signal.forget(sample, oldest)
        self._work.hold(generator, group, sample, too_old=too_old)
        self._weights.refill(generator)

    def _awaits(
        self, generator: Generator, group: Group, sample: SampleId, oldest: int, *, too_old: bool
    ) -> bool:
        """Return True if a report of a finished sample is neither late nor repeated."""
        state, signal = group.states[sample.sample], group.signal
        if state == RUNNING:
            # Redrawn samples are too old for every later step.
            admission = self._state.admission
            least = admission.min_version(self._state.next_undeclared)
            return signal is None or admission.verifies or oldest >= least
        # A sample may be verified before its generator has reported the weights as installed.
        is_early = bool(group.stale[sample.sample]) and sample in generator.requested
        if signal is None:
            # A verified sample is not too old.
            return not too_old and (state == VERIFYING or is_early)
        # With dynamic sampling, its group may have been moved to a later step since.
        if is_early and oldest >= generator.requested[sample]:
            del generator.requested[sample]
            return True
        return state == VERIFYING and oldest >= signal.oldest[sample.sample]

    def on_rewarded(self, event: events.SampleRewarded) -> None:
        """Judge the group of a held sample, if this is the last of its rewards."""
        generator = self._state.generator(event.generator)
        group = self._state.group(event.sample)
        if generator is None or group is None or group.owner is not generator:
            return
        sample = event.sample.sample
        if group.signal is None or group.states[sample] != HELD:
            return
        group.signal.rewards[sample] = event.reward
        self._work.deliver_if_complete(group)

    def on_failed(self, event: events.SampleFailed) -> None:
        """Fail the sample's group."""
        state = self._state
        generator = state.generator(event.generator)
        group = state.group(event.sample)
        if generator is None or group is None or group.owner is not generator:
            return
        if group.states[event.sample.sample] in (QUEUED, DELIVERED):
            return
        self._steps.fail(group, f"sample {event.sample} of {generator.name}: {event.reason}")
        self._steps.declare()
        if state.finished is None:
            self._weights.refill(generator)

    def on_delivered(self, event: events.SampleDelivered) -> None:
        """Record that the trainer has the sample, and with the last one the whole group."""
        state = self._state
        generator = state.generator(event.generator)
        group = state.group(event.sample)
        sample = event.sample.sample
        if event.generator in state.outdated or (generator is not None and generator.rewinding):
            return  # acknowledged by a trainer that is gone
        if group is None or group.states[sample] == DELIVERED:
            return
        owner = group.owner
        sample_state = group.states[sample]
        unexpected = owner is generator is not None and sample_state != DELIVERING
        if not group.sent[sample] or unexpected:
            raise ImpossibleEvent(
                f"sample {event.sample} was acknowledged by the trainer, but generator "
                f"{event.generator} was not ordered to deliver it"
            )
        self._work.mark_delivered(group, sample, generator)
        if group.delivered == state.config.group_size:
            self._steps.arrive(group)
        else:
            self._work.deliver_if_complete(group)
        if owner is not None and state.finished is None:
            self._weights.refill(owner)
