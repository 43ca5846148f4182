"""The run's account of its groups with dynamic sampling: steps take groups that carry signal.

Like `asyncrl.scheduler.ledger`, but step b begins after the last group that step b - 1 took, and
takes the next `groups_per_step` groups in data order that carry signal. Groups in between that
carry none, and failed ones, are settled with it. If its first `max_groups` groups contain fewer
with signal, it takes those and ends there.

>>> ledger = DynamicLedger(groups_per_step=2, max_groups=4, first_step=0)
>>> [ledger.issue() for _ in range(4)]
[0, 1, 2, 3]
>>> ledger.arrive(2)
>>> ledger.leave_out(1)
>>> ledger.membership(0) is None  # group 0 comes before
True
>>> ledger.arrive(0)
>>> ledger.membership(0)
(0, 2)
>>> ledger.consume(0, (0, 2))
>>> ledger.first_group, ledger.counts().without_signal
(3, 1)

`Places` predicts the step of each group. A group's *place* is the index that it would have if all
groups carried signal: place // n is its step, with n groups a step, and
`asyncrl.scheduler.admission` uses it as it uses the index without dynamic sampling. With c the
first group of the undecided step b,

    place of group g = b n + (groups of [c, g) that carry signal)

where a group that is not known yet counts as the share of groups with signal so far, and one that
was left out as 0. While b is undecided, places only become smaller: a group without signal makes
room. When b is decided, all places are counted anew.

A step looks at no more than `max_groups` groups, so group g is in step b + (g - c) // max_groups at
the earliest. This bounds the groups that are issued.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.errors import LedgerError
from asyncrl.scheduler.ledger import Ledger, Outcome
from asyncrl.scheduler.records import HELD, UNIT, Group, SignalShare, Verdict, has_signal


class DynamicLedger(Ledger):
    """A ledger whose steps take `groups_per_step` groups with signal, of at most `max_groups`.

    `first_groups` has the beginning of `first_step` and earlier ones; missing ones begin as without
    dynamic sampling.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_groups: int,
        first_step: int,
        first_groups: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.max_groups = max_groups
        self._starts = {first_step: first_step * groups_per_step, **first_groups}
        """First group of each step whose beginning is decided; one number a step."""
        super().__init__(groups_per_step=groups_per_step, first_step=first_step)

    def first_group_of(self, step: int) -> int:
        """First group of a step. Raises LedgerError if the previous step is undecided."""
        if step not in self._starts:
            raise LedgerError(f"the first group of step {step} is unknown: an earlier step is open")
        return self._starts[step]

    def groups_of(self, step: int) -> range:
        """Groups that a step may take, or has taken; none while the previous step is undecided."""
        start = self._starts.get(step)
        if start is None:
            return range(0)
        return range(start, self._starts.get(step + 1, start + self.max_groups))

    def leave_out(self, group: int) -> None:
        """Record that the group carries no signal. Raises LedgerError if it was settled."""
        self._settle(group, Outcome.NO_SIGNAL, "carries no signal,")

    def membership(self, step: int) -> tuple[int, ...] | None:
        """Groups that the step trains on, ascending; None until it is decided. O(its groups).

        It is decided when every group up to its last one is settled.
        """
        if step not in self._starts:
            return None
        members: list[int] = []
        end = self._starts[step] + self.max_groups
        for group in range(self._starts[step], end):
            outcome = self._settled.get(group)
            if outcome is None:
                return None
            if outcome is Outcome.ARRIVED:
                members.append(group)
                if len(members) == self._per_step:
                    end = group + 1
                    break
        self._starts[step + 1] = end
        return tuple(members)

    def looked_at(self, step: int) -> tuple[int, int]:
        """Groups (with signal, without) of a step that is decided and not consumed."""
        if step < self.next_step:
            return 0, 0
        outcomes = [self._settled.get(group) for group in self.groups_of(step)]
        return outcomes.count(Outcome.ARRIVED), outcomes.count(Outcome.NO_SIGNAL)

    def rewind(self, step: int) -> None:
        """Return to the state before this step. Raises LedgerError if that is ahead or unknown."""
        super().rewind(step)
        for later in [one for one in self._starts if one > step]:
            del self._starts[later]


class Places:
    """Judges groups and counts places. It reads the ledger, and issues no commands."""

    def __init__(self, config: SchedulerConfig, ledger: DynamicLedger) -> None:
        self._per_step = config.groups_per_step
        self._ledger = ledger
        self._share = SignalShare(
            groups_per_step=config.groups_per_step, max_batches=config.dynamic_sampling.max_batches
        )
        self.changed = True
        """True if a fact may settle a group, move one or issue more."""
        self.step = -1
        """The undecided step that places are counted from; -1 to count anew."""
        self.left_over = 0
        self.reached = ledger.first_group
        """The first group from which on none was delivered or left out, except failed ones."""
        self._units = 0
        """Weight of the issued groups, from the first one of the step."""

    def restart(self) -> None:
        """Count anew: the run has returned to an earlier step."""
        self.step, self.changed = -1, True
        self.reached = self._ledger.first_group

    @property
    def share(self) -> float:
        """Expected share of groups with signal, 0 to 1."""
        return self._share.weight / UNIT

    def judge(self, group: Group) -> None:
        """Judge a group if all of its samples are HELD and rewarded; none may be too old."""
        signal = group.signal
        if signal is None or signal.verdict is not Verdict.OPEN:
            return
        rewards = [reward for reward in signal.rewards if reward is not None]
        if len(rewards) < len(signal.rewards) or any(s != HELD for s in group.states):
            return
        signal.verdict = Verdict.SIGNAL if has_signal(rewards) else Verdict.NO_SIGNAL
        self.changed = True

    def begin_step(self, step: int) -> None:
        """Count from this step on, the first undecided one."""
        for decided in range(self.step, step) if self.step >= 0 else ():
            with_signal, without = self._ledger.looked_at(decided)
            self._share.step(with_signal=with_signal, without=without)
        self.step = step

    def count(self, groups: dict[int, Group]) -> Iterator[tuple[Group, int]]:
        """Yield each group in flight, in data order, with its current place. O(in flight)."""
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
        """Count a group issued at `next_place`; `kept` from before a rewind, or new."""
        weight = self._share.weight
        self._units += weight if kept is None else _weight(kept, weight)

    def _place(self, index: int, units: int) -> int:
        ledger = self._ledger
        steps = (index - ledger.first_group_of(self.step)) // ledger.max_groups
        return self.step * self._per_step + max(units // UNIT, steps * self._per_step)


def _weight(group: Group, unknown: int) -> int:
    """Return what a group in flight adds to the places after it."""
    verdict = Verdict.OPEN if group.signal is None else group.signal.verdict
    if 1 in group.sent or verdict is Verdict.SIGNAL:
        return UNIT
    return 0 if verdict is Verdict.NO_SIGNAL else unknown
