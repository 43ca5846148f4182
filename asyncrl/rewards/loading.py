"""Finds a reward function by its name. Import-light: worker processes load this file."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards import judge, reward_model
from asyncrl.rewards.code import code
from asyncrl.rewards.functions import BUILTIN, RewardFunction, response_format
from asyncrl.sandbox.check import why_not
from asyncrl.suggestions import nearest
from asyncrl.user_code import loading as user_functions

_KIND = user_functions.FunctionKind(
    "reward", "function(prompt, response, example)", ("", "", {}), RewardError
)


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
        return user_functions.load_function(_KIND, name, args)
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
            f"reward 'format': args.pattern must be a regular expression, got {pattern!r:.200} "
            f"({error})"
        ) from error
