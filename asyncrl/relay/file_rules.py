"""Which files of a run's folder relays copy, how, and whose they are. Opens none but these.

    logs/NAME.log  timeline/NAME.jsonl  engine/NAME.jsonl  slots/NAME.jsonl     they only grow
    samples.jsonl                                                                it only grows
    cache/NAME.snapshot  unfinished/FOLDER/NAME.bin                              replaced as a whole

NAME is a process. Nothing else is served or written: no key, no configuration, no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
SAMPLES = "samples.jsonl"
UNFINISHED = "unfinished/"
_FOLDERS = ("logs", "timeline", "engine", "slots", "cache", "unfinished")


class Kind(Enum):
    """How a file changes."""

    GROWS = 1
    """Bytes are appended; those that are there stay."""
    SAMPLES = 2
    """The same, and the lines of all nodes belong to one file."""
    WHOLE = 3
    """It is replaced."""


_RULES = (
    (re.compile(rf"logs/({_NAME})\.log"), Kind.GROWS),
    (re.compile(rf"(?:timeline|engine|slots)/({_NAME})\.jsonl"), Kind.GROWS),
    (re.compile(rf"cache/({_NAME})\.snapshot"), Kind.WHOLE),
    (re.compile(rf"unfinished/{_NAME}/({_NAME})\.bin"), Kind.WHOLE),
)


class PathRefused(ValueError):  # noqa: N818 - says what happened
    """A path that relays do not copy."""


def rule_of(path: str) -> tuple[Kind, str]:
    """How a file changes, and the process whose it is (empty: that of several).

    Raises:
        PathRefused: relays do not copy such a file.
    """
    if path == SAMPLES:
        return Kind.SAMPLES, ""
    for pattern, kind in _RULES:
        if found := pattern.fullmatch(path):
            return kind, found[1]
    raise PathRefused(f"{path[:100]!r} is no file that relays copy")


def files_of(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The files below a folder that relays copy, links left out."""
    candidates = [root / SAMPLES]
    for folder in _FOLDERS:
        top = root / folder
        if top.is_symlink():
            continue
        with contextlib.suppress(OSError):  # there is none
            for entry in sorted(top.iterdir()):
                deeper = folder == "unfinished" and not entry.is_symlink() and entry.is_dir()
                candidates += sorted(entry.iterdir()) if deeper else [entry]
    for path in candidates:
        relative = path.relative_to(root).as_posix()
        with contextlib.suppress(OSError, PathRefused):
            rule_of(relative)
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                yield relative, found


@contextlib.contextmanager
def folder_below(root: Path, path: str, *, make: bool) -> Iterator[int]:
    """A descriptor of the folder of a file below a folder; no link is followed on the way.

    Args:
        root: the folder.
        path: of the file.
        make: folders that are missing.

    Raises:
        PathRefused: relays do not copy such a file.
        OSError: there is no such folder.
    """
    rule_of(path)
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in path.split("/")[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=at)
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def open_below(root: Path, path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a file below a folder, found as `folder_below` finds its folder.

    Raises:
        PathRefused: relays do not copy such a file.
        OSError: it cannot be opened, or is none.
    """
    with folder_below(root, path, make=bool(flags & os.O_CREAT)) as folder:
        name = path.rpartition("/")[2]
        found = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(f"{path} is no file")
    return found
