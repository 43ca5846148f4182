"""A reward that takes its time, so that a step of a smoke does, too, on a machine of any speed."""

import time
from typing import Any

from asyncrl.rewards.functions import arithmetic

SECONDS = 0.02
"""Of a sample. One reward worker takes them one after the other."""


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    time.sleep(SECONDS)
    return arithmetic(prompt, response, example)
