"""Steps of groups that carry signal, in data order (`scheduler.dynamic_sampling`).

    rewards ──► verdict of a group ──► reached by the step? ──► signal: delivered, the step takes it
                                              │                 none: left out, reported, forgotten
                                              └── not yet, or never: it waits for the groups before

**Which groups a step takes.** Step b begins after the last group of step b - 1 and takes the next n
groups that carry signal (`asyncrl.scheduler.dynamic_ledger`). A group is *reached* as soon as fewer
than n of the step's groups before it carry signal or may carry signal: then the step certainly
looks at it, and its verdict counts. So training data depends on the data order and on rewards,
never on what finishes first, and groups are delivered as soon as the step is certain to take them.

**When a group is judged.** When all of its samples are finished and rewarded, with tokens that its
step may train on. (With `verify` and max_off_policy_steps 0, all were verified by, or drawn from,
the policy that trains on them.) A group that its step does not reach belongs to the next step. If
its tokens are too old for that, they are verified again (`verify`), or drawn again (other modes),
its rewards are recomputed where tokens changed, and it is judged anew. Its first verdict had no
consequence: the step that it was for had all its groups before it. So each step's groups are those
of a synchronous trainer that draws group after group from the current policy and leaves out those
without signal (docs/exactness.md).

**How many are issued.** As many as are expected to be needed (`scheduler.dynamic_ledger`), at most
`max_batches` times as many as without dynamic sampling. The expectation decides when a group is
drawn, and nothing else.

**Losses.** A group whose delivery was ordered stays a member of its step: if its generator is lost,
the samples that the trainer lacks are drawn again and delivered without another verdict. Before
that, a lost group is judged anew.
"""

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands
from asyncrl.scheduler.dynamic_ledger import DynamicLedger, Places
from asyncrl.scheduler.errors import SchedulerError
from asyncrl.scheduler.ledger import Outcome
from asyncrl.scheduler.records import HELD, RUNNING, VERIFYING, Group, Verdict
from asyncrl.scheduler.sample_transitions import Weights, Work
from asyncrl.scheduler.state import SchedulerState
from asyncrl.scheduler.steps import Steps


