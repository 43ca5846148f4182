"""The groups in flight, and every move that their samples make.

`Work` moves samples between the states of `scheduler.records`, keeps the counts of their groups and
generators, and says what has to be done for it. When a move is due is decided in
`scheduler.scheduler`.
"""

from __future__ import annotations

from rollout.trajectory import SampleId
from scheduler import commands as out
from scheduler.admission import Admission
from scheduler.commands import Command
from scheduler.config import SchedulerConfig
from scheduler.placement import Placement
from scheduler.records import (
    DELIVERED,
    DELIVERING,
    HELD,
    QUEUED,
    RUNNING,
    VERIFYING,
    Generator,
    Group,
)


class Work:
    """Groups that are neither in the trainer nor failed, and who has them."""

    def __init__(self, config: SchedulerConfig, admission: Admission) -> None:
        self.placement = Placement(config.group_size)
        self.generators = self.placement.generators
        """Those that are alive, by name."""
        self.groups: dict[int, Group] = {}
        """By index."""
        self.paused = False
        """Start nothing."""
        self.commands: list[Command] = []
        """What the event in hand has led to; the scheduler takes the list after each event."""
        self.anything_sent = False
        """Whether any group was ever sent to the trainer."""
        self._config = config
        self._admission = admission

    def issue(self, index: int, step: int, key: int | None) -> None:
        """A new group: give it to a generator, or let it wait for one."""
        group = Group.new(index, step, key, self._config.group_size)
        self.groups[index] = group
        self.place(group)

    def place(self, group: Group) -> None:
        """Give a group to a generator, which starts of it what it has room for."""
        generator = self.placement.place(group)
        if generator is not None:
            self.start(generator)

    def place_waiting(self) -> None:
        """Place what waited for a generator, as far as there is one now."""
        placement = self.placement
        while placement.has_candidates and (group := placement.next_unplaced()) is not None:
            self.place(group)

    def start(self, generator: Generator) -> None:
        """Start samples on a generator while it has room and admissible work."""
        if self.paused or generator.draining:
            return
        if generator.installing is not None and not self._config.partial_rollout:
            return  # the new weights would come in the middle of it
        newest_group = self._admission.last_group_to_start(generator.version)
        if generator.kv_used >= self._config.runahead_kv_limit:
            newest_group = self._admission.last_due_group(generator.version)
        while generator.running < generator.limit:
            group = self.placement.next_group(generator, newest_group)
            if group is None:
                return
            sample = group.states.find(QUEUED)
            group.states[sample] = RUNNING
            group.attempts[sample] += 1
            group.queued -= 1
            group.running += 1
            generator.running += 1
            ahead = max(0, self._admission.min_version(group.step) - generator.version)
            self.commands.append(
                out.StartSample(generator.name, SampleId(group.index, sample), ahead)
            )

    def take_back(self, group: Group) -> int | None:
        """Queue again what a lost generator had; returns a sample with no attempt left, if any."""
        hopeless = None
        for sample, state in enumerate(group.states):
            if state == DELIVERED:
                continue
            if state != QUEUED and group.attempts[sample] >= self._config.max_attempts:
                hopeless = sample
            group.states[sample] = QUEUED
            group.stale[sample] = 0
        group.queued = self._config.group_size - group.delivered
        group.running = group.verifying = 0
        return hopeless

    def finished(
        self, generator: Generator, group: Group, sample: int, *, oldest_version: int
    ) -> None:
        """RUNNING or VERIFYING to HELD; a complete group is delivered.

        A sample with tokens too old is verified at once if its generator can, else when it can.
        """
        state = group.states[sample]
        group.states[sample] = HELD
        self._leave(generator, group, state)
        generator.held += 1
        least = self._admission.min_version(group.step)
        group.stale[sample] = oldest_version < least
        if group.stale[sample] and generator.version >= least:
            self._verify(generator, group, [sample])
        self.placement.update(generator)
        self.deliver_if_complete(group)

    def verify_due(self, generator: Generator, version_before: int) -> None:
        """A generator's version rose: verify what is too old for its step and could not be before.

        Running samples are too old as well, as they were started under the version before.
        """
        for group in list(generator.groups.values()):
            least = self._admission.min_version(group.step)
            if version_before < least <= generator.version:
                due = [
                    sample
                    for sample, state in enumerate(group.states)
                    if state == RUNNING or group.stale[sample]
                ]
                self._verify(generator, group, due)

    def _verify(self, generator: Generator, group: Group, samples: list[int]) -> None:
        """Command it; what is HELD becomes VERIFYING, what is RUNNING stays so."""
        if not samples:
            return
        for sample in samples:
            if group.states[sample] == HELD:
                group.states[sample] = VERIFYING
                group.stale[sample] = 0
                group.verifying += 1
                generator.verifying += 1
        names = tuple(SampleId(group.index, sample) for sample in samples)
        least = self._admission.min_version(group.step)
        self.commands.append(out.VerifySamples(generator.name, names, least))

    def delivered(self, group: Group, sample: int, by: Generator | None) -> None:
        """Any state to DELIVERED: the trainer has it, whoever else was about to write it again."""
        owner, state = group.owner, group.states[sample]
        group.states[sample] = DELIVERED
        group.delivered += 1
        if state == QUEUED:
            group.queued -= 1
        if owner is None:
            return
        if state == QUEUED:
            owner.load -= 1
        else:
            self._leave(owner, group, state)
            if owner is not by:  # a lost generator had delivered it: do not write it again
                again = SampleId(group.index, sample)
                self.commands.append(out.DiscardSamples(owner.name, (again,)))
        self.placement.update(owner)

    def deliver_if_complete(self, group: Group) -> None:
        """Command delivery of what is HELD, once nothing of the group is left to write."""
        owner = group.owner
        if group.queued or group.running or group.verifying or owner is None or 1 in group.stale:
            return
        samples = []
        for sample, state in enumerate(group.states):
            if state == HELD:
                group.states[sample] = DELIVERING
                group.sent[sample] = 1
                samples.append((owner.name, SampleId(group.index, sample)))
        if samples:
            self.anything_sent = True
            self.commands.append(out.DeliverGroup(group.step, group.index, tuple(samples)))

    def discard(self, groups: list[Group]) -> None:
        """Forget groups; their owners abort or forget the samples, one command per owner."""
        by_owner: dict[str, list[SampleId]] = {}
        for group in groups:
            owner = group.owner
            if owner is not None:
                for sample, state in enumerate(group.states):
                    if state in (RUNNING, HELD, VERIFYING, DELIVERING):
                        self._leave(owner, group, state)
                        by_owner.setdefault(owner.name, []).append(SampleId(group.index, sample))
                owner.load -= group.queued
                self.placement.update(owner)
            group.queued = 0
            self.forget(group)
        for name, samples in by_owner.items():
            self.commands.append(out.DiscardSamples(name, tuple(samples)))

    def forget(self, group: Group) -> None:
        """The group is in the trainer or failed."""
        del self.groups[group.index]
        if group.owner is not None:
            del group.owner.groups[group.index]
            group.owner = None

    def _leave(self, owner: Generator, group: Group, state: int) -> None:
        """Account for a sample in one of these states that its owner no longer has in it."""
        if state == RUNNING:
            group.running -= 1
            owner.running -= 1
            owner.load -= 1
            return
        owner.held -= 1
        if state == VERIFYING:
            group.verifying -= 1
            owner.verifying -= 1
