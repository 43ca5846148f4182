"""Refuse rows that lack what a built-in reward reads, before any process starts."""

from __future__ import annotations

import contextlib
import itertools

from asyncrl.config import RunConfig
from asyncrl.errors import DataError
from asyncrl.programs.tests import Asserted, read_tests
from asyncrl.rewards.code import TESTS
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


def forgeable_tests(config: RunConfig, task: Task) -> list[str]:
    """Warnings about tests that a program can pass without being right, one for each reward."""
    warnings = []
    for function in config.rewards.functions:
        if function.name != "code":
            continue
        asserts, tests, column = 0, 0, function.args.get("tests", TESTS)
        for prompt in task.train:
            with contextlib.suppress(ValueError):  # counted as failures of the reward
                found = read_tests(prompt.example.get("row", {}).get(column), column)
                tests += len(found)
                asserts += sum(isinstance(test, Asserted) for test in found)
        if asserts:
            warnings.append(
                f"WARNING: reward 'code': {asserts:,} of {tests:,} tests are an `assert` that is "
                "judged next to the program, so a program can pass them without being right. Give "
                "them as call, args and returns, or as input and output (docs/sandbox.md)"
            )
    return warnings


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
