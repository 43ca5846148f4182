"""Moves samples between the states of `asyncrl.scheduler.records`, and installs weights.

Each move updates the counts of the sample's group and generator and issues the command that the
move requires. The event handlers decide when a move is due.

Samples become due for verification when their generator's version rises. They are commanded
together with the install of that version, so that the generator starts them as soon as it is
installed. Samples started between the command and its report are commanded after the report.
"""

from collections.abc import Mapping

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.errors import SenderOutOfStep
from asyncrl.scheduler.records import (
    DELIVERED,
    DELIVERING,
    HELD,
    QUEUED,
    RUNNING,
    STARTED,
    VERIFYING,
    Generator,
    Group,
    GroupSignal,
)
from asyncrl.scheduler.state import SchedulerState


class Work:
    """The groups in flight: starts, verifies, delivers and discards their samples."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._config, self._commands = state, state.config, state.commands
        self._admission, self._placement = state.admission, state.placement

    def issue(self, index: int, place: int, key: int | None) -> None:
        """Create a group and give it to a generator, or let it wait for one."""
        size = self._config.group_size
        group = Group.new(index, place // self._config.groups_per_step, key, size)
        if self._state.places is not None:
            group.place, group.signal = place, GroupSignal.new(size)
        self._state.groups[index] = group
        self.place(group)

    def place(self, group: Group) -> None:
        """Give a group to a generator, which starts as many of its samples as it has room for."""
        generator = self._placement.place(group)
        if generator is not None:
            self.start(generator)

    def place_waiting(self) -> None:
        """Place waiting groups, if a generator can take them now."""
        placement = self._placement
        while placement.has_candidates and (group := placement.next_unplaced()) is not None:
            self.place(group)

    def start(self, generator: Generator) -> None:
        """Start samples on a generator while it has room and there is work that it may start."""
        room = generator.room
        if room <= 0:
            return
        if self._state.paused or generator.draining or generator.rewinding:
            return
        if self.gives_away(generator):
            return
        if generator.installing is not None and not self._config.partial_rollout:
            return  # the new weights would arrive in the middle of the sample
        has_space = generator.kv_used < self._config.runahead_kv_limit
        last_group = self._admission.last_group(generator.version, ahead=has_space)
        for _ in range(room):
            group = self._placement.next_group(generator, last_group)
            if group is None:
                return
            sample = group.states.find(QUEUED)
            group.states[sample] = RUNNING
            if group.signal is not None:
                group.signal.oldest[sample] = generator.version
            group.attempts[sample] += 1
            group.queued -= 1
            group.running += 1
            generator.running += 1
            priority = self._admission.versions_ahead(group.step, generator.version)
            self._commands.append(
                commands.StartSample(generator.name, SampleId(group.index, sample), priority)
            )

    def requeue(self, group: Group) -> int | None:
        """Requeue a lost generator's samples; return one without an attempt left, if any."""
        exhausted = None
        for sample, state in enumerate(group.states):
            if state == DELIVERED:
                continue
            if state != QUEUED and group.attempts[sample] >= self._config.max_attempts:
                exhausted = sample
            group.states[sample] = QUEUED
            group.stale[sample] = 0
            if group.signal is not None:
                group.signal.forget(sample)
        group.queued = self._config.group_size - group.delivered
        group.running = group.verifying = 0
        return exhausted

    def take_away(self, group: Group) -> None:
        """Queue samples that the leaving generator no longer has; the attempts do not count."""
        owner = group.owner
        if owner is None:
            return
        for sample, state in enumerate(group.states):
            if state in STARTED:
                self._leave(owner, group, state)
                self._queue_again(owner, group, sample)
        owner.load -= group.queued
        del owner.groups[group.index]
        group.owner = None

    def draw_again(self, owner: Generator, group: Group, samples: list[int]) -> None:
        """Redraw samples whose tokens are too old for every later step; attempts do not count."""
        for sample in samples:
            self._leave(owner, group, group.states[sample])
            self._queue_again(owner, group, sample)
        ids = tuple(SampleId(group.index, sample) for sample in samples)
        self._commands.append(commands.DiscardSamples(owner.name, ids))
        self._placement.put_back(group)

    @staticmethod
    def _queue_again(owner: Generator, group: Group, sample: int) -> None:
        group.states[sample] = QUEUED
        group.stale[sample] = 0
        group.attempts[sample] -= 1
        group.queued += 1
        owner.load += 1
        if group.signal is not None:
            group.signal.forget(sample)

    def install(self, generator: Generator, version: int) -> None:
        """Command an install together with the verification that it makes possible."""
        verify = tuple(
            _command(generator, group, samples, min_version)
            for group, samples, min_version in self._due(generator, generator.version, version)
        )
        generator.installing = version
        generator.requested = {sample: one.min_version for one in verify for sample in one.samples}
        self._commands.append(commands.InstallWeights(generator.name, version, verify))

    def verify_due(self, generator: Generator, version_before: int) -> None:
        """Verify what a generator's newer version allows and its install did not command."""
        requested, generator.requested = generator.requested, {}
        for group, due, min_version in self._due(generator, version_before, generator.version):
            _begin(generator, group, due, min_version)
            rest = [sample for sample in due if SampleId(group.index, sample) not in requested]
            if rest:
                self._commands.append(_command(generator, group, rest, min_version))
        if self._state.places is not None:
            self._begin_requested(generator, requested)

    def _begin_requested(self, generator: Generator, requested: Mapping[SampleId, int]) -> None:
        """Mark commanded verifications, although a group may have moved to another step."""
        for one, least in requested.items():
            group = self._state.groups.get(one.group)
            if group is None or group.owner is not generator or generator.version < least:
                continue
            if group.stale[one.sample]:
                _begin(generator, group, [one.sample], least)

    def verify(
        self, generator: Generator, group: Group, samples: list[int], min_version: int
    ) -> None:
        """Command the verification of these samples of a group now."""
        _begin(generator, group, samples, min_version)
        self._commands.append(_command(generator, group, samples, min_version))

    def _due(
        self, generator: Generator, before: int, version: int
    ) -> list[tuple[Group, list[int], int]]:
        """List (group, samples, minimum version) that become due, in data order.

        These are the samples of steps whose minimum version lies between the two versions,
        including running ones, which were started under the earlier version.
        """
        due: list[tuple[Group, list[int], int]] = []
        if not self._admission.verifies or generator.leaving:
            return due
        for group in sorted(generator.groups.values()):
            min_version = self._admission.min_version(group.step)
            if before < min_version <= version:
                samples = [
                    sample
                    for sample, state in enumerate(group.states)
                    if state == RUNNING or group.stale[sample]
                ]
                if samples:
                    due.append((group, samples, min_version))
        return due

    def hold(self, generator: Generator, group: Group, sample: int, *, too_old: bool) -> None:
        """RUNNING, VERIFYING or HELD to HELD; a complete group is delivered.

        It may have been HELD with tokens that are too old, and be verified now. With `too_old`, it
        has tokens that its step may not train on: it is verified at once if the generator's version
        allows it, otherwise later.
        """
        state = group.states[sample]
        group.states[sample] = HELD
        self._leave(generator, group, state)
        generator.held += 1
        group.stale[sample] = too_old
        if too_old:
            min_version = self._admission.min_version(group.step)
            can_verify = self._admission.verifies and not self.gives_away(generator)
            if generator.version >= min_version and can_verify:
                self.verify(generator, group, [sample], min_version)
        self._placement.update(generator)
        self.deliver_if_complete(group)

    def mark_delivered(self, group: Group, sample: int, by: Generator | None) -> None:
        """Any state to DELIVERED: the trainer has the sample.

        `by` is the delivering generator, unless it is lost. If the group has another owner by now,
        the owner discards the sample.
        """
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
            if owner is not by:  # a lost generator had delivered it: it need not be regenerated
                regenerated = SampleId(group.index, sample)
                self._commands.append(commands.DiscardSamples(owner.name, (regenerated,)))
        self._placement.update(owner)

    def deliver_if_complete(self, group: Group) -> None:
        """Command delivery of the HELD samples if none of the group is left to generate.

        Nothing is delivered without a trainer, by a generator that rewinds, or of a group
        that a rewind left ahead of the groups that are issued.
        """
        owner = group.owner
        if not self._state.trainer_joined or group.index >= self._state.ledger.next_group:
            return
        if owner is not None and (owner.rewinding or self.gives_away(owner)):
            return
        if group.queued or group.running or group.verifying or owner is None or 1 in group.stale:
            return
        if self._state.places is not None and 1 not in group.sent:
            self._state.places.judge(group)  # `DynamicSampling` delivers it, or leaves it out
            return
        self.deliver(group)

    def deliver(self, group: Group) -> None:
        """Command delivery of the HELD samples of a group of which none is left to generate."""
        owner = group.owner
        if owner is None:
            return
        samples = []
        for sample, state in enumerate(group.states):
            if state == HELD:
                group.states[sample] = DELIVERING
                group.sent[sample] = 1
                samples.append((owner.name, SampleId(group.index, sample)))
        if samples:
            self._commands.append(commands.DeliverGroup(group.step, group.index, tuple(samples)))

    def gives_away(self, owner: Generator) -> bool:
        """Return True if this generator's samples move to others."""
        return owner.leaving and self._admission.verifies

    def suspect(self, group: Group) -> None:
        """HELD and VERIFYING to HELD with tokens that may be too old, to be verified when due.

        For a group whose generator rewinds: only the generator knows which tokens are too old, and
        answers at once for a sample that needs no verification.
        """
        for sample, state in enumerate(group.states):
            if state == VERIFYING:
                group.states[sample] = HELD
                group.verifying -= 1
                if group.owner is not None:
                    group.owner.verifying -= 1
            if state in (HELD, VERIFYING):
                group.stale[sample] = 1
                if group.signal is not None:
                    group.signal.forget(sample)

    def discard(self, groups: list[Group]) -> None:
        """Forget groups. Each owner aborts or forgets its samples by one command."""
        by_owner: dict[str, list[SampleId]] = {}
        for group in groups:
            owner = group.owner
            if owner is not None:
                for sample, state in enumerate(group.states):
                    if state in (*STARTED, DELIVERING):
                        self._leave(owner, group, state)
                        by_owner.setdefault(owner.name, []).append(SampleId(group.index, sample))
                owner.load -= group.queued
                self._placement.update(owner)
            group.queued = 0
            self.forget(group)
        for name, samples in by_owner.items():
            self._commands.append(commands.DiscardSamples(name, tuple(samples)))

    def forget(self, group: Group) -> None:
        """Drop a group that is in the trainer or failed."""
        del self._state.groups[group.index]
        if group.owner is not None:
            del group.owner.groups[group.index]
            group.owner = None

    def _leave(self, owner: Generator, group: Group, state: int) -> None:
        if state == RUNNING:
            group.running -= 1
            owner.running -= 1
            owner.load -= 1
            return
        owner.held -= 1
        if state == VERIFYING:
            group.verifying -= 1
            owner.verifying -= 1


