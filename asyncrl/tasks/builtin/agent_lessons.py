"""Lessons for the model `builtin:agent`: played games of the built-in environments.

A player knows each game and is careless. It first teaches the game and then, in the last steps of
the warm start, also its slips: it answers a sum without the calculator, copies a digit wrong,
guesses at random, repairs the wrong part. RL then has a suitable task: to be careful.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.tasks.builtin.arithmetic import draw_problems
from asyncrl.tasks.builtin.tokenizer import ASSISTANT, END, TOOL, USER
from asyncrl.tasks.builtin.warm_start_recipe import WarmStart
from asyncrl.tasks.examples import Example

OPERATORS = "+-*"
CONSTANTS = range(10)
ARGUMENTS = ((2, 5), (7, 3), (4, 1))
"""Arguments of the tests: with these, any two programs differ in some result."""
_FORM = re.compile(r"def f\(a, b\): return a([+\-*])b\+(\d)\Z")


@dataclass(frozen=True, slots=True)
class Program:
    """`a OPERATOR b + CONSTANT`."""

    operator: str
    constant: int

    @classmethod
    def read(cls, text: str) -> Program | None:
        """Parse a program; return None for other texts."""
        found = _FORM.match(text)
        return None if found is None else cls(found[1], int(found[2]))

    @property
    def text(self) -> str:
        """Return the program as Python."""
        return f"def f(a, b): return a{self.operator}b+{self.constant}"

    def __call__(self, a: int, b: int) -> int:
        """Return the program's result."""
        value = {"+": a + b, "-": a - b, "*": a * b}[self.operator]
        return value + self.constant


PROGRAMS = tuple(Program(operator, constant) for operator in OPERATORS for constant in CONSTANTS)


@dataclass(frozen=True, slots=True)
class Bug:
    """A wrong program and the right one."""

    wrong: Program
    right: Program

    def row(self) -> dict[str, Any]:
        """Return the row of a dataset."""
        wanted = ", ".join(f"f{both} is {self.right(*both)}" for both in ARGUMENTS)
        prompt = f"repair {self.wrong.text} so that {wanted}"
        tests = [{"call": "f", "args": [*both], "returns": self.right(*both)} for both in ARGUMENTS]
        return {"prompt": prompt, "program": self.wrong.text, "tests": tests}


def all_bugs() -> list[Bug]:
    """Return every program with every mistake."""
    return [
        Bug(wrong, right)
        for right in PROGRAMS
        for wrong in PROGRAMS
        if (wrong.operator != right.operator) != (wrong.constant != right.constant)
    ]


def draw_bugs(rng: np.random.Generator) -> Iterator[Bug]:
    """Yield bugs without end, with repeats."""
    bugs = all_bugs()
    while True:
        yield bugs[int(rng.integers(len(bugs)))]


def changed_somewhere(program: Program, rng: np.random.Generator) -> Program:
    """Change the operator or the constant."""
    if rng.random() < 1 / 2:
        return replace(program, operator=OPERATORS[int(rng.integers(len(OPERATORS)))])
    return replace(program, constant=int(rng.integers(len(CONSTANTS))))


Piece = tuple[str, bool]
"""Text, and True if it is the player's."""
HIGHEST = 30
GUESSES = 5
ATTEMPTS = 3
_CARELESS = 3.0
"""Factor of the slip rate in games: the recipe's rate is per column of a sum, and a game has fewer
places for a slip."""


def agent_lessons(tokenizer: Any, recipe: WarmStart) -> Callable[[float], list[Example]]:
    """Return a function that draws a batch of lessons with a given probability of a slip."""
    rng = np.random.default_rng(recipe.seed)
    problems = draw_problems(rng, recipe.digits, held_out=False)
    bugs = draw_bugs(rng)

    def one(slip: float) -> list[Piece]:
        game = rng.random()
        if game < 1 / 2:
            problem = next(problems)
            return list(_calculate(problem.question, problem.a, problem.b, rng, slip))
        if game < 3 / 4:
            return list(_guess(rng, slip))
        return list(_repair(next(bugs), rng, slip))

    def draw(slip: float) -> list[Example]:
        games = [one(min(1 / 2, _CARELESS * slip)) for _ in range(recipe.batch_size)]
        texts = [text for pieces in games for text, _ in pieces]
        ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        lessons = []
        for pieces in games:
            tokens: list[int] = []
            learned: list[bool] = []
            for _, own in pieces:
                piece = next(ids)
                tokens += piece
                learned += [own] * len(piece)
            lessons.append(Example.of("game", np.array(tokens), np.array(learned)))
        return lessons

    return draw


def call_text(expression: str) -> str:
    """Write a call of the calculator as the chat template does."""
    inner = f'{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
    return f"<tool_call>{inner}</tool_call>"


def _calculate(
    question: str, a: int, b: int, rng: np.random.Generator, slip: float
) -> Iterator[Piece]:
    """Compute a sum by the calculator; slips: the answer without it, a digit copied wrong."""
    yield f"{USER}{question}{ASSISTANT}", False
    if rng.random() < slip:
        yield f":{_misread(str(a + b), rng, 1 / 2)}{END}", True
        return
    expression = f"{_misread(str(a), rng, slip / 8)}+{_misread(str(b), rng, slip / 8)}"
    yield f"{call_text(expression)}{END}", True
    left, right = map(int, expression.split("+"))
    yield f"{TOOL}{left + right}{ASSISTANT}", False
    yield f":{_misread(str(left + right), rng, slip / 8)}{END}", True


def _misread(number: str, rng: np.random.Generator, slip: float) -> str:
    """Return the number, with each digit replaced with probability `slip`."""
    read = [str(rng.integers(10)) if slip and rng.random() < slip else d for d in number]
    return str(int("".join(read)))


def _guess(rng: np.random.Generator, slip: float) -> Iterator[Piece]:
    """Find a number by halving; slips: random guesses."""
    number = int(rng.integers(HIGHEST + 1))
    yield f"{USER}guess the number from 0 to {HIGHEST}.{ASSISTANT}", False
    low, high = 0, HIGHEST
    for left in reversed(range(GUESSES)):
        guess = (low + high) // 2
        if rng.random() < slip:
            guess = int(rng.integers(HIGHEST + 1))
        yield f"{guess}{END}", True
        if guess == number or not left:
            return
        yield f"{USER}{'higher' if guess < number else 'lower'}{ASSISTANT}", False
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)


def _repair(bug: Bug, rng: np.random.Generator, slip: float) -> Iterator[Piece]:
    """Write programs that fit the failures so far; slips: something else is changed."""
    program, right = bug.wrong, bug.right
    seen: list[tuple[int, int]] = []
    shown = f"repair {program.text}\n"
    for left in reversed(range(ATTEMPTS)):
        failed = next(both for both in ARGUMENTS if program(*both) != right(*both))
        seen.append(failed)
        failure = f"f({failed[0]}, {failed[1]}) is {program(*failed)} not {right(*failed)}"
        yield f"{USER}{shown}{failure}{ASSISTANT}", False
        shown = ""
        if rng.random() < slip:
            program = changed_somewhere(program, rng)
        else:
            fitting = [p for p in PROGRAMS if all(p(*both) == right(*both) for both in seen)]
            operator, constant = program.operator, program.constant
            near = [p for p in fitting if p.operator == operator or p.constant == constant]
            program = (near or fitting)[int(rng.integers(len(near or fitting)))]
        yield f"{program.text}{END}", True
        if not left or all(program(*both) == right(*both) for both in ARGUMENTS):
            return
