"""Parts of error messages: hints at similar names, and quoted values of bounded length."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_COMPARED = 64
"""Characters of a name that are compared: difflib takes quadratic time."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean x?' or, if nothing is close, ' Known: a, b.'; empty without names.

    Example:
        >>> nearest("enginee", ["engine", "trainer"])
        " Did you mean 'engine'?"
        >>> nearest("x", ["engine", "trainer"])
        ' Known: engine, trainer.'
    """
    names, name = sorted(known), name[:_COMPARED]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""


def nearest_path(path: Path) -> str:
    """Return ' Did you mean x?', or that the folder is missing too; empty if nothing is close."""
    folder = path.parent
    if not folder.is_dir():
        above = folder.parent
        close = _closest(folder.name, above) if above.is_dir() else None
        if close is not None and (close / path.name).exists():
            return f" Did you mean {close / path.name}?"
        return f" The folder {folder} does not exist either."
    close = _closest(path.name, folder)
    return f" Did you mean {close}?" if close is not None else ""


def shortened(text: str, limit: int = 160) -> str:
    """Return the text, or its beginning and '...' if it is longer than `limit` characters.

    Errors quote the user's values through this function, so that none of them prints megabytes.

    Example:
        >>> shortened("a" * 200, 10)
        'aaaaaaa...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _closest(name: str, folder: Path) -> Path | None:
    names = [entry.name for entry in folder.iterdir() if entry.name != name]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return folder / found[0] if found else None
