"""The places of groups with dynamic sampling: in which step each is expected.

A group's *place* is the index that it would have if all groups carried signal: place // n is its
step, with n groups a step, and `asyncrl.scheduler.admission` decides by it as it does by the index
without dynamic sampling. With c the first group of the step b that is not decided yet,

    place of group g = b n + (groups of [c, g) that carry signal)

where a group that is not known yet counts as the share of groups with signal so far, and one that
was left out as 0. While b is not decided, places only become smaller: a group that is found to
carry no signal makes room, and a later one is needed earlier. When b is decided, all places are
counted anew.

A step looks at no more than `max_groups` groups, so group g is in step b + (g - c) // max_groups
at the earliest. This bounds the groups that are issued.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.dynamic_ledger import DynamicLedger, Outcome
from asyncrl.scheduler.records import HELD, Group
from asyncrl.scheduler.reward_signal import UNIT, SignalShare, Verdict, has_signal


class Places:
    """Judges groups and counts places. It reads the ledger, and commands nothing.

    Args:
        config: of the scheduler.
        ledger: of the run.
    """

    def __init__(self, config: SchedulerConfig, ledger: DynamicLedger) -> None:
        self._per_step = config.groups_per_step
        self._ledger = ledger
        self._share = SignalShare(
            groups_per_step=config.groups_per_step,
            max_batches=config.dynamic_sampling.max_batches,
        )
        self.changed = True
        """Whether something was learned that may settle a group, move one or issue more."""
        self.step = -1
        """The undecided step that places are counted from; -1: they are to be counted anew."""
        self.left_over = 0
        """Groups that were begun for a step and belong to a later one."""
        self.reached = ledger.first_group
        """No group from here on was delivered or left out, except those that failed."""
        self._units = 0
        """Weight of the groups that are issued, from the first one of the step."""

    def restart(self) -> None:
        """Count anew: the run has returned to an earlier step."""
        self.step, self.changed = -1, True
        self.reached = self._ledger.first_group

    @property
    def share(self) -> float:
        """Expected share of groups with signal, 0 to 1."""
        return self._share.weight / UNIT

    def judge(self, group: Group) -> None:
        """Decide whether a group carries signal, if all of its samples are finished and rewarded.

        All of them must be HELD, and none too old for its step.
        """
        signal = group.signal
        if signal is None or signal.verdict is not Verdict.OPEN:
            return
        rewards = [reward for reward in signal.rewards if reward is not None]
        if len(rewards) < len(signal.rewards) or any(s != HELD for s in group.states):
            return
        signal.verdict = Verdict.SIGNAL if has_signal(rewards) else Verdict.NO_SIGNAL
        self.changed = True

    def begin_step(self, step: int) -> None:
        """Count from this step on, which is the first one that is not decided."""
        for decided in range(self.step, step) if self.step >= 0 else ():
            with_signal, without = self._ledger.looked_at(decided)
            self._share.step(with_signal=with_signal, without=without)
        self.step = step

    def count(self, groups: dict[int, Group]) -> Iterator[tuple[Group, int]]:
        """Each group in flight, in data order, with the place that it has now. O(in flight).

        Args:
            groups: in flight, by index.
        """
        ledger = self._ledger
        first, end = ledger.first_group_of(self.step), ledger.next_group
        weight, units = self._share.weight, 0
        for index in range(first, max([end - 1, *groups]) + 1):
            if index == end:
                self._units = units
            outcome = ledger.outcome(index)
            if outcome is Outcome.ARRIVED:
                units += UNIT
            elif outcome is None:
                group = groups.get(index)
                if group is not None:
                    yield group, self._place(index, units)
                units += weight if group is None else _weight(group, weight)
        if not groups or max(groups) < end:
            self._units = units

    @property
    def next_place(self) -> int:
        """The place of the group that is issued next."""
        return self._place(self._ledger.next_group, self._units)

    def issued(self, kept: Group | None) -> None:
        """A group was issued at `next_place`; `kept` from before a rewind, or new."""
        weight = self._share.weight
        self._units += weight if kept is None else _weight(kept, weight)

    def _place(self, index: int, units: int) -> int:
        ledger = self._ledger
        steps = (index - ledger.first_group_of(self.step)) // ledger.max_groups
        return self.step * self._per_step + max(units // UNIT, steps * self._per_step)


def _weight(group: Group, unknown: int) -> int:
    """What a group in flight adds to the places after it."""
    verdict = Verdict.OPEN if group.signal is None else group.signal.verdict
    if 1 in group.sent or verdict is Verdict.SIGNAL:
        return UNIT
    return 0 if verdict is Verdict.NO_SIGNAL else unknown
