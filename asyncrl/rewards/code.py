r"""The reward `code`: the share of a problem's tests that a program passes, run in the sandbox.

Import-light: a worker process loads this file. The tests of a problem are a column of its row, a
list in which each entry is one of

    {"input": "3 4\n", "output": "7\n"}           standard input and the output that is right
    {"call": "add", "args": [3, 4], "returns": 7}  a function of the program, and what it returns
    {"assert": "add(3, 4) == 7"}                   an expression that must be true

What is right is compared outside the sandbox for the first two, so a program can pass them only by
being right. An `assert` is judged by the process that runs the program, so a program that looks for
the judge can deceive it. The first failure that the sandbox itself has ends the reward with an
error: it is never taken for a wrong program.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.sandbox.limits import MIB, Limits
from asyncrl.sandbox.run import Outcome, run

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FORMS = (
    frozenset({"input", "output"}),
    frozenset({"call", "args", "returns"}),
    frozenset({"assert"}),
)
TOTAL_SECONDS = 8.0
_WALL = 4.0
_JUDGE = """
import contextlib, io, json, os, sys
answers = os.fdopen(os.dup(1), "w")
test = json.load(sys.stdin)
scope = {"__name__": "solution"}
with contextlib.redirect_stdout(io.StringIO()):
    with open("solution.py") as source:
        exec(compile(source.read(), "solution.py", "exec"), scope)
    if "assert" in test:
        value = bool(eval(test["assert"], scope))
    else:
        value = scope[test["call"]](*test["args"])
    print(json.dumps(value), file=answers, flush=True)
"""
"""Reads one test, runs the program and prints what the test's call or expression gives."""


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
) -> float:
    """The share of the tests that the response's Python program passes, from 0 to 1.

    The program is the last block between ``` of the response, or all of it. Tests that are not
    reached within `total_seconds` count as failed.

    Args:
        prompt: not used.
        response: of the model.
        row: of the dataset.
        tests: the column that holds the tests.
        partial: False: 1 if all are passed, else 0.
        test_seconds: most CPU time of one run of the program, rounded up to whole seconds. Its
            time by the clock may be four times that, so that a busy machine fails no right program.
        total_seconds: longest time of all of them; below `rewards.timeout_seconds`.
        memory_mib: most memory of one run.

    Raises:
        ValueError: the row has no tests, or one is none of the three forms.
        SandboxError: this machine cannot contain a program.
    """
    del prompt
    wanted = read_tests(row.get(tests), tests)
    program = program_of(response)
    deadline = time.monotonic() + total_seconds
    passed = 0
    for test in wanted:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        limits = Limits(
            wall_seconds=min(_WALL * test_seconds, left),
            cpu_seconds=math.ceil(test_seconds),
            memory_bytes=memory_mib * MIB,
        )
        passed += passes(program, test, limits)
    return passed / len(wanted) if partial else float(passed == len(wanted))


def program_of(response: str) -> str:
    """The last block between ``` of a response, else the response itself."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1]) if blocks else response


def read_tests(given: Any, column: str) -> list[dict[str, Any]]:
    """The tests of a row, given as a list or as JSON text.

    Raises:
        ValueError: there are none, or one is none of the three forms.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"the column {column!r} is no JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise ValueError(f"the row has no tests in the column {column!r}; set args.tests")
    for place, test in enumerate(given):
        if not isinstance(test, dict) or frozenset(test) not in _FORMS:
            forms = " or ".join("{" + ", ".join(sorted(form)) + "}" for form in _FORMS)
            raise ValueError(
                f"test {place} of the column {column!r} must have the keys {forms}, not {test!r}"
            )
    return given


def passes(program: str, test: Mapping[str, Any], limits: Limits) -> bool:
    """Whether a program passes one test. Raises SandboxError if it cannot be run."""
    if "input" in test:
        outcome = _python(["solution.py"], str(test["input"]), program, limits)
        return outcome.exit_code == 0 and _lines(outcome.text) == _lines(str(test["output"]))
    question = {name: value for name, value in test.items() if name != "returns"}
    outcome = _python(["-c", _JUDGE], json.dumps(question), program, limits)
    said = outcome.text.splitlines()[-1:] if outcome.exit_code == 0 else []
    right = json.dumps(test.get("returns", True))
    return said == [right]


def _python(arguments: list[str], stdin: str, program: str, limits: Limits) -> Outcome:
    return run(
        [sys.executable, "-I", *arguments],
        stdin=stdin.encode(errors="replace"),
        contents={"solution.py": program},
        limits=limits,
    )


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and none that are empty at the text's ends."""
    return [line.rstrip() for line in text.strip().splitlines()]
