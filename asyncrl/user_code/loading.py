"""Load a user's function by `module:function` or `path/to/file.py:function`.

Import-light: worker processes load this file. Loading runs the user's code, so only they call
`load_function`; `check_name` is for every process.

A user's folders come last in `sys.path` (`search`), so that a file `types.py` or `tokenizers.py`
there does not shadow the module that other code imports. The module of a file is named after its
whole path, so two files with one stem are two modules, and processes that multiprocessing starts
from a worker can import it by that name.
"""

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

from asyncrl.errors import RewardError, UserError
from asyncrl.suggestions import looked_from, nearest
from asyncrl.user_code.streams import last_lines

_USERS: list[str] = []
"""Folders of user code that this process imports from."""
_OF_A_FILE = "asyncrl_user_"
"""Prefix of the names of modules that were loaded from files."""
_OURS = ("cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")
"""asyncrl's packages; they were top-level packages before."""


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """The purpose of a function and how it is called."""

    noun: str
    """First words of each error, as in `reward 'my.module:score'`."""
    signature: str
    """Call signature, for error messages."""
    arguments: tuple[Any, ...]
    error: type[UserError] = RewardError


def check_name(kind: FunctionKind, name: str) -> None:
    """Refuse an impossible name or a missing file, without running any of the user's code."""
    (source, separator, function), said = name.rpartition(":"), f"{kind.noun} {name!r}"
    if not separator or not source or not function.isidentifier():
        what = kind.signature.partition("(")[0]
        raise kind.error(f"{said} must be written my.module:{what} or path/to/file.py:{what}")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise kind.error(f"{said}: there is no file {source} {looked_from()}")
    elif not all(part.isidentifier() for part in source.split(".")):
        raise kind.error(f"{said}: {source!r} is neither a module's name nor a path ending in .py")


def load_function(kind: FunctionKind, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the function and check that it can be called with keyword arguments `args`.

    Raises the kind's error if there is no such module or function, or it does not take these
    arguments. Exceptions of the user's module while it is imported pass through.
    """
    checked: Callable[..., Any] = load_object(kind, name)
    check_signature(kind, name, checked, args)
    return checked


def load_object(kind: FunctionKind, name: str) -> Any:
    """Import the named object, of any type. Raises as `load_function`."""
    check_name(kind, name)
    source, _, attribute = name.rpartition(":")
    module = _module(kind, name, source)
    found = getattr(module, attribute, None)
    if found is None:
        public = [n for n, _ in inspect.getmembers(module, callable) if not n.startswith("_")]
        near = nearest(attribute, public)
        raise kind.error(f"{kind.noun} {name!r}: {source} has no {attribute!r}.{near}")
    return found


def check_signature(kind: FunctionKind, name: str, function: Any, args: Mapping[str, Any]) -> None:
    """Refuse objects that cannot be called as the kind requires. Raises the kind's error."""
    if not callable(function):
        wrong = f"cannot be called as {kind.signature}: it is of type {type(function).__name__}"
        raise kind.error(f"{kind.noun} {name!r} {wrong}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*kind.arguments, **args)
    except TypeError as error:
        given = f" with args {sorted(args)}" if args else ""
        # As written: annotations that are strings would be shown in quotes.
        shown = re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", str(signature))
        raise kind.error(
            f"{kind.noun} {name!r} cannot be called as {kind.signature}{given}: {error}; its "
            f"signature is {shown}"
        ) from error


def search(folder: str) -> None:
    """Search a user's folder for modules too, after the standard library and installed packages."""
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
    except SystemExit as error:
        raise kind.error(
            f"{kind.noun} {name!r}: {source} ends the process when it is imported:\n"
            f"{last_lines()}\nWhat it does as a program, reading its arguments for instance, "
            'belongs below `if __name__ == "__main__":`'
        ) from error


def _refuse_taken_neighbours(kind: FunctionKind, name: str, file: Path) -> None:
    """Refuse a file that imports a neighbouring module which another user folder has too."""
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
                    f"also {other}. A process can import only one of them: rename one"
                )


def _file_of(folder: Path, module: str) -> Path | None:
    places = (folder / module / "__init__.py", folder / f"{module}.py")
    return next((place for place in places if place.is_file()), None)


def _refuse_two_meanings(kind: FunctionKind, name: str, source: str) -> None:
    """Refuse a module that exists in the user's folder and, as something else, elsewhere."""
    top = source.partition(".")[0]
    own = _file_of(Path.cwd().resolve(), top)
    spec = importlib.util.find_spec(top) if own else None
    if spec is not None and (not spec.has_location or Path(spec.origin or "").resolve() != own):
        raise kind.error(
            f"{kind.noun} {name!r}: {top} is {own}, but {spec.origin} is imported first. "
            "Name the file (path/to/file.py:...), or rename it"
        )


def _name_of(path: str) -> str:
    """Return the module name of a file: an identifier that `_path_of` inverts.

    >>> _name_of("/home/me/rewards.py")
    'asyncrl_user__2fhome_2fme_2frewards_2epy'
    """
    coded = "".join(
        one if one.isascii() and one.isalnum() else "".join(f"_{b:02x}" for b in os.fsencode(one))
        for one in path
    )
    return _OF_A_FILE + coded


def _path_of(name: str) -> str:
    """Return the file of a module of this name.

    >>> _path_of(_name_of("/home/ä b/c_d.py"))
    '/home/ä b/c_d.py'
    """
    first, *rest = name.removeprefix(_OF_A_FILE).split("_")
    coded = first.encode() + b"".join(bytes.fromhex(one[:2]) + one[2:].encode() for one in rest)
    return os.fsdecode(coded)


class _FilesByName:
    """Finds the modules of user files by name."""

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
