"""Handles samples that finish, fail or reach the trainer."""

from __future__ import annotations

from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.errors import ImpossibleEvent, SenderOutOfStep
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
from asyncrl.scheduler.sample_transitions import Work
from asyncrl.scheduler.state import SchedulerState
from asyncrl.scheduler.steps import Steps
from asyncrl.scheduler.weights import Weights


class SampleEvents:
    """Handles the events of samples. Late and repeated ones change nothing."""

    def __init__(self, state: SchedulerState, work: Work, steps: Steps, weights: Weights) -> None:
        self._state = state
        self._admission = state.admission
        self._work = work
        self._steps = steps
        self._weights = weights

    def on_finished(self, event: events.SampleFinished) -> None:
        """Hold the sample, verify it if it is too old, deliver its group if that is complete."""
        state = self._state
        generator = state.generator(event.generator)
        group = state.group(event.sample)
        sample = event.sample.sample
        if generator is None or group is None or group.owner is not generator:
            return
        oldest = event.oldest_version
        too_old = oldest < self._admission.min_version(group.step)
        if group.signal is not None:
            too_old |= oldest < generator.will_verify(event.sample)
        if not self._awaits(generator, group, event.sample, oldest, too_old=too_old):
            return
        if generator.rewinding and self._admission.verifies:
            # Sent before the rewind: the version may be one that is gone. It is verified when due.
            oldest, too_old = UNKNOWN_VERSION, True
        # With dynamic sampling, a group may be in a later step than it was begun for.
        may_be_old = self._admission.verifies or group.signal is not None
        if (too_old and not may_be_old) or oldest > state.published:
            raise SenderOutOfStep(
                f"sample {event.sample} of {generator.name} has tokens of policy version "
                f"{oldest}, but is for step {group.step}, which allows none below "
                f"{self._admission.min_version(group.step)}, with version {state.published} "
                "published"
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
            least = self._admission.min_version(self._state.next_undeclared)
            is_late = signal is not None and not self._admission.verifies and oldest < least
            return not is_late
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
                f"{event.generator} was not told to deliver it"
            )
        self._work.mark_delivered(group, sample, generator)
        if group.delivered == state.config.group_size:
            self._steps.arrive(group)
        else:
            self._work.deliver_if_complete(group)
        if owner is not None and state.finished is None:
            self._weights.refill(owner)
