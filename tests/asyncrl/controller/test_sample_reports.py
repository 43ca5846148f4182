"""What generators reported of samples in flight."""

from __future__ import annotations

import pytest

from asyncrl.controller.commands import SampleReports
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages.from_generator import SampleFinished, SampleRewarded
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample


def report(sample: SampleId, digest: bytes, oldest: int = 0) -> SampleFinished:
    return SampleFinished("g", sample, 7, oldest, "stop", digest)


def test_the_last_report_of_the_generator_that_delivers_counts() -> None:
    reports, sample = SampleReports(), SampleId(3, 0)
    reports.add("g", report(sample, b"old"))
    reports.add("g", report(sample, b"new", oldest=1))  # it was verified
    reports.add("h", report(sample, b"of another"))
    expected = Expect(1, "g", (ExpectedSample(sample, 7, 1, b"new"),))
    assert reports.expectation(1, "g", [sample]) == expected
    assert reports.expectation(1, "g", [sample]) == expected, "another trainer is told again"
    with pytest.raises(KeyError):
        reports.expectation(1, "nobody", [sample])


def test_reports_are_forgotten_when_refused_or_trained_on() -> None:
    reports = SampleReports()
    for group in range(4):
        reports.add("g", report(SampleId(group, 0), b"d"))
    reports.drop("g", SampleId(3, 0))
    reports.drop("g", SampleId(9, 0))
    assert sorted(reports._groups) == [0, 1, 2]
    reports.forget_before(2)
    assert sorted(reports._groups) == [2]


def test_a_reward_is_of_the_contents_that_were_reported_last() -> None:
    reports, sample = SampleReports(), SampleId(3, 0)
    old, new = (SampleRewarded("g", sample, 1.0, digest) for digest in (b"old", b"new"))
    assert not reports.is_about_last_report("g", old), "it was never reported"
    reports.add("g", report(sample, b"old"))
    assert reports.is_about_last_report("g", old)
    assert not reports.is_about_last_report("h", old)
    reports.add("g", report(sample, b"new", oldest=1))
    assert not reports.is_about_last_report("g", old)
    assert reports.is_about_last_report("g", new)
    reports.drop("g", sample)
    assert not reports.is_about_last_report("g", new)
