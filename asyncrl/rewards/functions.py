"""The rewards that asyncrl brings, by name. Import-light: a worker process loads this file.

Each is a function `(prompt, response, example, **args) -> float`. `prompt` is the question as plain
text, `response` the model's response, `example` the example of the dataset with at least `answer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Example = dict[str, Any]
RewardFunction = Callable[..., float]
"""`(prompt: str, response: str, example: dict, **args) -> float`."""

_AFTER_COLON = re.compile(r":\s*(\d+)\s*(?:<[^<>]*>\s*)?\Z")


def exact_match(
    prompt: str, response: str, example: Example, *, ignore_case: bool = False
) -> float:
    """1.0 when the response is the answer, spaces around both ignored."""
    del prompt
    said, answer = response.strip(), _answer(example).strip()
    if ignore_case:
        said, answer = said.casefold(), answer.casefold()
    return float(said == answer)


def math_verify(prompt: str, response: str, example: Example) -> float:
    r"""1.0 when the response's final expression equals the answer, by the `math-verify` package.

    Understands LaTeX (`\boxed{}` first) and plain expressions. The pool's timeout bounds it.
    """
    del prompt
    from math_verify import parse, verify

    answer = _answer(example)
    # An answer that is bare LaTeX is only found as such between dollar signs.
    gold = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math_verify cannot read the reference answer {answer!r}")
    said = parse(response, parsing_timeout=None)
    return float(bool(said) and verify(gold, said, timeout_seconds=None))


def response_format(prompt: str, response: str, example: Example, *, pattern: str) -> float:
    """1.0 when the regular expression `pattern` matches the whole response (dot is any character).

    To ask for a match anywhere, write `.*(?:...).*`.
    """
    del prompt, example
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def arithmetic(prompt: str, response: str, example: Example) -> float:
    """1.0 when the number after the last colon, at the very end, is the answer (built-in task)."""
    del prompt
    found = _AFTER_COLON.search(response)
    return float(found is not None and found.group(1) == _answer(example))


BUILTIN: dict[str, RewardFunction] = {
    "arithmetic": arithmetic,
    "exact_match": exact_match,
    "format": response_format,
    "math_verify": math_verify,
}


def _answer(example: Example) -> str:
    answer = example.get("answer")
    if answer is None:
        raise ValueError("the example has no answer; set task.answer_field, or use another reward")
    return str(answer)
