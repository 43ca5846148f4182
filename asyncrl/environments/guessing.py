"""The built-in environment `guessing`: find a number from hints. Import-light."""

import random
import re
from typing import Any

from asyncrl.environments.protocol import Action, StepResult

_NUMBER = re.compile(r"\d{1,9}")


class Guessing:
    """A number is to be guessed; each wrong guess is answered with `higher` or `lower`.

    The number is between `low` and `high`, inclusive. After `guesses` guesses the sample ends
    without a reward; each wrong guess takes `cost` from the reward of 1.
    """

    replay = "deterministic"

    def __init__(self, low: int = 0, high: int = 9, guesses: int = 4, cost: float = 0.1) -> None:
        if not 0 <= low < high or guesses < 1:
            raise ValueError(
                f"guessing: 0 <= low < high and 1 <= guesses needed, got {low}, {high}, {guesses}"
            )
        self._low, self._high, self._guesses, self._cost = low, high, guesses, cost
        self._number = self._wrong = 0

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Choose the row's `number`, or else one that follows from the seed."""
        drawn = random.Random(seed).randint(self._low, self._high)  # noqa: S311 - a game
        self._number, self._wrong = int(row.get("number", drawn)), 0
        return f"guess the number from {self._low} to {self._high}."

    def step(self, action: Action) -> StepResult:
        """Judge a guess, which is the first number in the turn."""
        found = _NUMBER.search(action.text)
        guess = None if found is None else int(found.group())
        if guess == self._number:
            return StepResult("correct", done=True, reward=1.0 - self._cost * self._wrong)
        self._wrong += 1
        hint = "not a number" if guess is None else "higher" if guess < self._number else "lower"
        return StepResult(hint, done=self._wrong >= self._guesses)
