"""Finds environments by name. Import-light: worker processes load this file.

A name is built in, `my.module:Class`, `path/to/file.py:Class`, or an adapter's prefix with its
argument (`gymnasium:ID`). An adapter is a function `(rest, args) -> factory` in a module that is
imported on use; the factory makes one environment.
"""

import difflib
import importlib.util
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.suggestions import nearest
from asyncrl.user_code import loading as user_functions

Factory = Callable[[], Any]

BUILTIN: dict[str, str] = {
    "calculator": "asyncrl.environments.calculator:Calculator",
    "code_repair": "asyncrl.environments.code_repair:CodeRepair",
    "guessing": "asyncrl.environments.guessing:Guessing",
}
ADAPTERS: dict[str, str] = {
    prefix: f"asyncrl.environments.adapters.{prefix}:adapt"
    for prefix in ("gymnasium", "openenv", "python_tools", "trl", "verifiers")
} | {"agent": "asyncrl.environments.agents.sessions:adapter"}

_KIND = user_functions.FunctionKind("environment", "Class()", ())


def check_name(name: str) -> None:
    """Refuse an invalid environment name, without running user code.

    Raises RewardError unless it is a built-in name, an adapter's, `module:Class`, or
    `file.py:Class` with an existing file.
    """
    prefix, separator, rest = name.partition(":")
    if name in BUILTIN:
        return
    if separator and prefix in ADAPTERS:
        if not rest:
            raise RewardError(f"environment {name!r}: the name after the colon is missing")
        return
    if not separator:
        raise RewardError(
            f"there is no environment {name!r}.{nearest(name, BUILTIN)} Name your own class as "
            "my.module:Class or path/to/file.py:Class."
        )
    try:
        user_functions.check_name(_KIND, name)
    except RewardError as error:
        raise RewardError(f"{error}{_adapter_like(prefix)}") from error


def load_factory(name: str, args: dict[str, Any]) -> Factory:
    """Import an environment's factory. Raises RewardError, and errors of the user's module."""
    check_name(name)
    prefix, _, rest = name.partition(":")
    if name in BUILTIN:
        made = pkgutil.resolve_name(BUILTIN[name])
        user_functions.check_signature(_KIND, name, made, args)
        return partial(made, **args)
    if prefix in ADAPTERS:
        factory: Factory = pkgutil.resolve_name(ADAPTERS[prefix])(rest, args)
        return factory
    meant = _adapter_like(prefix)
    if meant and prefix.isidentifier() and importlib.util.find_spec(prefix) is None:
        raise RewardError(f"environment {name!r}: no adapter or module is named {prefix!r}{meant}")
    return partial(user_functions.load_function(_KIND, name, args), **args)


def _adapter_like(prefix: str) -> str:
    close = difflib.get_close_matches(prefix[:64], ADAPTERS, n=1, cutoff=0.75)
    return f". Did you mean {close[0]!r}?" if close else ""
