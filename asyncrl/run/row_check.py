"""Refuse rows that lack what a built-in reward reads, before any process starts."""

from __future__ import annotations

import itertools

from asyncrl.config import RunConfig
from asyncrl.errors import DataError
from asyncrl.rewards.code import TESTS, read_tests
from asyncrl.rewards.config import RewardFunctionConfig
from asyncrl.tasks.prompts import Prompt, Task, held_out_sets

_NEED_ANSWERS = ("arithmetic", "exact_match", "math_verify")


def check_rows(config: RunConfig, task: Task) -> None:
    """Look at every row that is trained on or held out; only if a failed reward ends the run.

    Raises:
        DataError: a row has no answer or no tests, and a reward needs them.
    """
    if config.rewards.on_error != "stop":
        return
    for function in config.rewards.functions:
        for prompt in itertools.chain(task.train, *held_out_sets(task).values()):
            if (why := _why_not_judged(function, prompt)) is not None:
                raise DataError(
                    f"reward {function.name!r} cannot judge responses to prompt "
                    f"{prompt.prompt_id}: {why}"
                )


def _why_not_judged(function: RewardFunctionConfig, prompt: Prompt) -> str | None:
    if function.name in _NEED_ANSWERS and prompt.example.get("answer") is None:
        return "it has no reference answer; name its field with task.answer_field"
    if function.name == "code":
        column, row = function.args.get("tests", TESTS), prompt.example.get("row", {})
        try:
            read_tests(row.get(column), column)
        except ValueError as error:
            return str(error)
    return None
