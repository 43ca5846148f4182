"""The reward `code`: the share of a problem's tests that a program passes, run in the sandbox.

Import-light: a worker process loads this file. `asyncrl.programs.tests` says what tests are. What
is right is compared outside the sandbox, so a program can pass them only by being right, but for
tests that stay an `assert`. The first failure that the sandbox itself has ends the reward with an
error: it is never taken for a wrong program. Nor is a lack of time that is the machine's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.programs.asking import MAX_CALLS, call, passes, prints, program_of
from asyncrl.programs.tests import Printed, Test, read_tests
from asyncrl.rewards.values import NoRewardError
from asyncrl.sandbox.limits import MIB, Limits
from asyncrl.sandbox.run import Outcome

TOTAL_SECONDS = 8.0
_WALL = 4.0
_OWN_SHARE = 0.5
"""Of the time of all tests: a program that took so much by its own doing is too slow."""
TESTS = "tests"
"""The column that holds the tests, unless the arguments name another."""


def code(
    prompt: str,
    response: str,
    row: Mapping[str, Any],
    *,
    tests: str = TESTS,
    partial: bool = True,
    test_seconds: float = 2.0,
    total_seconds: float = TOTAL_SECONDS,
    memory_mib: int = 512,
    tolerance: float = 0.0,
) -> float:
    """The share of the tests that the response's Python program passes, from 0 to 1.

    Tests that are not reached within `total_seconds` count as failed if the program has taken half
    of that time by its own doing.

    Args:
        prompt: not used.
        response: of the model; `program_of` finds the program.
        row: of the dataset.
        tests: the column that holds the tests.
        partial: False: 1 if all are passed, else 0; the first failure ends it.
        test_seconds: most CPU time of one test, rounded up to whole seconds. Its time by the clock
            may be four times that, so that a busy machine fails no right program.
        total_seconds: longest time of all of them; below `rewards.timeout_seconds`.
        memory_mib: most memory of one run of the sandbox.
        tolerance: by how much returned floats may differ, and by which part of the larger one.

    Raises:
        ValueError: the row has no tests, or one is none of the three forms.
        NoRewardError: `timeout`: tests were not reached because the machine was busy.
        SandboxError: this machine cannot contain a program.
    """
    del prompt
    wanted = read_tests(row.get(tests), tests)
    judging = _Judging(
        program_of(response), partial, test_seconds, total_seconds, memory_mib, tolerance
    )
    passed = judging.passed(wanted)
    return passed / len(wanted) if partial else float(passed == len(wanted))


@dataclass(slots=True)
class _Judging:
    """One program and its tests."""

    program: str
    partial: bool
    test_seconds: float
    total_seconds: float
    memory_mib: int
    tolerance: float
    own_seconds: float = 0.0
    """That the program took by its own doing."""
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.total_seconds

    def passed(self, tests: Sequence[Test]) -> int:
        """How many are passed; without partial credit only up to the first failure."""
        judged, passed = 0, 0
        while judged < len(tests):
            if self._left() <= 0:
                self._out_of_time(len(tests) - judged, len(tests))
                break
            answers = self._next(tests[judged:])
            judged += len(answers)
            passed += sum(answers)
            if not self.partial and passed < judged:
                break
        return passed

    def _next(self, tests: Sequence[Test]) -> list[bool]:
        """Whether the next tests are passed, some or one of them; none: the time was out."""
        if isinstance(tests[0], Printed):
            right, outcome = prints(self.program, tests[0], self._limits(_WALL))
            return [] if self._ended_by_the_clock(outcome) else [right]
        asked = []
        for test in tests[:MAX_CALLS]:
            if isinstance(test, Printed):
                break
            asked.append(test)
        found, outcome = call(
            self.program,
            asked,
            self._limits(math.inf),
            call_seconds=_WALL * self.test_seconds,
            until_failure=not self.partial,
        )
        answers = [passes(*both, self.tolerance) for both in zip(found, asked, strict=False)]
        if not self._ended_by_the_clock(outcome) and len(answers) < len(asked):
            answers.append(False)
        return answers

    def _ended_by_the_clock(self, outcome: Outcome) -> bool:
        """Whether the time of all tests was out, not that of one."""
        self.own_seconds += outcome.own_seconds
        return outcome.ending == "wall_seconds" and self._left() <= 0

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _limits(self, tests: float) -> Limits:
        """Return the limits of one run, which may take the clock time of `tests` tests."""
        return Limits(
            wall_seconds=max(1e-3, min(tests * self.test_seconds, self._left())),
            cpu_seconds=math.ceil(self.test_seconds),
            memory_bytes=self.memory_mib * MIB,
        )

    def _out_of_time(self, unreached: int, tests: int) -> None:
        """Tell a program that is too slow from a machine that is. Raises NoRewardError."""
        if self.own_seconds < _OWN_SHARE * self.total_seconds:
            raise NoRewardError(
                "timeout",
                f"{unreached} of {tests} tests were not reached within args.total_seconds "
                f"({self.total_seconds:g}), of which the program took {self.own_seconds:.1f} s. "
                "The machine is too busy or the tests are too many: raise it and "
                "rewards.timeout_seconds, or start fewer rewards.workers",
            )
