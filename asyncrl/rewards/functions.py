"""The built-in rewards and the search for a reward by name. Import-light, for worker processes.

`prompt` is the question as plain text, `example` the dataset's example with at least `answer`.
"""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards import judge, reward_model
from asyncrl.rewards.code import code
from asyncrl.rewards.values import convention_of
from asyncrl.sandbox.check import why_not
from asyncrl.suggestions import nearest
from asyncrl.user_code import loading as user_functions

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
    "judge": judge.judge,
    "math_verify": math_verify,
    "reward_model": reward_model.reward_model,
}


def _answer(example: Example) -> str:
    answer = example.get("answer")
    if answer is None:
        raise ValueError("the example has no answer: set task.answer_field, or use another reward")
    return str(answer)


_KIND = user_functions.FunctionKind("reward", "function(prompt, response, example)", ("", "", {}))


def check_name(name: str) -> None:
    """Refuse names that cannot be a reward, without running any of the user's code.

    Raises RewardError unless it is a built-in name, `module:function`, or `file.py:function` of an
    existing file.
    """
    if name in BUILTIN:
        return
    if ":" not in name:
        raise RewardError(
            f"there is no reward {name!r}.{nearest(name, BUILTIN)} Name your own function as "
            "my.module:function or path/to/file.py:function."
        )
    user_functions.check_name(_KIND, name)


def load_function(name: str, args: dict[str, Any]) -> RewardFunction:
    """Import the function and check that it can be called with `args`.

    Exceptions of the user's module pass through. Raises RewardError if the module or function does
    not exist, does not take these arguments, or runs programs that this machine cannot contain.
    """
    check_name(name)
    if name not in BUILTIN:
        own: RewardFunction = user_functions.load_object(_KIND, name)
        if convention_of(own) in ("example", "row"):  # the others are called by name
            user_functions.check_signature(_KIND, name, own, args)
        return own
    function = BUILTIN[name]
    user_functions.check_signature(_KIND, name, function, args)
    checks = {reward_model.reward_model: reward_model.check_args, judge.judge: judge.check_args}
    if function in checks:
        checks[function](args)
        import_module("asyncrl.rewards.services.client")  # loads openai before a call's time runs
    if function is response_format:
        _check_pattern(args["pattern"])
    if function is code:
        reason = why_not()
        if reason is not None:
            raise RewardError(f"the reward `code` runs programs of the model, and {reason}")
    return function


def _check_pattern(pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RewardError(
            f"reward 'format': args.pattern is not a regular expression: {pattern!r:.200} ({error})"
        ) from error
