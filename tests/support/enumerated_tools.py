"""The random tool of `two_turns` as an environment, in all the ways in which one can go back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from local_environments import in_words
from two_turns import ANSWERS, FRAME, LENGTH, answer_to, rewritten

from asyncrl.environments.protocol import StepResult

PROMPT = np.array([4, 0, 7], np.int32)


class Tool:
    """Answers a first turn at random; the sample ends with the second one."""

    made: ClassVar[Counter[int]] = Counter()
    room: ClassVar[int] = LENGTH
    """Most tokens of a response."""
    on_error: ClassVar[str] = "stop"
    turn_limit: ClassVar[int | None] = None
    """`environment.max_turn_tokens`."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        del row
        self.made[seed] += 1  # one that is made again has other chances
        self.rng = np.random.default_rng([seed, self.made[seed]])
        self.seed = seed

    def step(self, action: Any) -> StepResult:
        self.turns += 1
        if self.turns == 2:
            return StepResult(done=True, reward=1.0)
        return self.answered(action.tokens, answer_to(action.tokens, self.chance(action.tokens)))

    def answered(self, turn: list[int], answer: np.ndarray) -> StepResult:
        del turn
        return StepResult(in_words(answer.tolist()))

    def chance(self, turn: list[int]) -> np.random.Generator:
        del turn
        return self.rng


class Recorded(Tool):
    replay = "recorded"


class Limited(Recorded):
    turn_limit = 2


class Slow(Recorded):
    """One of its two answers takes `STEPS` steps of the engine, the other one none."""

    STEPS: ClassVar[int] = 20
    now: ClassVar[int] = 0
    busy: ClassVar[int] = 0
    """Those that take their time."""

    @classmethod
    def tick(cls) -> None:
        """The engine has made a step."""
        Slow.now += 1

    async def step(self, action: Any) -> StepResult:  # type: ignore[override]
        result = super().step(action)
        if not result.done and result.observation == in_words([FRAME, ANSWERS[1]]):
            due = Slow.now + self.STEPS
            Slow.busy += 1
            try:
                while Slow.now < due:  # noqa: ASYNC110 - steps are made by this event loop
                    await asyncio.sleep(0)
            finally:
                Slow.busy -= 1
        return result


class Rewriting(Recorded):
    """The second turn sees the last token of the first one and the answer alone."""

    room = 4

    def answered(self, turn: list[int], answer: np.ndarray) -> StepResult:
        prompt = rewritten(turn, answer.tolist(), PROMPT.tolist())
        return StepResult(prompt, new_conversation=True)


class Deterministic(Tool):
    """All of its chances are in the seed."""

    replay = "deterministic"

    def chance(self, turn: list[int]) -> np.random.Generator:
        return np.random.default_rng([self.seed, *turn])


class Restoring(Tool):
    def snapshot(self) -> int:
        return self.turns

    def restore(self, turns: int) -> None:
        self.turns = turns


def fails(turn: Sequence[int]) -> bool:
    """About half of the first turns."""
    return turn[0] % 2 == 0


class Failing(Restoring):
    """Raises at some first turns, half done."""

    on_error = "zero"

    def step(self, action: Any) -> StepResult:
        if self.turns == 0 and fails(action.tokens):
            self.turns = 7
            raise ValueError("half done")
        return super().step(action)
