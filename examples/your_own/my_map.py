"""A mapping function of your own; docs/your-own.md has it.

asyncrl run examples/your_own/run.yaml --set task.map=examples/your_own/my_map.py:two_digits
"""

from __future__ import annotations

from typing import Any


def two_digits(example: dict[str, Any]) -> dict[str, Any] | None:
    """Keep the questions whose answer has at most two digits, and say so in the question."""
    if len(str(example["reference"])) > 2:
        return None  # leaves the example out
    return {**example, "question": f"{example['question']} (at most two digits)"}
