"""The reward of the built-in task, as far as the present fault allows."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.rewards.functions import arithmetic
from benchmarks.alerts.switch import present


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    fault = present()
    if fault == "hanging reward":
        time.sleep(3600)
    if fault == "slow reward":
        time.sleep(0.5)
    if fault == "reward that fails" and hash(response) % 4 == 0:
        raise ValueError("a fault that was injected")
    if fault == "constant reward":
        return 1.0
    return arithmetic(prompt, response, example)
