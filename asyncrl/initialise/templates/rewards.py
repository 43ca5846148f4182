"""What a response is worth. run.yaml names the function as `rewards.py:score`."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    """1 if what follows the last colon is the right answer, otherwise 0.

    Args:
        prompt: the question as text.
        response: what the model has answered.
        example: the row of the data; `answer` is its field `task.answer_field`, as text.
    """
    del prompt
    return float(response.rpartition(":")[2].strip() == example["answer"])
