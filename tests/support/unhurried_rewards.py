"""Rewards of runs that tests watch from outside: a step of 16 samples takes a second.

As fast as it can, a run keeps two cores busy while the test waits for a process to start, a page or
Prometheus, which need them.
"""

from __future__ import annotations

import time
from typing import Any

SECONDS = 0.07


def digits_please(prompt: str, response: str, example: dict[str, Any]) -> float:
    """As in examples/your_own, later."""
    del prompt
    time.sleep(SECONDS)
    if example["reference"] in response:
        return 1.0
    return 0.5 * sum(character.isdigit() for character in response) / max(1, len(response))


def digits(prompt: str, response: str, example: dict[str, Any]) -> float:
    """The part of a response that is digits, later: for rows without a reference."""
    del prompt, example
    time.sleep(SECONDS)
    return sum(character.isdigit() for character in response) / max(1, len(response))
