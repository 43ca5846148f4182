"""The built-in rewards, by name. Import-light: worker processes load this file.

`prompt` is the question as plain text, `example` the dataset's example with at least `answer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from asyncrl.rewards.code import code
from asyncrl.rewards.judge import judge
from asyncrl.rewards.reward_model import reward_model

Example = dict[str, Any]
RewardFunction = Callable[..., Any]
"""`(prompt: str, response: str, example: dict, **args) -> float`, sync or async."""

_AFTER_COLON = re.compile(r":\s*(\d+)\s*(?:<[^<>]*>\s*)?\Z")


def exact_match(
    prompt: str, response: str, example: Example, *, ignore_case: bool = False
) -> float:
    """Return 1.0 if the response equals the answer, ignoring white space around either."""
    del prompt
    given, answer = response.strip(), _answer(example).strip()
    if ignore_case:
        given, answer = given.casefold(), answer.casefold()
    return float(given == answer)


def math_verify(prompt: str, response: str, example: Example) -> float:
    r"""Return 1.0 if `math-verify` finds the final expression equal to the answer.

    It reads LaTeX (`\boxed{}` first) and plain expressions. The pool's timeout bounds it.
    """
    del prompt
    from math_verify import parse, verify

    answer = _answer(example)
    # math-verify recognises an answer in bare LaTeX only between dollar signs.
    gold = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math_verify cannot read the reference answer {answer!r}")
    given = parse(response, parsing_timeout=None)
    return float(bool(given) and verify(gold, given, timeout_seconds=None))


def response_format(prompt: str, response: str, example: Example, *, pattern: str) -> float:
    """Return 1.0 if the regular expression matches the whole response (dot: any character)."""
    del prompt, example
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def arithmetic(prompt: str, response: str, example: Example) -> float:
    """Return 1.0 if the response ends with a colon and the answer (the built-in task's format)."""
    del prompt
    found = _AFTER_COLON.search(response)
    return float(found is not None and found.group(1) == _answer(example))


BUILTIN: dict[str, RewardFunction] = {
    "arithmetic": arithmetic,
    "code": code,
    "exact_match": exact_match,
    "format": response_format,
    "judge": judge,
    "math_verify": math_verify,
    "reward_model": reward_model,
}


def _answer(example: Example) -> str:
    answer = example.get("answer")
    if answer is None:
        raise ValueError("the example has no answer: set task.answer_field, or use another reward")
    return str(answer)
