"""The built-in environment `code_repair`: a wrong program, and tests that run in the sandbox.

row           repair def f(a, b): return a-b+3      with its `program` and `tests`
environment   def f(a, b): return a-b+3
              f(2, 5) is 0 not 10
policy        def f(a, b): return a+b+2
environment   f(2, 5) is 9 not 10
policy        def f(a, b): return a+b+3             reward 1 - cost: one attempt was wrong

Programs run as with the reward `code` (docs/sandbox.md): the kernel contains them, and what is
right is compared outside. Import-light.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from typing import Any

from asyncrl.environments.protocol import Action, StepResult
from asyncrl.rewards.code import program_of
from asyncrl.sandbox.limits import MIB, Limits
from asyncrl.sandbox.run import Outcome, run

_AT_ONCE = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
"""Programs that run at once. More would only wait for each other, and meet the limit of time that
each of them has."""
_CLOCK = 8.0
"""Time by the clock that a program has for each second of CPU time."""
_CALL = {"call", "args", "returns"}
_SHOWN = 200
_JUDGE = """
import contextlib, io, json, os, sys
answers = os.fdopen(os.dup(1), "w")
calls = json.load(sys.stdin)
scope = {"__name__": "solution"}
with contextlib.redirect_stdout(io.StringIO()):
    try:
        with open("solution.py") as source:
            exec(compile(source.read(), "solution.py", "exec"), scope)
        error = None
    except BaseException as raised:
        error = type(raised).__name__
    for name, args in calls:
        try:
            found = {"error": error} if error else {"value": scope[name](*args)}
            line = json.dumps(found)
        except BaseException as raised:
            line = json.dumps({"error": type(raised).__name__})
        print(line, file=answers, flush=True)
"""
"""Runs the program once and makes all calls; each answer is a line."""


class CodeRepair:
    """The policy repairs a program until all tests pass; each failure is shown.

    Args:
        attempts: most programs that the policy may try.
        cost: of each wrong one, taken from the reward of 1.
        seconds: most CPU time of one program with all its tests.
        memory_mib: most memory of one.
    """

    replay = "deterministic"

    def __init__(
        self, attempts: int = 3, cost: float = 0.1, seconds: int = 2, memory_mib: int = 256
    ) -> None:
        if attempts < 1:
            raise ValueError(f"code_repair: needs at least one attempt, got {attempts}")
        self._attempts, self._cost = attempts, cost
        self._seconds, self._memory_mib = seconds, memory_mib
        self._tests: list[dict[str, Any]] = []
        self._wrong = 0

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Show the program and its first failure."""
        del seed
        tests = row.get("tests")
        if (
            not isinstance(row.get("program"), str)
            or not isinstance(tests, list)
            or not tests
            or any(set(test) != _CALL for test in tests)
        ):
            raise ValueError(
                "code_repair: a row needs `program`, a text, and `tests`, a list of "
                '{"call": ..., "args": [...], "returns": ...}'
            )
        self._tests, self._wrong = tests, 0
        failure = self._failure(row["program"])
        return f"repair {row['program']}\n{failure or 'all tests pass'}"

    def step(self, action: Action) -> StepResult:
        """Run a program: the turn's last block between ```, or all of it."""
        failure = self._failure(program_of(action.text))
        if failure is None:
            return StepResult("correct", done=True, reward=1.0 - self._cost * self._wrong)
        self._wrong += 1
        return StepResult(failure, done=self._wrong >= self._attempts)

    def _failure(self, program: str) -> str | None:
        """The first test that fails, in words; None if none does."""
        calls = json.dumps([[test["call"], test["args"]] for test in self._tests])
        answers = _answers(program, calls, self._seconds, self._memory_mib)
        for number, test in enumerate(self._tests):
            shown = f"{test['call']}({', '.join(map(repr, test['args']))})"
            if number >= len(answers):
                return f"{shown} is error not {test['returns']!r}"
            found = answers[number]
            if "error" in found:
                return f"{shown} is error not {test['returns']!r}"
            value = found.get("value")
            if value != test["returns"] or isinstance(value, bool) != isinstance(
                test["returns"], bool
            ):
                return f"{shown} is {value!r:.{_SHOWN}} not {test['returns']!r}"
        return None


class _SlowError(Exception):
    """The program was ended by the clock. The machine may have been busy: it is not remembered."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        super().__init__()
        self.answers = answers


def _answers(program: str, calls: str, seconds: int, memory_mib: int) -> list[dict[str, Any]]:
    """What the calls return, up to where the program ended. Raises SandboxError."""
    try:
        return _remembered(program, calls, seconds, memory_mib)
    except _SlowError as slow:
        return slow.answers


@functools.lru_cache(maxsize=4096)
def _remembered(program: str, calls: str, seconds: int, memory_mib: int) -> list[dict[str, Any]]:
    """As `_answers`, of a program that runs once. Raises _SlowError."""
    limits = Limits(
        wall_seconds=_CLOCK * seconds, cpu_seconds=seconds, memory_bytes=memory_mib * MIB
    )
    with _AT_ONCE:
        outcome = run(
            [sys.executable, "-I", "-c", _JUDGE],
            stdin=calls.encode(),
            contents={"solution.py": program},
            limits=limits,
        )
    found = _read(outcome)
    if outcome.ending == "wall_seconds":
        raise _SlowError(found)
    return found


def _read(outcome: Outcome) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in outcome.text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            break
        if not isinstance(answer, dict):
            break
        found.append(answer)
    return found
