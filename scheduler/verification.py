"""Decides which samples are verified when, and with which command.

Samples become due when their generator's version rises. They are commanded together with the
install of that version, so that the generator starts them as soon as it is installed. Samples
started between the command and its report are commanded after the report.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands
from asyncrl.scheduler.records import HELD, RUNNING, VERIFYING, Generator, Group
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
        """Verify what could not be verified before a generator's version rose.

        Verifications commanded together with the install are not commanded again.
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
