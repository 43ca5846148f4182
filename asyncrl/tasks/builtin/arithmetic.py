"""The built-in task: addition with the working shown column by column.

    question   add 38 to 295.
    response   5+8+0=13,9+3+1=13,2+0+1=03:333

Each column, starting from the right, reads `digit+digit+carry=sum`; the sum always has two digits.
The answer follows after a colon. With 2 to 3 digits a response has about 29 tokens.

A hash of the two summands (in either order) decides whether a problem is held out. So neither the
warm start nor a training set ever contains a held-out problem, whatever the seed or the phrasing.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.prompts import Question

PHRASINGS = (
    "what is {a}+{b}?",
    "{a}+{b}=?",
    "add {a} to {b}.",
    "compute {a} plus {b}.",
    "find the sum of {a} and {b}.",
)
TRAIN_SIZE = 2048
EVALUATION_SIZE = 512
EVALUATION_SEED = 20261121
"""The held-out set does not depend on the run's seed, so that runs can be compared."""

_HELD_OUT_SHARE = 8
"""One pair of summands in this many is held out."""
_MAX_REPEATS = 2000
"""Stop after this many consecutive draws without a new problem: (nearly) all are found."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Two summands and the phrasing of the question."""

    a: int
    b: int
    phrasing: int

    @property
    def question(self) -> str:
        """The question as text."""
        return PHRASINGS[self.phrasing].format(a=self.a, b=self.b)

    @property
    def answer(self) -> str:
        """The sum as text."""
        return str(self.a + self.b)

    @property
    def held_out(self) -> bool:
        """Return True if this problem belongs to the evaluation side."""
        low, high = sorted((self.a, self.b))
        return zlib.crc32(f"{low}+{high}".encode()) % _HELD_OUT_SHARE == 0


def working(problem: Problem, rng: np.random.Generator | None = None, slip: float = 0.0) -> str:
    """Write the response to imitate; each column's sum is wrong with probability `slip`.

    A wrong sum is off by one or by ten (a carry lost or invented). The later columns and the answer
    are consistent with it, like a careless person's.
    """
    a, b = (str(n)[::-1] for n in (problem.a, problem.b))
    columns, digits, carry = [], [], 0
    for place in range(max(len(a), len(b))):
        x = int(a[place]) if place < len(a) else 0
        y = int(b[place]) if place < len(b) else 0
        total = x + y + carry
        if rng is not None and slip and rng.random() < slip:
            wrong = [total + d for d in (-1, 1, -10, 10) if 0 <= total + d <= 19]
            total = wrong[rng.integers(len(wrong))]
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        carry, digit = divmod(total, 10)
        digits.append(digit)
    digits.append(carry)
    answer = "".join(str(d) for d in reversed(digits)).lstrip("0") or "0"
    return f"{','.join(columns)}:{answer}"


def draw_problems(
    rng: np.random.Generator, digits: tuple[int, int], *, held_out: bool
) -> Iterator[Problem]:
    """Yield problems of one side without end, with repeats; digit counts are equally likely."""
    low, high = digits
    while True:
        a, b = (_number(rng, int(rng.integers(low, high + 1))) for _ in range(2))
        problem = Problem(a, b, int(rng.integers(len(PHRASINGS))))
        if problem.held_out == held_out:
            yield problem


def arithmetic_questions(config: TaskConfig, seed: int) -> tuple[list[Question], list[Question]]:
    """Return distinct training and evaluation questions by the seed. Raises DataError."""
    train = _distinct(seed % 2**64, config.train_size or TRAIN_SIZE, config.digits, held_out=False)
    size = EVALUATION_SIZE if config.evaluation_size is None else config.evaluation_size
    return train, _distinct(EVALUATION_SEED, size, config.digits, held_out=True)


def _distinct(seed: int, count: int, digits: tuple[int, int], *, held_out: bool) -> list[Question]:
    found: dict[Problem, None] = {}
    source = draw_problems(np.random.default_rng(seed), digits, held_out=held_out)
    repeats = 0
    while len(found) < count and repeats < _MAX_REPEATS:
        before = len(found)
        found[next(source)] = None
        repeats = repeats + 1 if len(found) == before else 0
    if len(found) < count:
        name = "task.evaluation_size" if held_out else "task.train_size"
        raise DataError(
            f"there are only about {len(found)} distinct problems with {digits[0]} to {digits[1]} "
            f"digits for {name} ({count}); lower it or raise task.digits"
        )
    questions = []
    for one in found:
        identity = f"add-{one.a}-{one.b}-{one.phrasing}"
        example = {"prompt": one.question, "answer": one.answer, "a": one.a, "b": one.b}
        questions.append(Question(identity, one.question, example, where=identity))
    return questions


def _number(rng: np.random.Generator, digits: int) -> int:
    lowest = 0 if digits == 1 else 10 ** (digits - 1)
    return int(rng.integers(lowest, 10**digits))
