"""Environments of audited runs; import-light, since workers load this file.

Guessing with hints that lie by chance, and in new conversations: chances are the process's own, so
that an answer that is asked for twice differs, and an observation that is exchanged after the
policy has gone on would be seen.

The built-in games with failures that follow from what was said, and a reward in every turn: the
reward of a sample differs for nearly any two responses, and a reward or a failure that belongs to a
turn that verification has discarded shows. These can be played again.
"""

import random
import re
from typing import Any

from asyncrl.environments.calculator import Calculator
from asyncrl.environments.guessing import Guessing
from asyncrl.environments.protocol import Action, StepResult

NUMBER = re.compile(r"\d{1,9}")
LIES = 0.3
"""Probability that a hint is the wrong one."""


class StartsOver:
    """Guess a number; hints lie. It cannot go back."""

    def __init__(self, high: int = 30, guesses: int = 4) -> None:
        self._high, self._guesses = high, guesses
        self._chances = random.SystemRandom()
        self._number = self._wrong = 0

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """The row's number is to be guessed."""
        del seed
        self._number, self._wrong = int(row["number"]), 0
        return f"guess the number from 0 to {self._high}."

    def step(self, action: Action) -> StepResult:
        found = NUMBER.search(action.text)
        guess = -1 if found is None else int(found.group())
        if guess == self._number:
            return StepResult("correct", done=True, reward=1.0)
        self._wrong += 1
        is_higher = (guess < self._number) != (self._chances.random() < LIES)
        hint = "higher" if is_higher else "lower"
        return self.answered(hint, done=self._wrong >= self._guesses)

    def answered(self, hint: str, *, done: bool) -> StepResult:
        return StepResult(hint, done=done)


class Recorded(StartsOver):
    """Its state is what was guessed: replayed, the recorded hints stand."""

    replay = "recorded"


class Restoring(StartsOver):
    def snapshot(self) -> int:
        return self._wrong

    def restore(self, state: int) -> None:
        self._wrong = state


class Conversations(Recorded):
    """Each guess is a conversation of its own: a context."""

    def answered(self, hint: str, *, done: bool) -> StepResult:
        high = self._high if hint == "higher" else self._high // 2
        return StepResult(
            f"guess the number from 0 to {high}.", done=done, new_conversation=not done
        )


FATAL = "7"
"""A turn with this digit makes the environment raise."""
PER_CHARACTER = 0.01
"""Reward of a turn, for each character of it."""


def _strained(text: str) -> None:
    if FATAL in text:
        raise ValueError(f"a turn with a {FATAL}")


def _shaped(result: StepResult, text: str) -> StepResult:
    more = PER_CHARACTER * len(text.strip())
    return StepResult(result.observation, result.done, result.reward + more)


class BrittleGuessing(Guessing):
    def step(self, action: Action) -> StepResult:
        _strained(action.text)
        return _shaped(super().step(action), action.text)


class RestoredGuessing(BrittleGuessing):
    replay = None  # type: ignore[assignment]  # another way than its base

    def snapshot(self) -> Any:
        """The number, and how many guesses were wrong."""
        return self._number, self._wrong

    def restore(self, state: Any) -> None:
        self._number, self._wrong = state


class PlainGuessing(BrittleGuessing):
    """Cannot go back: its samples start over."""

    replay = None  # type: ignore[assignment]  # another way than its base


class BrittleCalculator(Calculator):
    def step(self, action: Action) -> StepResult:
        _strained(action.text)
        return _shaped(super().step(action), action.text)


PLAYED_AGAIN = ("BrittleGuessing", "RestoredGuessing", "PlainGuessing", "BrittleCalculator")
"""Of an answer and what was before it, always the same."""
