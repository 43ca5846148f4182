"""Environment variables: set for a while, and expanded in paths of a configuration."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_NAME = 255
"""Longest name of a file or folder in Linux, in bytes."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@contextmanager
def kept_variable(name: str, value: str | None = None) -> Iterator[None]:
    """Set an environment variable, unless `value` is None, and restore it at the end."""
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
            raise ValueError(f"there is no user {user} on this machine; write ./{user} for a file")
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
