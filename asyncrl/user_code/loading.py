"""Find a user's own function by `module:function` or `path/to/file.py:function`.

Import-light: worker processes load this file. Loading runs the user's code, so only they call
`load_function`; `check_name` is for every process.

A user's folders come last in `sys.path` (`search`): a file `types.py` or `tokenizers.py` there does
not take the place of the module that others mean. The module of a file has a name made of its whole
path, so two files of one stem are two modules, and processes that multiprocessing starts from a
worker can import it by that name: they load this file as the worker did.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.suggestions import nearest

_USERS: list[str] = []
"""Folders of the user's that this process imports from."""
_OF_A_FILE = "asyncrl_user_"
"""Begins the names of modules of files."""
_OURS = ("cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")
"""Packages that were imported by these names before they were below asyncrl."""


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


def search(folder: str) -> None:
    """Find modules of a user's folder too, after the standard library and installed packages."""
    if folder not in sys.path:
        sys.path.append(folder)
        _USERS.append(folder)


def _module(kind: FunctionKind, name: str, source: str) -> Any:
    try:
        if source.endswith(".py"):
            file = Path(source).resolve()
            _refuse_taken_neighbours(kind, name, file)
            search(str(file.parent))
            return importlib.import_module(_name_of(str(file)))
        _refuse_two_meanings(kind, name, source)
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] in _OURS:
            error.add_note(f"asyncrl's own package of this name is asyncrl.{missing}")
        # If the user's module lacks another module, its own traceback says so best.
        if source.endswith(".py") or not missing or not (source + ".").startswith(missing + "."):
            raise
        raise kind.error(
            f"{kind.noun} {name!r}: there is no module {missing!r}; it must be importable "
            f"from the folder that the run is started in ({Path.cwd()}) or be installed"
        ) from error


def _refuse_taken_neighbours(kind: FunctionKind, name: str, file: Path) -> None:
    """Refuse a file that imports a module next to it, if another folder of the user's has it too.

    A process has one module of a name, and the first folder's was meant by another file.
    """
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return  # importing it says more
    imported = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    for module in sorted({one.partition(".")[0] for one in imported} - {""}):
        for folder in _USERS:
            ours, other = _file_of(file.parent, module), _file_of(Path(folder), module)
            if ours and other and not ours.samefile(other):
                raise kind.error(
                    f"{kind.noun} {name!r}: it imports {module}, which is {ours} next to it, and "
                    f"also {other}. A process can have one of them: rename one"
                )


def _file_of(folder: Path, module: str) -> Path | None:
    places = (folder / module / "__init__.py", folder / f"{module}.py")
    return next((place for place in places if place.is_file()), None)


def _refuse_two_meanings(kind: FunctionKind, name: str, source: str) -> None:
    """Refuse a module that lies in the user's folder and is something else elsewhere."""
    top = source.partition(".")[0]
    here = Path.cwd().resolve()
    own = _file_of(here, top)
    spec = importlib.util.find_spec(top) if own else None
    if spec is not None and (not spec.has_location or Path(spec.origin or "").resolve() != own):
        raise kind.error(
            f"{kind.noun} {name!r}: {top} is {own}, and also {spec.origin}, which comes first. "
            "Name the file (path/to/file.py:...), or rename it"
        )


def _name_of(path: str) -> str:
    """The name of a file's module: an identifier that `_path_of` takes back.

    >>> _name_of("/home/me/rewards.py")
    'asyncrl_user__2fhome_2fme_2frewards_2epy'
    """
    coded = "".join(
        one if one.isascii() and one.isalnum() else "".join(f"_{b:02x}" for b in os.fsencode(one))
        for one in path
    )
    return _OF_A_FILE + coded


def _path_of(name: str) -> str:
    """The file of a module of this name.

    >>> _path_of(_name_of("/home/ä b/c_d.py"))
    '/home/ä b/c_d.py'
    """
    first, *rest = name.removeprefix(_OF_A_FILE).split("_")
    coded = first.encode() + b"".join(bytes.fromhex(one[:2]) + one[2:].encode() for one in rest)
    return os.fsdecode(coded)


class _FilesByName:
    """Finds the modules of users' files."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        if not name.startswith(_OF_A_FILE):
            return None
        try:
            file = _path_of(name)
        except ValueError:
            return None
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_FilesByName)
