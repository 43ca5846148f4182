"""Rows that a built-in reward cannot judge are refused before a run starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.config.run_config import parse_config
from asyncrl.errors import DataError
from asyncrl.startup.model_checks import check_rows
from asyncrl.tasks.prompts import Prompt, Task


def checked(function: dict[str, Any], row: dict[str, Any], on_error: str = "stop") -> None:
    rewards = {"functions": [{"name": "format", "args": {"pattern": "."}}, function]}
    values = {"rewards": {**rewards, "on_error": on_error}}
    example = {"prompt": "1+1=", "answer": row.get("answer"), "row": row}
    prompt = Prompt("add-7", np.array([1], np.int32), "1+1=", example)
    config = parse_config(values, source="the test")
    check_rows(config, Task([], [prompt], (0,), tokenizer=None))


@pytest.mark.parametrize("name", ["exact_match", "math_verify", "arithmetic"])
def test_a_row_without_an_answer_is_refused_where_the_reward_needs_it(name: str) -> None:
    checked({"name": name}, {"answer": "2"})
    checked({"name": name}, {}, on_error="zero")
    with pytest.raises(DataError, match=f"{name}' cannot judge .* add-7: .* task.answer_field"):
        checked({"name": name}, {})


def test_a_row_without_tests_is_refused_where_a_program_is_judged() -> None:
    tests = [{"assert": "f(1) == 1"}]
    checked({"name": "code"}, {"tests": tests})
    checked({"name": "code", "args": {"tests": "checks"}}, {"checks": tests})
    never = {"tests": [{"assert": "f(1) == 2)"}]}
    for row, said in [
        ({}, "no tests in the column 'tests'"),
        ({"tests": "[1"}, "is not JSON"),
        (never, "test 0 .* can never be passed"),
    ]:
        with pytest.raises(DataError, match=f"'code' cannot judge .* add-7: .*{said}"):
            checked({"name": "code"}, row)


def test_tests_that_a_program_can_forge_are_counted() -> None:
    tests = [[{"assert": "f(1) == 1"}, {"assert": "abs(f(1)) > 0"}], [{"assert": "1"}], "[1"]
    prompts = [
        Prompt(str(n), np.array([1], np.int32), "", {"row": {"tests": one}})
        for n, one in enumerate(tests)
    ]
    functions = [{"name": "exact_match"}, {"name": "code"}]
    values = {"rewards": {"functions": functions, "on_error": "zero"}}
    config = parse_config(values, source="the test")
    (warning,) = check_rows(config, Task(prompts, [], (), tokenizer=None))
    assert "2 of 3 tests are an `assert`" in warning
    assert check_rows(config, Task(prompts[:0], [], (), tokenizer=None)) == []
