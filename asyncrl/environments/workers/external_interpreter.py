"""Runs a module of asyncrl in an interpreter that asyncrl is not installed in.

    PYTHON -P .../asyncrl/environments/external_interpreter.py MODULE ARGUMENTS

Of the folder that asyncrl was imported from, only the package asyncrl can be imported: what lies
next to it is for another interpreter. Processes that multiprocessing starts load this file too.
Standard library only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).resolve().parents[3])


class Asyncrl:
    """Finds asyncrl where this file belongs to, before any other of that name."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        del path
        return PathFinder.find_spec(name, [_FOLDER], target) if name == "asyncrl" else None


sys.meta_path.insert(0, Asyncrl)

if __name__ == "__main__":
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
