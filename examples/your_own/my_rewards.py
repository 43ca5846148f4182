"""A reward of your own: any function of the prompt, the response and the dataset example."""

from __future__ import annotations

from typing import Any


def digits_please(prompt: str, response: str, example: dict[str, Any]) -> float:
    """1 for the right number, up to 0.5 for answering in digits at all."""
    del prompt
    if example["reference"] in response:
        return 1.0
    return 0.5 * sum(character.isdigit() for character in response) / max(1, len(response))
