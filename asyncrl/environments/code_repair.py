"""The built-in environment `code_repair`: a wrong program and sandboxed tests. Import-light.

Programs run as with the reward `code` (docs/rewards.md).
"""

import functools
import json
import threading
from typing import Any

from asyncrl.cores import usable_cores
from asyncrl.environments.protocol import Action, StepResult
from asyncrl.programs.asking import MAX_CALLS, Found, call, passes, program_of
from asyncrl.programs.tests import Called, read_tests
from asyncrl.sandbox.limits import MIB, Limits

_AT_ONCE = threading.BoundedSemaphore(usable_cores())
"""Bounds concurrent programs: more would wait for each other and reach their time limits."""
_CLOCK = 8.0
"""Wall-clock seconds that a program may take per second of CPU time."""
_CALL = {"call", "args", "returns"}
_SHOWN = 200


class CodeRepair:
    """The policy repairs a program until all tests pass; each failure is shown.

    The policy has `attempts` attempts; each wrong one takes `cost` from the reward of 1. A test may
    use `seconds` of CPU time and `memory_mib` of memory.
    """

    replay = "deterministic"

    def __init__(
        self, attempts: int = 3, cost: float = 0.1, seconds: int = 2, memory_mib: int = 256
    ) -> None:
        if attempts < 1:
            raise ValueError(f"code_repair: attempts must be at least 1, got {attempts}")
        self._attempts, self._cost = attempts, cost
        self._seconds, self._memory_mib = seconds, memory_mib
        self._tests: list[dict[str, Any]] = []
        self._wrong = 0

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Show the program and its first failure."""
        del seed
        program, tests = row.get("program"), row.get("tests")
        ok = isinstance(tests, list) and all(isinstance(t, dict) and set(t) == _CALL for t in tests)
        if not isinstance(program, str) or not tests or not ok:
            raise ValueError(
                "code_repair: a row needs `program`, a text, and `tests`, a list of "
                '{"call": ..., "args": [...], "returns": ...}'
            )
        read_tests(tests, "tests")  # refuses what no program can pass
        self._tests, self._wrong = tests, 0
        return f"repair {program}\n{self._failure(program) or 'all tests pass'}"

    def step(self, action: Action) -> StepResult:
        """Run the program: the block that `program_of` finds in the turn, or the whole turn."""
        failure = self._failure(program_of(action.text))
        if failure is None:
            return StepResult("correct", done=True, reward=1.0 - self._cost * self._wrong)
        self._wrong += 1
        return StepResult(failure, done=self._wrong >= self._attempts)

    def _failure(self, program: str) -> str | None:
        try:
            return _failure_of(program, json.dumps(self._tests), self._seconds, self._memory_mib)
        except _SlowError as slow:
            failure: str | None = slow.args[0]
            return failure


class _SlowError(Exception):
    """A program exceeded the wall-clock limit. As the machine may be busy, it is not cached."""


@functools.lru_cache(maxsize=4096)
def _failure_of(program: str, tests: str, seconds: int, memory_mib: int) -> str | None:
    """Run a program once; see `CodeRepair._failure`. Raises SandboxError, _SlowError."""
    wanted = [test for test in read_tests(tests, "tests") if isinstance(test, Called)]
    failure = None
    for first in range(0, len(wanted), MAX_CALLS):
        asked = wanted[first : first + MAX_CALLS]
        wall = _CLOCK * seconds
        limits = Limits(wall_seconds=wall, cpu_seconds=seconds, memory_bytes=memory_mib * MIB)
        with _AT_ONCE:
            found, outcome = call(program, asked, limits, call_seconds=wall, until_failure=True)
        failure = _first_failure(found, asked)
        if outcome.ending == "wall_seconds":
            raise _SlowError(failure)
        if failure is not None:
            break
    return failure


def _first_failure(found: list[Found], tests: list[Called]) -> str | None:
    found = found + [Found()] * (len(tests) - len(found))
    for one, test in zip(found, tests, strict=True):
        if not passes(one, test):
            got = "error" if one.failed else _shown(one.value)
            return f"{test.shown} is {got} not {test.returns!r}"
    return None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.{_SHOWN}}"
    except RecursionError:
        return "..."
