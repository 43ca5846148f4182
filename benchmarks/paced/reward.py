"""The reward of benchmarks.paced: it moves the policy and leaves the lengths alone."""

from typing import Any


def rarer_letters(prompt: str, response: str, example: dict[str, Any]) -> float:
    """The share of a response's letters that are not the first of their class."""
    del prompt, example
    return sum(letter not in "adg" for letter in response) / max(1, len(response))