class DynamicSampling:
    """Settles the groups that the current step reaches, after each event."""

    def __init__(self, state: SchedulerState, work: Work, steps: Steps, weights: Weights) -> None:
        if state.places is None or not isinstance(state.ledger, DynamicLedger):
            raise SchedulerError("dynamic sampling is not enabled")
        self._state = state
        self._places: Places = state.places
        self._ledger: DynamicLedger = state.ledger
        self._work, self._steps, self._weights = work, steps, weights

    def settle(self) -> None:
        """Act on the changes of an event."""
        state, places = self._state, self._places
        while places.changed and state.finished is None and state.trainer_joined:
            places.changed = False
            self._move_groups()
            if state.next_undeclared > state.last_step:
                break  # the remaining groups are not needed
            self._leave_out()
            if places.changed:
                continue
            self._deliver()
            self._steps.declare()
            if state.next_undeclared == places.step:
                self._steps.issue()  # a group that is left from before a rewind may be complete
                self._work.place_waiting()
            else:
                places.changed = True

    def _move_groups(self) -> None:
        state, places = self._state, self._places
        has_moved = False
        is_new = places.step != state.next_undeclared
        before = places.step
        if is_new:
            places.begin_step(state.next_undeclared)
        for group, place in places.count(state.groups):
            if is_new and before >= 0 and group.step <= before and not group.untouched:
                places.left_over += 1
            is_ahead = group.index >= self._ledger.next_group  # a rewind left it
            if is_new or is_ahead or place < group.place:
                self._move(group, place)
                has_moved = True
            elif 1 in group.stale:
                self._verify(group)
            if is_new and not state.admission.verifies:
                self._draw_again(group)
        if has_moved:
            for generator in list(state.generators.values()):
                self._work.start(generator)  # more may be started than before

    def _move(self, group: Group, place: int) -> None:
        """Move a group to another place, and verify what is due in its step."""
        state, signal = self._state, group.signal
        group.place, before = place, group.step
        group.step = place // state.config.groups_per_step
        owner = group.owner
        if group.step == before or owner is None or signal is None or 1 in group.sent:
            return
        least = state.admission.min_version(group.step)
        for sample, sample_state in enumerate(group.states):
            if sample_state == HELD:
                will_verify = owner.will_verify(SampleId(group.index, sample))
                group.stale[sample] = signal.oldest[sample] < max(least, will_verify)
        if 1 in group.stale:
            signal.verdict = Verdict.OPEN
        was_ahead = owner.version < state.admission.min_version(before)
        self._verify(group, all_running=was_ahead or group.step > before)
        self._work.deliver_if_complete(group)

    def _verify(self, group: Group, *, all_running: bool = False) -> None:
        """Verify samples that may be too old for the group's step, unless an install will."""
        state, owner, signal = self._state, group.owner, group.signal
        if owner is None or signal is None or owner.rewinding or owner.leaving:
            return
        can_verify = state.config.partial_rollout or owner.installing is None
        least = state.admission.min_version(group.step)
        if not state.admission.verifies or not can_verify or owner.version < least:
            return
        samples = [
            sample
            for sample, sample_state in enumerate(group.states)
            if group.stale[sample]
            or (sample_state == RUNNING and all_running)
            or (sample_state == VERIFYING and signal.oldest[sample] < least)
        ]
        if owner.installing is not None:
            samples = [one for one in samples if SampleId(group.index, one) not in owner.requested]
        if samples:
            self._work.verify(owner, group, samples, least)

    def _draw_again(self, group: Group) -> None:
        """Redraw samples that no later step can train on; only `verify` can use them."""
        owner, signal = group.owner, group.signal
        if owner is None or signal is None or 1 in group.sent:
            return
        least = self._state.admission.min_version(self._places.step)
        samples = [
            sample
            for sample, sample_state in enumerate(group.states)
            if sample_state in (RUNNING, HELD) and signal.oldest[sample] < least
        ]
        if samples:
            self._work.draw_again(owner, group, samples)
            self._weights.refill(owner)

    def _leave_out(self) -> None:
        for group in self._reached():
            if self._verdict(group) is Verdict.NO_SIGNAL and group.signal is not None:
                reward = group.signal.rewards[0]
                self._ledger.leave_out(group.index)
                self._state.commands.append(
                    commands.ReportGroupWithoutSignal(group.index, group.step, reward or 0.0)
                )
                self._work.discard([group])
                self._places.changed = True
                self._places.reached = max(self._places.reached, group.index + 1)

    def _deliver(self) -> None:
        for group in self._reached():
            if self._verdict(group) is Verdict.SIGNAL and 1 not in group.sent:
                self._work.deliver(group)
                self._places.reached = max(self._places.reached, group.index + 1)

    def _reached(self) -> list[Group]:
        """Groups in flight that the step certainly looks at. O(groups of a step)."""
        ledger, per_step = self._ledger, self._state.config.groups_per_step
        first = ledger.first_group_of(self._places.step)
        reached: list[Group] = []
        with_signal = 0
        for index in range(first, min(ledger.next_group, first + ledger.max_groups)):
            if with_signal == per_step:
                break
            outcome = ledger.outcome(index)
            if outcome is None:
                group = self._state.groups[index]
                reached.append(group)
                with_signal += self._verdict(group) is not Verdict.NO_SIGNAL
            elif outcome is Outcome.ARRIVED:
                with_signal += 1
        return reached

    def _verdict(self, group: Group) -> Verdict:
        owner, signal = group.owner, group.signal
        if signal is None or owner is None or 1 in group.sent:
            return Verdict.OPEN
        if owner.rewinding or self._work.gives_away(owner):
            return Verdict.OPEN
        return signal.verdict
