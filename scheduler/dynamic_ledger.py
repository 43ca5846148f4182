"""The run's account of its groups with dynamic sampling: steps take groups that carry signal.

As `asyncrl.scheduler.ledger`, but where a step begins depends on the groups before it. Step b
begins after the last group that step b - 1 took. It takes the next `groups_per_step` groups in data
order that carry signal. Groups in between that carry none, and failed ones, are settled with it. If
its first `max_groups` groups do not hold as many with signal, it takes what they hold and ends
there.

Example:
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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from asyncrl.scheduler.errors import LedgerError
from asyncrl.scheduler.ledger import LedgerCounts, checked_members


class Outcome(Enum):
    """What became of a group."""

    ARRIVED = "arrived"
    """The trainer has it: its step takes it."""
    FAILED = "failed"
    NO_SIGNAL = "no signal"


class _LeftOut(NamedTuple):
    """Groups of a consumed step that it did not train on."""

    failed: int
    without_signal: int


class DynamicLedger:
    """Records which groups were issued and settled, and which step took them.

    Args:
        groups_per_step: with signal, that a step takes.
        max_groups: that a step looks at, at most.
        first_step: the step to begin with.
        first_groups: where this step and earlier ones begin; those that are missing begin where
            they would without dynamic sampling.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_groups: int,
        first_step: int,
        first_groups: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._per_step = groups_per_step
        self.max_groups = max_groups
        self._starts = {first_step: first_step * groups_per_step, **first_groups}
        """First group of each step that has one, one number a step."""
        self._first = self._next_group = self._issued_below = self._starts[first_step]
        self._next_step = first_step
        self._settled: dict[int, Outcome] = {}
        """Settled groups that are not consumed."""
        self._trained_in: dict[int, int] = {}
        """Groups that each consumed step trained on."""
        self._left_out: dict[int, _LeftOut] = {}
        """Of each consumed step with any."""

    @property
    def next_step(self) -> int:
        """The step to be consumed next; every earlier step is consumed."""
        return self._next_step

    @property
    def next_group(self) -> int:
        """The group to be issued next; every lower index was issued."""
        return self._next_group

    @property
    def issued_below(self) -> int:
        """Every group that was ever issued has a lower index, withdrawn groups included."""
        return self._issued_below

    @property
    def first_group(self) -> int:
        """Every group before this one is consumed or left out."""
        return self._starts[self._next_step]

    def first_group_of(self, step: int) -> int:
        """Where a step begins. Raises LedgerError if the step before it is not decided."""
        if step not in self._starts:
            raise LedgerError(f"step {step} has no first group: the steps before are not decided")
        return self._starts[step]

    def end_of(self, step: int) -> int:
        """The first group after a step that is decided."""
        return self.first_group_of(step + 1)

    def outcome(self, group: int) -> Outcome | None:
        """What became of a group that is not consumed; None if it is not settled."""
        return self._settled.get(group)

    def issue(self) -> int:
        """Issue the next group in data order; returns its index."""
        group = self._next_group
        self._next_group += 1
        self._issued_below = max(self._issued_below, self._next_group)
        return group

    def arrive(self, group: int) -> None:
        """Record that the trainer has the whole group. Raises LedgerError if it was settled."""
        self._settle(group, Outcome.ARRIVED, "arrives")

    def fail(self, group: int) -> None:
        """Record that the group is left out. Raises LedgerError if it was settled."""
        self._settle(group, Outcome.FAILED, "fails")

    def leave_out(self, group: int) -> None:
        """Record that the group carries no signal. Raises LedgerError if it was settled."""
        self._settle(group, Outcome.NO_SIGNAL, "carries no signal,")

    def membership(self, step: int) -> tuple[int, ...] | None:
        """The groups that the step trains on, ascending; None until it is decided. O(its groups).

        It is decided when every group up to its last one is settled.
        """
        start = self._starts.get(step)
        if start is None:
            return None
        members: list[int] = []
        end = start + self.max_groups
        for group in range(start, end):
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
        if step < self._next_step:
            return 0, 0
        groups = range(self.first_group_of(step), self.end_of(step))
        outcomes = [self._settled.get(group) for group in groups]
        return outcomes.count(Outcome.ARRIVED), outcomes.count(Outcome.NO_SIGNAL)

    def progress(self, step: int) -> tuple[int, int]:
        """The numbers of groups (arrived, left out) of a step that is not trained yet, so far."""
        start = self._starts.get(step)
        if start is None:
            return 0, 0
        end = self._starts.get(step + 1, start + self.max_groups)
        outcomes = [one for group, one in self._settled.items() if start <= group < end]
        arrived = outcomes.count(Outcome.ARRIVED)
        return arrived, len(outcomes) - arrived

    def consume(self, step: int, groups: tuple[int, ...]) -> None:
        """Record that a step was trained on exactly these groups.

        Raises:
            LedgerError: it is not the next step, or these are not exactly its members.
        """
        members = checked_members(step, self._next_step, self.membership(step), groups)
        settled = [self._settled.pop(one) for one in range(self._starts[step], self.end_of(step))]
        failed = settled.count(Outcome.FAILED)
        self._trained_in[step] = len(members)
        if len(settled) > len(members):
            self._left_out[step] = _LeftOut(failed, len(settled) - len(members) - failed)
        self._next_step = step + 1

    def rewind(self, step: int) -> None:
        """Return to the state before this step: later groups are issued again.

        Raises:
            LedgerError: earlier steps are not all consumed, or nobody knows where it begins.
        """
        if step > self._next_step:
            raise LedgerError(
                f"cannot return to step {step}: the next step to be consumed is {self._next_step}"
            )
        self._next_group = self.first_group_of(step)
        for table in (self._trained_in, self._left_out):
            for later in [one for one in table if one >= step]:
                del table[later]
        for later in [one for one in self._starts if one > step]:
            del self._starts[later]
        self._settled.clear()
        self._next_step = step
        self._first = min(self._first, self._next_group)

    def withdraw_from(self, group: int) -> None:
        """Withdraw this group and all later ones; they may be issued again."""
        self._next_group = min(self._next_group, group)
        for later in [one for one in self._settled if one >= group]:
            del self._settled[later]

    def unsettled(self) -> Iterator[int]:
        """The groups that were issued and not settled, ascending."""
        for group in range(self.first_group, self._next_group):
            if group not in self._settled:
                yield group

    def counts(self) -> LedgerCounts:
        """Totals. O(steps and settled groups)."""
        outcomes = list(self._settled.values())
        left_out = self._left_out.values()
        return LedgerCounts(
            issued=self._next_group - self._first,
            arrived=outcomes.count(Outcome.ARRIVED),
            consumed=sum(self._trained_in.values()),
            failed=sum(one.failed for one in left_out) + outcomes.count(Outcome.FAILED),
            without_signal=sum(one.without_signal for one in left_out)
            + outcomes.count(Outcome.NO_SIGNAL),
        )

    def _settle(self, group: int, outcome: Outcome, verb: str) -> None:
        if group >= self._next_group or group < self._first:
            raise LedgerError(f"group {group} {verb} but was never issued")
        if group < self.first_group:
            raise LedgerError(f"group {group} {verb} but its step was consumed already")
        if group in self._settled:
            raise LedgerError(f"group {group} {verb} but was settled already")
        self._settled[group] = outcome
