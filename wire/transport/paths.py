"""Paths in a configuration: `~` and `${NAME}` are expanded when it is read.

`kept_variable` sets an environment variable for a while.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

WEEK_SECONDS = 7 * 24 * 3600
"""Longest limit of a wait."""
START_SECONDS = 1800.0
"""Default limit of a start. vLLM's own is 600 s, which the weights of a large model on a network
disk, compilation and CUDA graphs exceed together."""
MAX_THREADS = 1024
"""Most threads of a process for tensor operations: more than the cores of any machine."""
MAX_TOKENS = 1 << 24
"""Most tokens of one sequence or one step: 16 times the longest context in use."""
MAX_STEPS = 10**9
MAX_STOP_BYTES = 256
"""Bytes of all stop strings together, in UTF-8; each is a state of the automaton over tokens."""


_MAX_NAME = 255
"""Longest name of a file or folder in Linux, in bytes."""

FOLDER = "folder"
"""Key of the folder of the configuration file, a Path, in the context of a validation."""
_FUNCTION = re.compile(r"((?:[a-z_]+:)?)([^:]+\.py)(:\w+)")
"""A function or class in a file: `file.py:name`, also after a kind, as in `agent:file.py:name`."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@contextmanager
def kept_variable(name: str, value: str | None = None) -> Iterator[None]:
    """Restore an environment variable at the end, whatever is done to it.

    Args:
        name: of the variable.
        value: that it has in between; None: at first the one that it has.
    """
    before = os.environ.get(name)
    try:
        if value is not None:
            os.environ[name] = value
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def expand(path: str) -> str:
    """Expand a leading `~` or `~user` and each `${NAME}` of the environment in a path.

    The result holds no dollar sign: a saved configuration means the same when it is read again.
    Raises ValueError if a variable or a user does not exist, a dollar sign is not part of
    `${NAME}`, or the path has a NUL character or a name too long for any file system.
    """
    if "\0" in path:
        raise ValueError("a path cannot contain a NUL character")
    expanded = _VARIABLE.sub(_value, path)
    if "$" in expanded:
        raise ValueError(
            "a dollar sign in a path must belong to ${NAME}, the name of an environment variable"
        )
    if expanded.startswith("~"):
        expanded = os.path.expanduser(expanded)  # noqa: PTH111 - Path raises for an unknown user
        if expanded.startswith("~"):
            user = expanded.partition("/")[0]
            raise ValueError(f"{user} is no user of this machine; write ./{user} for a file")
    if max(len(name.encode(errors="replace")) for name in expanded.split("/")) > _MAX_NAME:
        raise ValueError(f"a file or folder name has at most {_MAX_NAME} bytes")
    return expanded


def _value(match: re.Match[str]) -> str:
    value = os.environ.get(match[1])
    if not value:
        raise ValueError(
            f"the environment variable {match[1]} is {'not set' if value is None else 'empty'}; "
            "set it, or write the path out"
        )
    return value


def _from_its_folder(path: str, info: ValidationInfo) -> str:
    """Return the full path of a file that is not here, but next to the configuration file."""
    folder = (info.context or {}).get(FOLDER)
    if folder is None or Path(path).exists() or not (folder / path).exists():
        return path
    return str(folder.resolve() / path)


def _in_its_folder(name: str, info: ValidationInfo) -> str:
    """Do the same for the file of a function."""
    found = _FUNCTION.fullmatch(name)
    return name if found is None else found[1] + _from_its_folder(found[2], info) + found[3]


def _absolute(path: str) -> str:
    if not path:
        raise ValueError("a path cannot be empty")
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - as it is written otherwise


LocalPath = Annotated[str, AfterValidator(expand)]
"""A setting that names a file or folder."""
InputPath = Annotated[LocalPath, AfterValidator(_from_its_folder)]
"""A file or folder that a run reads. A relative path that is not found at the current directory
starts at the folder of the configuration file."""
FunctionName = Annotated[LocalPath, AfterValidator(_in_its_folder)]
"""A function or class that may be in a file, which is found as an `InputPath` is."""
AbsolutePath = Annotated[str, AfterValidator(expand), AfterValidator(_absolute)]
"""A path that other commands look up too, from any directory: a relative path starts at the folder
in which the run was started."""
