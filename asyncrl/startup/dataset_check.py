"""Refuse rows that lack what a built-in reward reads, before any process starts."""

from __future__ import annotations

import itertools
from collections import Counter

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import DataError
from asyncrl.programs.tests import Asserted, Test, read_tests
from asyncrl.rewards.code import TESTS
from asyncrl.rewards.config import RewardFunctionConfig
from asyncrl.tasks.prompts import Prompt, Task, held_out_sets

_NEED_ANSWERS = ("arithmetic", "exact_match", "math_verify")


def check_rows(config: RunConfig, task: Task) -> list[str]:
    """Look at every row that is trained on or held out, once for each reward.

    Returns:
        Warnings about tests that a program can pass without being right, one for each reward.

    Raises:
        DataError: a row has no answer or no tests, a reward needs them, and a failed reward ends
            the run.
    """
    warnings = []
    for function in config.rewards.functions:
        forms = Counter[type]()
        for prompt in task.train:
            forms.update(map(type, _tests_of(config, function, prompt)))
        for prompt in itertools.chain(*held_out_sets(task).values()):
            _tests_of(config, function, prompt)
        if forms[Asserted]:
            warnings.append(
                f"WARNING: reward 'code': {forms[Asserted]:,} of {forms.total():,} tests are an "
                "`assert` that is judged next to the program, so a program can pass them without "
                "being right. Give them as call, args and returns, or as input and output "
                "(docs/sandbox.md)"
            )
    return warnings


def _tests_of(config: RunConfig, function: RewardFunctionConfig, prompt: Prompt) -> list[Test]:
    """The tests that a reward judges a row's programs by. Raises DataError, see `check_rows`."""
    why, tests, column = None, list[Test](), function.args.get("tests", TESTS)
    if function.name in _NEED_ANSWERS and prompt.example.get("answer") is None:
        why = "it has no reference answer; name its field with task.answer_field"
    if function.name == "code":
        try:
            tests = read_tests(prompt.example.get("row", {}).get(column), column)
        except ValueError as error:
            why = str(error)
    if why is not None and config.rewards.on_error == "stop":
        raise DataError(
            f"reward {function.name!r} cannot judge responses to prompt {prompt.prompt_id}: {why}"
        )
    return tests
