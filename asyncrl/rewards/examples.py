"""What a reward function receives as its third argument. Import-light: a worker loads this file.

def score(prompt, response, example): ...   the user's columns, `prompt`, `answer` and `row`
def score(prompt, response, row): ...       the user's example exactly as it is in the dataset
"""

from __future__ import annotations

import inspect
from typing import Any

ROW = "row"
"""Name of a third parameter that asks for the unchanged example, and the key that holds it."""


def wants_row(function: Any) -> bool:
    """Whether the third parameter of a function is called `row`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    return len(parameters) > 2 and parameters[2].name == ROW


def argument_for(example: dict[str, Any], *, row_only: bool) -> dict[str, Any]:
    """The third argument of one call, a new dict whose values are shared between calls.

    Args:
        example: `prompt`, `answer` and, for an example of a dataset, `row`.
        row_only: the function asked for the unchanged example.

    Returns:
        With `row_only` the row. Otherwise the row's columns, with `prompt` (the question as text)
        and `answer` (`task.answer_field`, a number as text) in place of columns of these names,
        and the row under `row`. A task without rows (`arithmetic`) has its example in its place.
    """
    row = example.get(ROW)
    if not isinstance(row, dict):
        row = example
    return dict(row) if row_only else {**row, **example, ROW: dict(row)}
