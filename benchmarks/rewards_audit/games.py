"""The built-in games, with failures that follow from what was said, and a reward in every turn.

So the reward of a sample differs for nearly any two responses, and a reward or a failure that
belongs to a turn that verification has discarded shows. Import-light: workers load this file.
"""

from __future__ import annotations

from typing import Any

from asyncrl.environments.calculator import Calculator
from asyncrl.environments.guessing import Guessing
from asyncrl.environments.protocol import Action, StepResult

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