def _command(
    generator: Generator, group: Group, samples: list[int], min_version: int
) -> commands.VerifySamples:
    ids = tuple(SampleId(group.index, sample) for sample in samples)
    return commands.VerifySamples(generator.name, ids, min_version)


def _begin(generator: Generator, group: Group, samples: list[int], min_version: int) -> None:
    """HELD samples become VERIFYING; RUNNING ones stay RUNNING."""
    for sample in samples:
        if group.states[sample] == HELD:
            group.states[sample] = VERIFYING
            if group.signal is not None:
                group.signal.forget(sample, min_version)
            group.stale[sample] = 0
            group.verifying += 1
            generator.verifying += 1


class Weights:
    """Brings each generator to the latest published version, with one install at a time."""

    def __init__(self, state: SchedulerState, work: Work) -> None:
        self._state, self._work = state, work

    def update_all(self) -> None:
        """Update every generator."""
        for generator in self._state.generators.values():
            self.update(generator)

    def update(self, generator: Generator) -> None:
        """Command the latest version unless the generator has it or is still installing another.

        With `partial_rollout: false` the generator first drains: it finishes its samples.
        """
        state = self._state
        if not state.trainer_joined or generator.rewinding or self._work.gives_away(generator):
            return
        if generator.installing is None and generator.version < state.published:
            # Below version 0 its weights are of a policy that is gone: it generates nothing.
            waits = generator.running + generator.verifying > 0 and generator.version >= 0
            generator.draining = waits and not state.config.partial_rollout
            if not generator.draining:
                self._work.install(generator, state.published)
        state.placement.offer(generator, state.published)

    def refill(self, generator: Generator) -> None:
        """Install the weights that waited for an ended sample, or start another sample."""
        if generator.draining:
            self.update(generator)
        else:
            self._work.start(generator)

    def on_weights_installed(self, event: events.WeightsInstalled) -> None:
        """Verify what the new version allows, command newer weights if any, and start samples."""
        state, work = self._state, self._work
        generator, version = state.generator(event.generator), event.policy_version
        if generator is None or generator.rewinding:
            return  # a rewind answers for the installations before it
        if version > state.published or not state.had_trainer:
            raise SenderOutOfStep(
                f"generator {generator.name} installed policy version {version}, which was never "
                f"published; the latest published version is {state.published}"
            )
        if version < generator.version:
            return
        if state.places is not None:
            state.places.changed = True  # something may be verified now
        target = generator.installing
        if target is not None and version == generator.version:
            if state.next_undeclared <= target:
                return  # a repeated old answer: no newer weights can have overwritten the target
            if target == state.published:
                # The target was overwritten while it was read. The generator is ordered to install
                # again when the newer weights are published; an earlier command would fail too.
                generator.installing = None
                state.placement.offer(generator, state.published)
                work.start(generator)
                return
        self.has_version(generator, version)

    def has_version(self, generator: Generator, version: int) -> None:
        """Note a generator's version, and act on it."""
        work = self._work
        before, generator.version = generator.version, version
        generator.installing, generator.draining = None, False
        # Verification comes before the next install: with `partial_rollout: false`, that install
        # waits for the samples being verified as well.
        work.verify_due(generator, before)
        self.update(generator)
        work.place_waiting()
        work.start(generator)
