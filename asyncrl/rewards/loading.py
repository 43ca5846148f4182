"""Find a reward function by its name. Import-light: a worker process loads this file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.functions import BUILTIN, RewardFunction
from asyncrl.suggestions import nearest


def check_name(name: str) -> None:
    """Refuse names that cannot be a reward, without running any of the user's code.

    Raises:
        RewardError: it is neither a built-in name, nor `module:function`, nor `file.py:function`
            of an existing file.
    """
    if name in BUILTIN:
        return
    source, separator, function = name.rpartition(":")
    if not separator:
        raise RewardError(
            f"there is no reward {name!r}.{nearest(name, BUILTIN)} A function of your own is "
            "written my.module:function or path/to/file.py:function."
        )
    if not source or not function.isidentifier():
        raise RewardError(
            f"reward {name!r} must be written my.module:function or path/to/file.py:function"
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise RewardError(f"reward {name!r}: there is no file {source} in {Path.cwd()}")
    elif not all(part.isidentifier() for part in source.split(".")):
        raise RewardError(
            f"reward {name!r}: {source!r} is neither a module's name nor a path that ends in .py"
        )


def load_function(name: str, args: dict[str, Any]) -> RewardFunction:
    """Import the function and check that it can be called with `args`.

    Exceptions that the user's module raises while it is imported pass through.

    Raises:
        RewardError: there is no such module or function, or it does not take these arguments.
    """
    check_name(name)
    if name in BUILTIN:
        function: Any = BUILTIN[name]
    else:
        source, _, attribute = name.rpartition(":")
        module = _module(name, source)
        function = getattr(module, attribute, None)
        if function is None:
            public = [n for n in dir(module) if not n.startswith("_")]
            raise RewardError(
                f"reward {name!r}: {source} has no {attribute!r}.{nearest(attribute, public)}"
            )
    _check_signature(name, function, args)
    checked: RewardFunction = function
    return checked


def _module(name: str, source: str) -> Any:
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            # If the user's module lacks another module, its own traceback says so best.
            if error.name is None or not (source + ".").startswith(error.name + "."):
                raise
            raise RewardError(
                f"reward {name!r}: there is no module {error.name!r}; it must be importable from "
                f"the folder that the run is started in ({Path.cwd()}) or be installed"
            ) from error
    spec = importlib.util.spec_from_file_location(f"asyncrl_reward_{Path(source).stem}", source)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {name!r}: {source} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_signature(name: str, function: Any, args: dict[str, Any]) -> None:
    if not callable(function):
        raise RewardError(f"reward {name!r} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind("", "", {}, **args)
    except TypeError as error:
        given = f" with args {sorted(args)}" if args else ""
        raise RewardError(
            f"reward {name!r} cannot be called as function(prompt, response, example){given}: "
            f"{error}; its signature is {signature}"
        ) from error
