"""The reward of programs: tests passed, what cannot be forged, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from needed_programs import needs_namespaces

from asyncrl.errors import RewardError
from asyncrl.rewards.code import code
from asyncrl.rewards.config import RewardConfig, RewardFunctionConfig
from asyncrl.rewards.functions import load_function
from asyncrl.rewards.values import NoRewardError
from asyncrl.sandbox.run import Outcome, run

contained = needs_namespaces()
SUM = [{"input": "3 4\n", "output": "7"}, {"input": "1 1", "output": "2\n"}]
CALLS = [
    {"call": "add", "args": [3, 4], "returns": 7},
    {"call": "add", "args": [[1], [2]], "returns": [1, 2]},
    {"assert": "add(0, 0) == 0"},
]

DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class A:
    x: int
def f(x): return A(2).x
"""


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
    # A busy machine takes the time before the program does, and the reward says so: give it more.
    for seconds in (3.0, 9.0, 27.0, 81.0):
        with contextlib.suppress(NoRewardError):
            assert score(right_once, SUM, total_seconds=seconds) == 0.5
            break
    else:
        pytest.fail("the machine was too busy to judge the program within 81 s")
    assert score("while True: pass", SUM[:1], test_seconds=1) == 0.0


@contained
def test_many_tests_share_a_sandbox_and_none_is_another_ones_business() -> None:
    began: list[Outcome] = []

    def counted(*command: Any, **options: Any) -> Outcome:
        began.append(run(*command, **options))
        return began[-1]

    tests = [{"call": "add", "args": [n, 1], "returns": n + 1} for n in range(40)]
    meddles = """
import os, sys
seen = []
def add(a, b):
    if a == 3: os.kill(os.getppid(), 9)
    if a == 5: bytearray(1 << 40)
    if a == 7: os.fork() or sys.exit(0)
    if a == 9:
        open("solution.py", "w").write("x")
        os.mkdir("full")
        open("full/x", "w").close()
    seen.append(a)
    for n in range(1, 64):
        try: os.write(n, b'')
        except OSError: pass
    left = [name for name in os.listdir() if not os.path.ismount(name)]  # Python's own are mounts
    return a + b + len(seen) + len(left) - 2
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.programs.asking.run", counted)
        assert score("def add(a, b): return a + b", tests) == 1.0
        assert len(began) == 2
        assert score(meddles, tests) == 1 - 4 / 40
        forged = "import os\nos.write(1, b'7\\n' * 9)\ndef add(a, b): return a + b"
        assert score(forged, tests[:2]) == 1.0


@contained
def test_without_partial_credit_the_first_failure_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []
    monkeypatch.setattr(
        "asyncrl.programs.asking.run",
        lambda *command, **options: began.append(1.0) or run(*command, **options),
    )
    assert score("print(7)", [SUM[1], *SUM * 20], partial=False) == 0.0
    assert len(began) == 1


@contained
def test_a_busy_machine_is_no_wrong_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took the time decides: the program, or the machine around it."""
    for own, value in ((0.4, None), (1.6, 0.0)):
        outcome = Outcome("wall_seconds", own_seconds=own)
        monkeypatch.setattr("asyncrl.programs.asking.run", lambda *_, o=outcome, **__: o)
        monkeypatch.setattr("asyncrl.rewards.code.time.monotonic", iter([0.0, 0, 0, 3, 3]).__next__)
        if value is None:
            with pytest.raises(NoRewardError, match="2 of 2 tests were not reached") as failure:
                score("x", SUM, total_seconds=2.0)
            assert failure.value.reason == "timeout"
        else:
            assert score("x", SUM, total_seconds=2.0) == value


@contained
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return {'b': 2, 'a': (1,)}", {"a": [1], "b": 2}),
        ("def f(x): return 2", 2.0),
        ("def f(x): return float('nan')", float("nan")),
        ("from fractions import Fraction\ndef f(x): return Fraction(1, 2)", 0.5),
        (DATACLASS, 2),
    ],
)
def test_values_are_compared_not_their_texts(program: str, test: Any) -> None:
    assert score(program, [{"call": "f", "args": [1], "returns": test}]) == 1.0


@contained
def test_methods_floats_and_asserts() -> None:
    method = "class S:\n  def f(self, x): return x"
    assert score(method, [{"call": "S().f", "args": [1], "returns": 1}]) == 1.0
    sums = [{"call": "f", "args": [], "returns": 0.3}]
    assert score("def f(): return 0.1 + 0.2", sums) == 0.0
    assert score("def f(): return 0.1 + 0.2", sums, tolerance=1e-6) == 1.0
    forged = "class A:\n  def __eq__(s, o): return True\ndef f(x): return A()"
    for assertion in ("assert f((1, 2)) == 2", "2 == f([])"):
        assert score(forged, [{"assert": assertion}]) == 0.0
    taken = "def f(x): return 2 if isinstance(x, tuple) else 0"
    assert score(taken, [{"assert": "assert f((1, 2)) == 2"}]) == 1.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, r"no tests in the column 'tests'; set args\.tests"),
        ([], "no tests"),
        ("[1", "is not JSON"),
        ([{"input": "1"}], "test 0 of the column 'tests' must have the keys"),
        ([{"assert": "f(1) == 2)"}], "test 0 .* can never be passed: .* is not Python"),
        ([{"assert": 5}], "assert must be a text, not 5"),
        ([{"input": None, "output": 1}], "input must be a text, not None"),
        ([{"call": "f", "args": 7, "returns": 2}], "args must be a list, not 7"),
        ([{"call": "1 +", "args": [], "returns": 2}], "is not Python"),
        ([{"call": "f(2)", "args": [], "returns": 2}], "call must name a function"),
    ],
)
def test_a_row_without_usable_tests_is_refused(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score("x", tests)


def test_a_machine_that_cannot_contain_and_too_little_time_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.rewards.functions.why_not", lambda: "the kernel does not allow it")
    with pytest.raises(RewardError, match="`code` runs programs of the model, and the kernel"):
        load_function("code", {})
    function = RewardFunctionConfig(name="code", args={"total_seconds": 12})
    with pytest.raises(
        ValueError, match=r"timeout_seconds \(10\) must be above.*total_seconds \(12\)"
    ):
        RewardConfig(functions=(function,))
    assert RewardConfig(functions=(RewardFunctionConfig(name="code"),)).timeout_seconds == 10
