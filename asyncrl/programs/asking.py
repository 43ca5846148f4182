"""Extracts a response's program and runs calls of it in the sandbox. Import-light."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.programs.tests import Asserted, Called, Printed, is_right
from asyncrl.sandbox.limits import Limits
from asyncrl.sandbox.run import Outcome, run

_OPENING = re.compile(r"([ \t]*)[^`]*(`{3,})[ \t]*([^\s`]*)[^`]*\Z")
_PYTHON = frozenset({"py", "py3", "python", "python2", "python3"})


@dataclass(slots=True)
class _Block:
    indent: int
    fence: str
    tag: str
    lines: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        if not self.tag:
            return 1
        return 2 if self.tag.lower().strip("{.}") in _PYTHON else 0


def program_of(response: str) -> str:
    r"""Return the last Python block between ```, else the last one without a language.

    Without either, return the last block; without blocks, the response itself. A block ends with a
    line that is ``` and nothing else, or with the response.

    >>> program_of("```python\nprint(1)\n```\nOutput:\n```\n1\n```")
    'print(1)\n'
    """
    blocks = _blocks(response)
    if not blocks:
        return response
    best = max(block.rank for block in blocks)
    return "".join(next(one for one in reversed(blocks) if one.rank == best).lines)


def _blocks(response: str) -> list[_Block]:
    blocks: list[_Block] = []
    inside: _Block | None = None
    for line in response.replace("\r\n", "\n").splitlines(keepends=True):
        stripped = line.strip()
        if inside is None:
            opening = _OPENING.match(line)
            if opening is not None and line.endswith("\n"):
                inside = _Block(len(opening[1]), opening[2], opening[3])
                blocks.append(inside)
        elif stripped.startswith(inside.fence) and not stripped.strip("`"):
            inside = None
        else:
            blank = len(line) - len(line.lstrip(" \t"))
            inside.lines.append(line[min(inside.indent, blank) :])
    return blocks


MAX_CALLS = 32
"""Limit of one start of the sandbox: the output of all calls is kept in memory."""
_SCRIPT = Path(__file__).with_name("calls.py")
_BYTES = Limits().output_bytes
_ROOM = 4
"""Approximate bytes of JSON per byte of a call's text; more ends the sandbox."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one call."""

    value: Any = None
    failed: bool = True
    """True if the call raised, timed out, returned a value that JSON cannot hold, or was not
    made.
    """


def call(
    program: str,
    tests: Sequence[Called | Asserted],
    limits: Limits,
    *,
    call_seconds: float,
    until_failure: bool = False,
) -> tuple[list[Found], Outcome]:
    """Make calls of a Python program, each in a separate process.

    At most MAX_CALLS `tests` are allowed. `limits` apply to all together, except for the CPU time,
    which each call has; `call_seconds` bounds one by the clock. With `until_failure`, the first
    failing call is the last one.

    Return the results of the calls that were made, and how the sandbox ended. A missing result,
    except after a timeout, is the fault of the call that would be next. Raises SandboxError if this
    machine cannot contain a program.
    """
    order = {
        "program": program.encode(errors="replace").decode(),
        "seconds": call_seconds,
        "until_failure": until_failure,
        "calls": [
            [test.function, test.arguments] if isinstance(test, Called) else [test.expression]
            for test in tests
        ],
    }
    outcome = run(
        [sys.executable, "-I", "-c", _SCRIPT.read_text(encoding="utf-8")],
        stdin=json.dumps(order).encode(),
        limits=msgspec.structs.replace(limits, output_bytes=_ROOM * _BYTES * len(tests)),
    )
    return [_found(line) for line in outcome.text.splitlines()[: len(tests)]], outcome


def _found(line: str) -> Found:
    """Parse a line. Its inner text is the program's own and may be anything."""
    try:
        said = json.loads(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return Found()
    if not isinstance(said, dict) or "value" not in said:
        return Found()
    return Found(said["value"], failed=False)


def passes(found: Found, test: Called | Asserted, tolerance: float = 0.0) -> bool:
    """Return True if the result of a call is right."""
    if found.failed:
        return False
    if isinstance(test, Asserted):
        return found.value is True
    try:
        return is_right(found.value, test, tolerance)
    except RecursionError:
        return False


def prints(program: str, test: Printed, limits: Limits) -> tuple[bool, Outcome]:
    """Return True, with the outcome, if a program prints the right text. Raises SandboxError."""
    outcome = run(
        [sys.executable, "-I", "solution.py"],
        stdin=test.given.encode(errors="replace"),
        contents={"solution.py": program},
        limits=limits,
    )
    return outcome.exit_code == 0 and _lines(outcome.text) == _lines(test.output), outcome


def _lines(text: str) -> list[str]:
    """Return lines without trailing white space, and without empty ones at the text's ends."""
    return [line.rstrip() for line in text.strip().splitlines()]
