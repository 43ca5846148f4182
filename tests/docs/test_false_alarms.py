"""All statistical statements of the suite share one budget of false alarms."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from false_alarms import (
    ALARM,
    P_VALUES,
    SIGMAS,
    SUITE,
    Claims,
    assert_caught,
    draw_until,
    is_caught,
    lacking,
)

TESTS = Path(__file__).parents[1]
STATISTICS = re.compile(r"coincidence\(|chisquare\(|chi2\.sf|p_value\(|pvalue\b|\bis_detected\(")
NOT_OF_THE_PRODUCT = {"benchmarks", "docs"}
"""Folders with tests of statistics, on numbers that a test draws with a fixed seed."""


def test_the_shares_of_all_files_are_within_the_budget() -> None:
    assert sum(P_VALUES.values()) * ALARM <= SUITE
    assert math.erfc(SIGMAS / math.sqrt(2)) == pytest.approx(ALARM, rel=0.02)


def test_every_file_that_judges_samples_has_a_share() -> None:
    judging = {
        str(file.relative_to(TESTS))
        for file in TESTS.rglob("test_*.py")
        if file.relative_to(TESTS).parts[0] not in NOT_OF_THE_PRODUCT
        and STATISTICS.search(file.read_text(encoding="utf-8"))
    }
    assert judging <= set(P_VALUES)
    for name in P_VALUES:
        assert "Claims(__file__)" in (TESTS / name).read_text(encoding="utf-8"), name


def test_every_share_is_listed_with_its_p_values() -> None:
    pages = "".join(page.read_text("utf-8") for page in (TESTS.parent / "docs").glob("testing*.md"))
    rows = dict(re.findall(r"^\| `tests/(\S+\.py)` \|.*\| (\d+) \|$", pages, re.MULTILINE))
    assert {name: int(number) for name, number in rows.items()} == P_VALUES


def test_a_file_cannot_judge_more_than_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(P_VALUES, "docs/test_false_alarms.py", 3)
    claims = Claims(__file__)
    assert claims.fit(2 * ALARM)
    assert not claims.fit(ALARM / 2)
    assert claims.sigmas() == SIGMAS
    with pytest.raises(AssertionError, match=r"test_false_alarms\.py judges more p-values"):
        claims.fit(0.5)


def item() -> Any:
    return SimpleNamespace(user_properties=[])


def test_parts_are_drawn_until_there_are_enough_cases() -> None:
    def lacks(parts: list[int]) -> str:
        return lacking(cases=(sum(parts), 5), others=(9, 1))

    test = item()
    assert draw_until(test, lambda part: 2 + part, lacks, most=3) == [2, 3, 4]
    assert test.user_properties == []
    assert draw_until(test, lambda _: 2, lacks, most=2) == [2, 2]
    assert test.user_properties == [("not judged", "4 cases (5 wanted)")]


@pytest.mark.parametrize(
    ("p_values", "drawn", "noted"),
    [((0.1, ALARM / 2), 2, []), ((0.1, 0.2), 2, ["p = 0.2 with 2 cases of 3"])],
)
def test_a_wrong_product_is_drawn_until_it_is_caught(
    p_values: tuple[float, ...], drawn: int, noted: list[str]
) -> None:
    test, parts = item(), list[int]()

    def judge(seen: list[int]) -> tuple[float, int]:
        parts[:] = seen
        return p_values[len(seen) - 1], len(seen)

    assert_caught(test, lambda part: part, judge, enough=3, most=2)
    assert len(parts) == drawn
    assert [why for _, why in test.user_properties] == noted


def test_a_wrong_product_that_passes_with_enough_cases_fails() -> None:
    assert not is_caught(ALARM)
    with pytest.raises(AssertionError, match=r"p = 0\.3 with 7 cases"):
        assert_caught(item(), lambda part: part, lambda _: (0.3, 7), enough=7, most=4)
