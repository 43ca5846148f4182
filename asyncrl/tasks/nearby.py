"""The hint at a file with a similar name, for errors about a path that does not exist."""

from __future__ import annotations

import difflib
from pathlib import Path


def near(path: Path) -> str:
    """' Did you mean x?', or that the folder does not exist either; empty if nothing is close."""
    folder = path.parent
    if not folder.is_dir():
        above = folder.parent
        close = _closest(folder.name, above) if above.is_dir() else None
        if close is not None and (close / path.name).exists():
            return f" Did you mean {close / path.name}?"
        return f" The folder {folder} does not exist either."
    close = _closest(path.name, folder)
    return f" Did you mean {close}?" if close is not None else ""


def _closest(name: str, folder: Path) -> Path | None:
    names = [entry.name for entry in folder.iterdir() if entry.name != name]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return folder / found[0] if found else None
