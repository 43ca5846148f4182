"""The run's account of its groups: each is consumed once or failed.

Groups are numbered 0, 1, 2, … in data order. Step b consumes those groups of `[b * groups_per_step,
(b + 1) * groups_per_step)` that did not fail, in order: the consumed groups are a prefix. Only
groups of steps that are not trained yet are stored one by one.

>>> ledger = Ledger(groups_per_step=2, first_step=0)
>>> [ledger.issue(), ledger.issue()]
[0, 1]
>>> ledger.arrive(1)
>>> ledger.fail(0)
>>> ledger.membership(0)
(1,)
>>> ledger.consume(0, (1,))
>>> ledger.counts()
LedgerCounts(issued=2, arrived=0, consumed=1, failed=1, without_signal=0)
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from asyncrl.scheduler.errors import LedgerError


class LedgerCounts(NamedTuple):
    """Numbers of groups since this ledger began; a resumed run begins at its first step."""

    issued: int
    """Issued and not withdrawn."""
    arrived: int
    """Complete in the trainer and not consumed yet."""
    consumed: int
    failed: int
    """Reported and left out. Withdrawn ones count, although a resumed run tries them again; those
    of steps that `rewind` undid do not."""
    without_signal: int = 0
    """Left out because they carry no signal (`asyncrl.scheduler.dynamic_ledger`)."""


class Outcome(Enum):
    """The fate of a group."""

    ARRIVED = "arrived"
    """The trainer has it: its step takes it."""
    FAILED = "failed"
    NO_SIGNAL = "no signal"


class Ledger:
    """Records which groups were issued and settled, and which step consumed them."""

    def __init__(self, *, groups_per_step: int, first_step: int) -> None:
        self._per_step = groups_per_step
        self.next_step = first_step
        """The step to be consumed next; every earlier step is consumed."""
        self._first = self.next_group = self.issued_below = self.first_group_of(first_step)
        """`next_group` is issued next; lower ones were issued, and after `rewind` perhaps later
        ones, which are issued again. Every group that was ever issued is below `issued_below`."""
        self._settled: dict[int, Outcome] = {}
        self._settled_below = self._first
        """Every group below is settled or consumed; `membership` raises it, group by group."""
        self._trained_in: dict[int, int] = {}
        self._left_out: dict[int, tuple[int, int]] = {}
        """Groups (failed, without signal) of each consumed step that it did not train on."""
        self._withdrawn_failures = 0

    @property
    def first_group(self) -> int:
        """Every group before this one is consumed or left out."""
        return self.first_group_of(self.next_step)

    def first_group_of(self, step: int) -> int:
        """First group of a step."""
        return step * self._per_step

    def end_of(self, step: int) -> int:
        """First group after a step."""
        return self.first_group_of(step + 1)

    def groups_of(self, step: int) -> range:
        """Groups that a step may take."""
        return range(self.first_group_of(step), self.end_of(step))

    def outcome(self, group: int) -> Outcome | None:
        """The fate of a group that is not consumed, once settled."""
        return self._settled.get(group)

    def issue(self) -> int:
        """Issue the next group in data order; return its index."""
        group = self.next_group
        self.next_group += 1
        self.issued_below = max(self.issued_below, self.next_group)
        return group

    def arrive(self, group: int) -> None:
        """Record that the trainer has the whole group. Raises LedgerError if it was settled."""
        self._settle(group, Outcome.ARRIVED, "arrives")

    def fail(self, group: int) -> None:
        """Record that the group is left out. Raises LedgerError if it was settled."""
        self._settle(group, Outcome.FAILED, "fails")

    def membership(self, step: int) -> tuple[int, ...] | None:
        """Groups that the step trains on, ascending; None until all its groups are settled."""
        while self._settled_below in self._settled:
            self._settled_below += 1
        groups = self.groups_of(step)
        if step < self.next_step or self._settled_below < groups.stop:
            return None
        return tuple(one for one in groups if self._settled[one] is Outcome.ARRIVED)

    def progress(self, step: int) -> tuple[int, int]:
        """Groups (arrived, left out) so far of a step that is not trained yet."""
        outcomes = [self._settled.get(group) for group in self.groups_of(step)]
        arrived = outcomes.count(Outcome.ARRIVED)
        return arrived, len(outcomes) - outcomes.count(None) - arrived

    def consume(self, step: int, groups: tuple[int, ...]) -> None:
        """Record that the next step was trained on exactly its groups; else raise LedgerError."""
        if step != self.next_step:
            raise LedgerError(
                f"step {step} was consumed out of order: the next one is step {self.next_step}"
            )
        members = self.membership(step)
        if members is None:
            raise LedgerError(f"step {step} was consumed before all its groups were settled")
        if tuple(sorted(groups)) != members:
            raise LedgerError(
                f"step {step} was consumed with groups {sorted(groups)}, "
                f"but its members are {list(members)}"
            )
        settled = [self._settled.pop(group) for group in self.groups_of(step)]
        failed = settled.count(Outcome.FAILED)
        self._trained_in[step] = len(members)
        if len(settled) > len(members):
            self._left_out[step] = failed, len(settled) - len(members) - failed
        self.next_step = step + 1

    def rewind(self, step: int) -> None:
        """Return to the state before this step: its groups and later ones are issued again.

        Failed ones are tried again as well. Raises LedgerError if earlier steps are not all
        consumed.
        """
        if step > self.next_step:
            raise LedgerError(
                f"cannot return to step {step}: the next step to be consumed is {self.next_step}"
            )
        self.next_group = self.first_group_of(step)
        for table in (self._trained_in, self._left_out):
            for later in [one for one in table if one >= step]:
                del table[later]
        self._settled.clear()
        self._settled_below = self.next_group
        self.next_step = step
        self._first = min(self._first, self.next_group)

    def withdraw_from(self, group: int) -> None:
        """Withdraw this group and all later ones; they may be issued again."""
        self.next_group = min(self.next_group, group)
        self._settled_below = min(self._settled_below, group)
        for later in [one for one in self._settled if one >= group]:
            self._withdrawn_failures += self._settled.pop(later) is Outcome.FAILED

    def unsettled(self) -> Iterator[int]:
        """Yield the groups that were issued and not settled, ascending."""
        for group in range(self.first_group, self.next_group):
            if group not in self._settled:
                yield group

    def counts(self) -> LedgerCounts:
        """Totals. O(steps and settled groups)."""
        outcomes = list(self._settled.values())
        failed, without = map(sum, zip((0, 0), *self._left_out.values(), strict=True))
        return LedgerCounts(
            issued=self.next_group - self._first,
            arrived=outcomes.count(Outcome.ARRIVED),
            consumed=sum(self._trained_in.values()),
            failed=failed + self._withdrawn_failures + outcomes.count(Outcome.FAILED),
            without_signal=without + outcomes.count(Outcome.NO_SIGNAL),
        )

    def _settle(self, group: int, outcome: Outcome, verb: str) -> None:
        if group >= self.next_group or group < self._first:
            raise LedgerError(f"group {group} {verb} but was never issued")
        if group < self.first_group:
            raise LedgerError(f"group {group} {verb} but its step was consumed already")
        if group in self._settled:
            raise LedgerError(f"group {group} {verb} but was settled already")
        self._settled[group] = outcome
