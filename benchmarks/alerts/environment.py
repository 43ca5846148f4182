"""The built-in task as an environment of one turn, as far as the present fault allows."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.environments.protocol import Action, Replay, StepResult
from asyncrl.rewards.functions import arithmetic
from benchmarks.alerts.switch import present


class OneTurn:
    """Judges the answer, as the reward `arithmetic` does."""

    def __init__(self) -> None:
        self._row: dict[str, Any] = {}

    @property
    def replay(self) -> Replay | None:
        return None if present() == "environment that cannot go back" else "deterministic"

    def reset(self, row: dict[str, Any], seed: int) -> None:
        del seed
        self._row = row

    def step(self, action: Action) -> StepResult:
        fault = present()
        if fault == "slow environment":
            time.sleep(4.0)
        if fault == "environment that fails" and hash(action.text) % 4 == 0:
            raise ValueError("a fault that was injected")
        return StepResult(done=True, reward=arithmetic(self._row["prompt"], action.text, self._row))
