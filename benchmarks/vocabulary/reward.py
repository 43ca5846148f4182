"""The reward of the policy steps: plain words."""

from __future__ import annotations

import re
from typing import Any

_LONGEST = 5
"""Letters of a plain word."""


def plain_words(prompt: str, response: str, example: dict[str, Any]) -> float:
    """The share of the response's words that have at most five letters; 0 without words."""
    del prompt, example
    words = re.findall(r"[A-Za-z]+", response)
    return sum(len(word) <= _LONGEST for word in words) / max(1, len(words))
