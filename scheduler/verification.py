"""Which samples are verified when, and with which command.

Samples become due when their generator's version rises. They are commanded together with the
install of that version, so that the generator begins with them as soon as it is installed. What is
started between the command and its report is commanded after the report.

Weights: each generator's policy version, and which one it installs next.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events
from asyncrl.scheduler.errors import SenderOutOfStep
from asyncrl.scheduler.records import HELD, RUNNING, VERIFYING, Generator, Group
from asyncrl.scheduler.sample_transitions import Work
from asyncrl.scheduler.state import SchedulerState


class Verification:
    """Commands installs and verification, and moves the samples concerned."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._admission = state.admission
        self._commands = state.commands

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
        """After a generator's version rose: verify what could not be verified before.

        What was commanded together with the install is not commanded again.
        """
        requested, generator.requested = generator.requested, {}
        for group, due, min_version in self._due(generator, version_before, generator.version):
            _begin(generator, group, due, min_version)
            rest = [sample for sample in due if SampleId(group.index, sample) not in requested]
            if rest:
                self._commands.append(_command(generator, group, rest, min_version))
        if self._state.places is not None:
            self._begin_requested(generator, requested)

    def _begin_requested(self, generator: Generator, requested: Mapping[SampleId, int]) -> None:
        """What was commanded is verified, although its group may have moved to another step."""
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
        """(group, samples, minimum version) of what becomes due, in data order.

        These are the samples of steps whose minimum version lies between the two versions. Running
        ones are included, since they were started under the version before.
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

    def __init__(self, state: SchedulerState, work: Work, verification: Verification) -> None:
        self._state = state
        self._work = work
        self._verification = verification

    def publish(self, version: int) -> None:
        """Have all generators install a version that the trainer published.

        Raises:
            SenderOutOfStep: the trainer cannot have trained this version yet.
        """
        state = self._state
        if not state.had_trainer or version > state.next_undeclared:
            raise SenderOutOfStep(
                f"weights of policy version {version} were published, but step {version - 1} "
                "cannot have been trained yet"
            )
        state.published = version
        self.update_all()

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
            busy = generator.running + generator.verifying
            stands_still = generator.version < 0  # its weights are of a policy that is gone
            waits = bool(busy) and not stands_still
            generator.draining = waits and not state.config.partial_rollout
            if not generator.draining:
                self._verification.install(generator, state.published)
        state.placement.offer(generator, state.published)

    def refill(self, generator: Generator) -> None:
        """After a sample ended: install the weights that waited for it, or start another sample."""
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
                # The target was overwritten while it was read. The generator is told to install
                # again when the newer weights are published; an earlier command would fail too.
                generator.installing = None
                state.placement.offer(generator, state.published)
                work.start(generator)
                return
        self.has_version(generator, version)

    def has_version(self, generator: Generator, version: int) -> None:
        """Take note of a generator's version, and give it what follows from that."""
        work = self._work
        before, generator.version = generator.version, version
        generator.installing, generator.draining = None, False
        # Verification comes before the next install: with `partial_rollout: false`, that install
        # waits for the samples being verified as well.
        self._verification.verify_due(generator, before)
        self.update(generator)
        work.place_waiting()
        work.start(generator)
