"""The run's account of its groups: each is consumed once or failed.

Groups are numbered 0, 1, 2, … in data order. Step b consumes those groups of `[b * groups_per_step,
(b + 1) * groups_per_step)` that did not fail, in order: the consumed groups are a prefix, kept as a
watermark and two counts. Only groups of steps that are not trained yet are stored one by one.

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
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Step:
    """The settled groups of a step that is not trained yet."""

    arrived: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


class Ledger:
    """Records which groups were issued, arrived or failed, and which step consumed them."""

    def __init__(self, *, groups_per_step: int, first_step: int) -> None:
        self._per_step = groups_per_step
        self._first_group = first_step * groups_per_step
        self.next_group = self._first_group
        """The group to be issued next; lower ones were issued, and after `rewind` perhaps later
        ones, which are issued again. The owner of the ledger only reads this."""
        self.issued_below = self._first_group
        """Every group that was ever issued has a lower index, withdrawn groups included."""
        self.next_step = first_step
        """The step to be consumed next; every earlier step is consumed."""
        self._steps: dict[int, _Step] = {}
        self._consumed = 0
        self._failed = 0
        self._failed_in: dict[int, int] = {}

    @property
    def first_group(self) -> int:
        """Every group before this one is consumed or failed."""
        return self.next_step * self._per_step

    def end_of(self, step: int) -> int:
        """First group after a step."""
        return (step + 1) * self._per_step

    def step_of(self, group: int) -> int:
        """The step that a group belongs to; it never changes."""
        return group // self._per_step

    def issue(self) -> int:
        """Issue the next group in data order; return its index."""
        group = self.next_group
        self.next_group += 1
        self.issued_below = max(self.issued_below, self.next_group)
        self._steps.setdefault(self.step_of(group), _Step())
        return group

    def arrive(self, group: int) -> None:
        """Record that the trainer has the whole group. Raises LedgerError if it was settled."""
        self._open(group, "arrives").arrived.add(group)

    def fail(self, group: int) -> None:
        """Record that the group is left out. Raises LedgerError if it was settled."""
        self._open(group, "fails").failed.add(group)

    def membership(self, step: int) -> tuple[int, ...] | None:
        """Groups that the step trains on, ascending; None until all its groups are settled."""
        entry = self._steps.get(step)
        if entry is None or len(entry.arrived) + len(entry.failed) < self._per_step:
            return None
        return tuple(sorted(entry.arrived))

    def progress(self, step: int) -> tuple[int, int]:
        """Groups (arrived, failed) of a step that is not trained yet."""
        entry = self._steps.get(step)
        return (len(entry.arrived), len(entry.failed)) if entry else (0, 0)

    def consume(self, step: int, groups: tuple[int, ...]) -> None:
        """Record that the next step was trained on exactly its groups; else raise LedgerError."""
        members = checked_members(step, self.next_step, self.membership(step), groups)
        entry = self._steps.pop(step)
        self._consumed += len(members)
        if entry.failed:
            self._failed += len(entry.failed)
            self._failed_in[step] = len(entry.failed)
        self.next_step = step + 1

    def rewind(self, step: int) -> None:
        """Return to the state before this step: groups of later steps are issued again.

        Failed groups of this step and later ones are tried again as well. Raises LedgerError if
        earlier steps are not all consumed.
        """
        if step > self.next_step:
            raise LedgerError(
                f"cannot return to step {step}: the next step to be consumed is {self.next_step}"
            )
        first_step = self._first_group // self._per_step
        for lost in range(max(step, first_step), self.next_step):
            failed = self._failed_in.pop(lost, 0)
            self._failed -= failed
            self._consumed -= self._per_step - failed
        self._steps.clear()
        self.next_step = step
        self.next_group = step * self._per_step
        self._first_group = min(self._first_group, self.next_group)

    def withdraw_after(self, step: int) -> None:
        """Withdraw all groups issued for later steps; a resumed run issues them again."""
        self.next_group = min(self.next_group, (step + 1) * self._per_step)
        for later in [s for s in self._steps if s > step]:
            self._failed += len(self._steps.pop(later).failed)

    def unsettled(self) -> Iterator[int]:
        """Yield the groups that were issued and neither arrived nor failed, ascending."""
        for group in range(self.next_step * self._per_step, self.next_group):
            entry = self._steps[self.step_of(group)]
            if group not in entry.arrived and group not in entry.failed:
                yield group

    def counts(self) -> LedgerCounts:
        """Totals. O(steps in flight)."""
        waiting = sum(len(entry.arrived) for entry in self._steps.values())
        failed = self._failed + sum(len(entry.failed) for entry in self._steps.values())
        return LedgerCounts(self.next_group - self._first_group, waiting, self._consumed, failed)

    def _open(self, group: int, verb: str) -> _Step:
        if group >= self.next_group or group < self._first_group:
            raise LedgerError(f"group {group} {verb} but was never issued")
        entry = self._steps.get(self.step_of(group))
        if entry is None:
            raise LedgerError(f"group {group} {verb} but its step was consumed already")
        if group in entry.arrived or group in entry.failed:
            raise LedgerError(f"group {group} {verb} but was settled already")
        return entry


def checked_members(
    step: int, next_step: int, members: tuple[int, ...] | None, groups: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the members of a step that is consumed with these groups. Raises LedgerError."""
    if step != next_step:
        raise LedgerError(
            f"step {step} was consumed out of order: the next one is step {next_step}"
        )
    if members is None:
        raise LedgerError(f"step {step} was consumed before all its groups were settled")
    if tuple(sorted(groups)) != members:
        raise LedgerError(
            f"step {step} was consumed with groups {sorted(groups)}, "
            f"but its members are {list(members)}"
        )
    return members
