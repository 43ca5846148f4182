"""The reward of a response. run.yaml names this function as `rewards.py:score`."""

from typing import Any


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return 1 if the text after the last colon is the right answer, otherwise 0.

    Args:
        prompt: the question.
        response: the model's answer.
        example: the row of the data; `answer` is its field `task.answer_field`, as text.
    """
    del prompt
    return float(response.rpartition(":")[2].strip() == example["answer"])
