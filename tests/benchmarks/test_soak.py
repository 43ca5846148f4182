"""The arithmetic of `benchmarks.soak`: growth, and what must hold."""

from __future__ import annotations

from asyncrl.launch.identity import ProcessIdentity
from asyncrl.monitoring.records.group_account import GroupAccount
from benchmarks.soak import Grown, Outcome, Sample, holds


def samples(*measured: tuple[int, float, int]) -> list[Sample]:
    return [Sample(step, int(mb * 1e6), files) for step, mb, files in measured]


def test_growth_is_that_of_processes_that_lived_through_after_the_first_tenth() -> None:
    lived, late, early = (ProcessIdentity(pid, 0, "") for pid in (1, 2, 3))
    # The first tenth does not count; one high sample among others does not decide.
    grown = Grown(
        {lived: "trainer", late: "generator-1", early: "generator-0"},
        {
            lived: samples(
                *((5, 1.0, 3), (20, 100.0, 9)),
                *((step, 100.0, 10) for step in (30, 40, 45)),
                *((step, 104.0, 10) for step in (50, 55, 60, 65, 70)),
                *((80, 107.0, 11), (90, 107.0, 12), (99, 900.0, 11)),
            ),
            late: samples((60, 1.0, 1), (99, 2.0, 1)),
            early: samples((20, 1.0, 1), (50, 2.0, 1)),
        },
    )
    assert grown.growth(100) == {"trainer (1)": (7.0, 1.0)}


def test_each_fault_alone_fails_the_soak() -> None:
    def outcome(
        *, ended: int = 0, lost: int = 0, twice: int = 0, failed: int = 0, stale: int = 0,
        mb: float = 20.0, files: float = 2.0,
    ) -> Outcome:  # fmt: skip
        account = GroupAccount(9, (1,) * failed, (1,) * lost, (1,) * twice)
        growth = {"controller": (0.0, 0.0), "trainer": (mb, files)}
        return Outcome(100, 5.0, {"set": 3, "scale": 2}, ["x"] * ended, account, growth, stale, 4)

    ratios = outcome().ratios()
    assert holds(ratios)
    assert (ratios["steps"], ratios["orders"], ratios["evaluations"]) == (100, 5, 4)
    assert (ratios["memory_growth_mb"], ratios["descriptor_growth"]) == (20.0, 2.0)
    for worse in (
        outcome(ended=1), outcome(lost=1), outcome(twice=1), outcome(failed=1), outcome(stale=1),
        outcome(mb=20.1), outcome(files=3),
    ):  # fmt: skip
        assert not holds(worse.ratios())
