"""The reward of programs: tests passed, what cannot be forged, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards.code import code, program_of
from asyncrl.rewards.config import RewardConfig, RewardFunctionConfig
from asyncrl.rewards.loading import load_function
from asyncrl.sandbox import check

contained = pytest.mark.skipif(check.why_not() is not None, reason=str(check.why_not()))
SUM = [{"input": "3 4\n", "output": "7"}, {"input": "1 1", "output": "2\n"}]
CALLS = [
    {"call": "add", "args": [3, 4], "returns": 7},
    {"call": "add", "args": [[1], [2]], "returns": [1, 2]},
    {"assert": "add(0, 0) == 0"},
]


def score(response: str, tests: Any, **args: Any) -> float:
    return code(
        "", response, {"tests": tests}, **({"test_seconds": 30, "total_seconds": 300} | args)
    )


@contained
@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        ("print(sum(map(int, input().split())))", SUM, 1.0),
        ("It is:\n```python\nprint(7)\n```\nDone.", SUM, 0.5),
        ("print(7", SUM, 0.0),
        ("print(7); raise SystemExit(1)", SUM, 0.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", CALLS, 1.0),
        ("def add(a, b): return a + b if a else 1", CALLS, 2 / 3),
        ("import os\nos.write(1, b'null\\n')\nos._exit(0)", CALLS[:2], 0.0),
        (
            "class Any:\n  def __eq__(self, _): return True\ndef add(a, b): return Any()",
            CALLS[:1],
            0.0,
        ),
        ("print('\ud800')", SUM, 0.0),
    ],
)
def test_the_share_of_tests_that_a_program_passes(response: str, tests: Any, value: float) -> None:
    assert score(response, tests) == pytest.approx(value)
    assert score(response, tests, partial=False) == float(value == 1.0)


@contained
def test_a_program_that_hangs_fails_its_tests_within_the_time() -> None:
    right_once = "import sys, time\nif sys.stdin.read() != '3 4\\n': time.sleep(600)\nprint(7)"
    assert score(right_once, SUM, total_seconds=3.0) == 0.5
    assert score("while True: pass", SUM[:1], test_seconds=1) == 0.0


def test_the_last_block_is_the_program() -> None:
    assert program_of("a\n```py\nx = 1\n```\nb\n```python\ny = 2\n") == "y = 2\n"
    assert program_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, r"no tests in the column 'tests'; set args\.tests"),
        ([], "no tests"),
        ("[1", "is no JSON"),
        ([{"input": "1"}], "test 0 of the column 'tests' must have the keys"),
    ],
)
def test_a_row_without_usable_tests_is_refused(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score("x", tests)


def test_a_machine_that_cannot_contain_and_too_little_time_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.rewards.loading.why_not", lambda: "the kernel does not allow it")
    with pytest.raises(RewardError, match="`code` runs programs of the model, and the kernel"):
        load_function("code", {})
    function = RewardFunctionConfig(name="code", args={"total_seconds": 12})
    with pytest.raises(ValueError, match=r"timeout_seconds: 10 must be longer.*total_seconds: 12"):
        RewardConfig(functions=(function,))
    assert RewardConfig(functions=(RewardFunctionConfig(name="code"),)).timeout_seconds == 10
