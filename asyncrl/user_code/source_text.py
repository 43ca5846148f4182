"""Name a function of the caller's process so that worker processes can load it.

    imported from a module of a file    path/to/file.py:function
    imported from a package             package.module:function
    written in a notebook or a script   its source text, for a file, with all that it reads there

Nothing is pickled. The source text takes along imports, constants and other functions of the same
notebook. What cannot be written as text is refused by its name: a variable of the function around
it, and any other object.
"""

import ast
import builtins
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from asyncrl.errors import RewardError

_INSTALLED = {"site-packages", "dist-packages"}
_HEAD = "from __future__ import annotations\n"
"""Annotations stay texts, so that names in them need no definition."""
_REMEDY = "Write it into the function, or move the function into a file and import it from there"


def importable_name(function: Any) -> str | None:
    """Return the name by which worker processes import a function; None: only its text is known."""
    origin = _origin(function)
    if origin is None:
        return None
    module, name = sys.modules[origin[0]], origin[1]
    file = Path(getattr(module, "__file__", None) or "")
    is_single_file = file.suffix == ".py" and "." not in module.__name__
    if is_single_file and _INSTALLED.isdisjoint(file.parts):
        return f"{file.resolve()}:{name}"
    return f"{module.__name__}:{name}"


def source_text(function: Any) -> str:
    """Return a module's text that defines a function. Raises RewardError if that is impossible."""
    name = getattr(function, "__name__", None)
    if name == "<lambda>":
        raise RewardError("a reward function needs a name: write the lambda as `def name(...)`")
    if not isinstance(inspect.unwrap(function), FunctionType) or not isinstance(name, str):
        text = f"{function!r} is not a function; give one, or a name such as 'rewards.py:score'"
        raise RewardError(f"rewards: {text}")
    module = _Module(name)
    module.define(name, function)
    return f"{_HEAD}\n" + "\n\n".join(dict.fromkeys(module.parts.values())) + "\n"


@dataclass(slots=True)
class _Module:
    """The text of a module that grows by what `function` reads, what is read first."""

    function: str
    parts: dict[str, str] = field(default_factory=dict)

    def define(self, name: str, value: Any) -> None:
        """Add a function or class of the notebook, after all that its text reads."""
        own: Any = inspect.unwrap(value)
        captured = own.__code__.co_freevars if isinstance(own, FunctionType) else ()
        if captured:
            self._refuse(f"captures {', '.join(map(repr, captured))} of the function around it")
        try:
            text = textwrap.dedent(inspect.getsource(own))
        except (OSError, TypeError) as error:
            self._refuse(f"needs {name}, whose source text is not known", error)
        self.parts[name] = ""  # it may read itself
        known = getattr(own, "__globals__", None) or vars(sys.modules[own.__module__])
        for read in _names_read(text):
            if read in known:
                if read not in self.parts:
                    self._add(read, known[read], text)
            elif not hasattr(builtins, read) and not read.startswith("__"):
                self._refuse(f"reads {read!r}, which is not defined outside of functions")
        del self.parts[name]
        self.parts[name] = text if own.__name__ == name else f"{text}\n\n{name} = {own.__name__}"

    def _add(self, name: str, value: Any, reader: str) -> None:
        if isinstance(value, ModuleType):
            self.parts[name] = _import_of(name, value, reader)
        elif (origin := _origin(value)) is not None:
            self.parts[name] = f"from {origin[0]} import {origin[1]} as {name}"
        elif isinstance(inspect.unwrap(value), FunctionType | type):
            self.define(name, value)
        elif isinstance(value, re.Pattern):
            pattern = f"{value.pattern!r}, {value.flags}"
            self.parts[name] = f"import re as _re\n{name} = _re.compile({pattern})"
        elif _is_constant(value):
            self.parts[name] = f"{name} = {value!r}"
        else:
            self._refuse(f"reads {name!r}, an object of type {type(value).__name__}")

    def _refuse(self, what: str, error: Exception | None = None) -> None:
        raise RewardError(
            f"reward {self.function!r} {what}. Worker processes get the text of a function, with "
            f"imports, constants and other functions that it reads, and no object. {_REMEDY}"
        ) from error


def _names_read(text: str) -> Iterator[str]:
    """Yield the names that a module of this text reads without defining them, each once."""
    tables, found = [symtable.symtable(_HEAD + text, "function", "exec")], dict[str, None]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read = (one for one in table.get_symbols() if one.is_global() and one.is_referenced())
        found |= {one.get_name(): None for one in read}
    yield from found


def _import_of(name: str, module: ModuleType, reader: str) -> str:
    """Import a module by the name that its reader has for it, and submodules named there."""
    full = module.__name__
    if name != full:
        return f"import {full} as {name}"
    inner = [one for one in sys.modules if one.startswith(f"{full}.") and one in reader]
    return "\n".join(f"import {one}" for one in [full, *sorted(inner)])


def _origin(value: Any) -> tuple[str, str] | None:
    """Return the module and the name from which others import an object, or None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    here = getattr(sys.modules.get(module), name, None)
    return (module, name) if here is value else None


def _is_constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
