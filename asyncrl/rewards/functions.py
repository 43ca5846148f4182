"""The rewards that asyncrl brings, by name. Import-light: a worker process loads this file.

Each is a function `(prompt, response, row, **args) -> float`. `prompt` is the text that the model
was given, `response` what it wrote, `row` the dataset row with at least `answer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
RewardFunction = Callable[..., float]
"""`(prompt: str, response: str, row: dict, **args) -> float`."""

_AFTER_COLON = re.compile(r":\s*(\d+)\s*(?:<[^<>]*>\s*)?\Z")


def exact_match(prompt: str, response: str, row: Row, *, ignore_case: bool = False) -> float:
    """1.0 when the response is the answer, spaces around both ignored."""
    del prompt
    said, answer = response.strip(), _answer(row).strip()
    if ignore_case:
        said, answer = said.casefold(), answer.casefold()
    return float(said == answer)


def math_verify(prompt: str, response: str, row: Row) -> float:
    r"""1.0 when the response's final expression equals the answer, by the `math-verify` package.

    Understands LaTeX (`\boxed{}` first) and plain expressions. The pool's timeout bounds it.
    """
    del prompt
    from math_verify import parse, verify

    answer = _answer(row)
    # An answer that is bare LaTeX is only found as such between dollar signs.
    gold = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math_verify cannot read the reference answer {answer!r}")
    said = parse(response, parsing_timeout=None)
    return float(bool(said) and verify(gold, said, timeout_seconds=None))


def response_format(prompt: str, response: str, row: Row, *, pattern: str) -> float:
    """1.0 when the regular expression `pattern` matches the whole response (dot is any character).

    To ask for a match anywhere, write `.*(?:...).*`.
    """
    del prompt, row
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def arithmetic(prompt: str, response: str, row: Row) -> float:
    """1.0 when the number after the last colon, at the very end, is the answer (built-in task)."""
    del prompt
    found = _AFTER_COLON.search(response)
    return float(found is not None and found.group(1) == _answer(row))


BUILTIN: dict[str, RewardFunction] = {
    "arithmetic": arithmetic,
    "exact_match": exact_match,
    "format": response_format,
    "math_verify": math_verify,
}


def _answer(row: Row) -> str:
    answer = row.get("answer")
    if answer is None:
        raise ValueError("the row has no answer; set task.answer_field, or use another reward")
    return str(answer)
