"""Find a user's own function by `module:function` or `path/to/file.py:function`.

Import-light: worker processes load this file. Loading runs the user's code, so only they call
`load_function`; `check_name` is for every process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import UserError
from asyncrl.suggestions import nearest

_LOADED: dict[str, ModuleType] = {}
"""Modules that were loaded from files, by path. A process loads each once."""


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """What a function is for, and how it is called."""

    noun: str
    """Begins each error, as in `reward 'my.module:score'`."""
    signature: str
    """How it is called, for errors."""
    arguments: tuple[Any, ...]
    """Positional arguments like those of a call."""
    error: type[UserError]
    """The error to raise."""


def check_name(kind: FunctionKind, name: str) -> None:
    """Refuse names that cannot be a function, without running any of the user's code.

    Raises:
        UserError: of the kind's type; it is neither `module:function`, nor `file.py:function` of
            an existing file.
    """
    source, separator, function = name.rpartition(":")
    if not separator or not source or not function.isidentifier():
        what = kind.signature.partition("(")[0]
        raise kind.error(
            f"{kind.noun} {name!r} must be written my.module:{what} or path/to/file.py:{what}"
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise kind.error(f"{kind.noun} {name!r}: there is no file {source} in {Path.cwd()}")
    elif not all(part.isidentifier() for part in source.split(".")):
        raise kind.error(
            f"{kind.noun} {name!r}: {source!r} is neither a module's name nor a path that ends in "
            ".py"
        )


def load_function(kind: FunctionKind, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the function and check that it can be called.

    Exceptions that the user's module raises while it is imported pass through.

    Args:
        kind: what it is for.
        name: `module:function` or `file.py:function`.
        args: keyword arguments of every call.

    Raises:
        UserError: of the kind's type; there is no such module or function, or it does not take
            these arguments.
    """
    checked: Callable[..., Any] = load_object(kind, name)
    check_signature(kind, name, checked, args)
    return checked


def load_object(kind: FunctionKind, name: str) -> Any:
    """Import what the name says, whatever it is.

    Exceptions that the user's module raises while it is imported pass through.

    Raises:
        UserError: of the kind's type; there is no such module, or nothing of this name in it.
    """
    check_name(kind, name)
    source, _, attribute = name.rpartition(":")
    module = _module(kind, name, source)
    found = getattr(module, attribute, None)
    if found is None:
        public = [n for n, _ in inspect.getmembers(module, callable) if not n.startswith("_")]
        raise kind.error(
            f"{kind.noun} {name!r}: {source} has no {attribute!r}.{nearest(attribute, public)}"
        )
    return found


def check_signature(kind: FunctionKind, name: str, function: Any, args: Mapping[str, Any]) -> None:
    """Refuse what cannot be called as the kind says. Raises the kind's UserError."""
    if not callable(function):
        raise kind.error(
            f"{kind.noun} {name!r} cannot be called as {kind.signature}: it is an object of the "
            f"type {type(function).__name__}"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*kind.arguments, **args)
    except TypeError as error:
        given = f" with args {sorted(args)}" if args else ""
        raise kind.error(
            f"{kind.noun} {name!r} cannot be called as {kind.signature}{given}: {error}; its "
            f"signature is {_in_words(signature)}"
        ) from error


def _in_words(signature: inspect.Signature) -> str:
    """A signature as it is written; annotations that are texts would be shown in quotes."""
    return re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", str(signature))


def _module(kind: FunctionKind, name: str, source: str) -> Any:
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            # If the user's module lacks another module, its own traceback says so best.
            if error.name is None or not (source + ".").startswith(error.name + "."):
                raise
            raise kind.error(
                f"{kind.noun} {name!r}: there is no module {error.name!r}; it must be importable "
                f"from the folder that the run is started in ({Path.cwd()}) or be installed"
            ) from error
    path = str(Path(source).resolve())
    if path in _LOADED:  # functions of one file share what it holds
        return _LOADED[path]
    spec = importlib.util.spec_from_file_location(f"asyncrl_user_{Path(source).stem}", source)
    if spec is None or spec.loader is None:
        raise kind.error(f"{kind.noun} {name!r}: {source} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is executed
    spec.loader.exec_module(module)
    _LOADED[path] = module
    return module
