"""The reward `code`: the share of a problem's tests that a program passes, run in the sandbox.

Results are compared outside the sandbox, so a program can pass only by being right, except for
tests that are an `assert` (`asyncrl.programs.tests`). A failure of the sandbox raises an error, and
so does a lack of time on a busy machine: neither counts as a wrong program. Import-light: worker
processes load this file.
"""

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
"""Share of `total_seconds` of own time from which a program counts as too slow."""
TESTS = "tests"
"""Default column of the tests."""


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
    """Return the share of the tests in column `tests` that the response's program passes.

    Without `partial`, the result is 1 if all pass, else 0. A test may take `test_seconds` of CPU
    time, rounded up to whole seconds, and four times that by the clock, so that a busy machine does
    not fail a right program. Tests that are not reached within `total_seconds` count as failed if
    the program's own time was at least half of that. `tolerance` is absolute and relative, for
    returned floats. Raises ValueError if the row's tests are missing or invalid, NoRewardError
    (`timeout`) if the machine was too busy, SandboxError if it cannot contain a program.
    """
    del prompt
    wanted = read_tests(row.get(tests), tests)
    program = program_of(response)
    judging = _Judging(program, partial, test_seconds, total_seconds, memory_mib, tolerance)
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
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.total_seconds

    def passed(self, tests: Sequence[Test]) -> int:
        """Count the passed tests, without partial credit only up to the first failure."""
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
        """Run the next test or tests; return for each if it passed. Empty: the time is over."""
        if isinstance(tests[0], Printed):
            right, outcome = prints(self.program, tests[0], self._limits(_WALL))
            return [] if self._ended_by_the_clock(outcome) else [right]
        asked = []
        for test in tests[:MAX_CALLS]:
            if isinstance(test, Printed):
                break
            asked.append(test)
        limits, seconds = self._limits(math.inf), _WALL * self.test_seconds
        found, outcome = call(
            self.program, asked, limits, call_seconds=seconds, until_failure=not self.partial
        )
        answers = [passes(*both, self.tolerance) for both in zip(found, asked, strict=False)]
        if not self._ended_by_the_clock(outcome) and len(answers) < len(asked):
            answers.append(False)
        return answers

    def _ended_by_the_clock(self, outcome: Outcome) -> bool:
        """Return True if the time of all tests is over, not just that of one."""
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
        """Raise NoRewardError if the machine was too slow, not the program."""
        if self.own_seconds < _OWN_SHARE * self.total_seconds:
            raise NoRewardError(
                "timeout",
                f"{unreached} of {tests} tests were not reached within args.total_seconds "
                f"({self.total_seconds:g} s), of which the program used {self.own_seconds:.1f} s. "
                "The machine is too busy or there are too many tests: raise args.total_seconds "
                "and rewards.timeout_seconds, or lower rewards.workers",
            )
