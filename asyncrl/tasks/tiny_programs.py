"""Tiny programs with a mistake, for the environment `code_repair`.

    program   def f(a, b): return a-b+3
    right     def f(a, b): return a+b+3
    tests     f(2, 5) gives 10, ...

One place of the program is wrong, its operator or its constant. The tests decide what is right: a
program that passes them all may differ from the one that was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

OPERATORS = "+-*"
CONSTANTS = range(10)
ARGUMENTS = ((2, 5), (7, 3), (4, 1))
"""Of the tests: with these, no two of the programs give the same results."""
_FORM = re.compile(r"def f\(a, b\): return a([+\-*])b\+(\d)\Z")


@dataclass(frozen=True, slots=True)
class Program:
    """`a OPERATOR b + CONSTANT`."""

    operator: str
    constant: int

    @classmethod
    def read(cls, text: str) -> Program | None:
        """The program with this text; None if it is none of these."""
        found = _FORM.match(text)
        return None if found is None else cls(found[1], int(found[2]))

    @property
    def text(self) -> str:
        """As Python."""
        return f"def f(a, b): return a{self.operator}b+{self.constant}"

    def __call__(self, a: int, b: int) -> int:
        """What it returns."""
        value = {"+": a + b, "-": a - b, "*": a * b}[self.operator]
        return value + self.constant


PROGRAMS = tuple(Program(operator, constant) for operator in OPERATORS for constant in CONSTANTS)


@dataclass(frozen=True, slots=True)
class Bug:
    """A wrong program and the right one."""

    wrong: Program
    right: Program

    def row(self) -> dict[str, Any]:
        """As a row of a dataset."""
        wanted = ", ".join(f"f{both} is {self.right(*both)}" for both in ARGUMENTS)
        return {
            "prompt": f"repair {self.wrong.text} so that {wanted}",
            "program": self.wrong.text,
            "tests": [
                {"call": "f", "args": list(both), "returns": self.right(*both)}
                for both in ARGUMENTS
            ],
        }


def all_bugs() -> list[Bug]:
    """Every program with every mistake."""
    return [
        Bug(wrong, right)
        for right in PROGRAMS
        for wrong in PROGRAMS
        if (wrong.operator != right.operator) != (wrong.constant != right.constant)
    ]


def draw_bugs(rng: np.random.Generator) -> Iterator[Bug]:
    """Bugs without end, with repeats."""
    bugs = all_bugs()
    while True:
        yield bugs[int(rng.integers(len(bugs)))]


def changed_somewhere(program: Program, rng: np.random.Generator) -> Program:
    """Another operator or another constant."""
    if rng.random() < 1 / 2:
        return replace(program, operator=OPERATORS[int(rng.integers(len(OPERATORS)))])
    return replace(program, constant=int(rng.integers(len(CONSTANTS))))
