"""What generators reported of their finished samples, until the samples are trained on."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages.from_generator import SampleFinished, SampleRewarded
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample


class SampleReports:
    """Remembers the last report of each sample in flight, by generator.

    The trainer is told them before a sample is delivered, and accepts nothing else. They are kept
    until their step is trained, so that another trainer can be told them again.
    """

    def __init__(self) -> None:
        self._groups: dict[int, dict[tuple[str, SampleId], ExpectedSample]] = {}

    def add(self, generator: str, report: SampleFinished) -> None:
        """Remember a report in place of an earlier one of the same sample and generator."""
        expected = ExpectedSample(
            report.sample, report.length, report.oldest_version, report.digest
        )
        self._groups.setdefault(report.sample.group, {})[generator, report.sample] = expected

    def drop(self, generator: str, sample: SampleId) -> None:
        """Forget a report that was refused."""
        group = self._groups.get(sample.group, {})
        group.pop((generator, sample), None)
        if not group:
            self._groups.pop(sample.group, None)

    def is_about_last_report(self, generator: str, reward: SampleRewarded) -> bool:
        """Whether a reward is of the contents that the generator reported last."""
        group = self._groups.get(reward.sample.group, {})
        reported = group.get((generator, reward.sample))
        return reported is not None and reported.digest == reward.digest

    def expectation(self, step: int, generator: str, samples: Sequence[SampleId]) -> Expect:
        """What the trainer is to accept from a generator.

        Raises:
            KeyError: the generator reported no such sample; then it cannot have been ordered.
        """
        reported = tuple(self._groups[sample.group][generator, sample] for sample in samples)
        return Expect(step, generator, reported)

    def forget_before(self, group: int) -> None:
        """Forget the groups before this one. O(groups in flight)."""
        for old in [index for index in self._groups if index < group]:
            del self._groups[old]
