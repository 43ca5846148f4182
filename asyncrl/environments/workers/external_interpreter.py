"""Runs a module of asyncrl in an interpreter in which asyncrl is not installed.

    PYTHON -P .../asyncrl/environments/workers/external_interpreter.py MODULE ARGUMENTS

Only the package asyncrl can be imported from its folder: the packages next to it are for another
interpreter. Processes that multiprocessing starts load this file too. Standard library only.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).resolve().parents[3])


class Asyncrl:
    """Finds asyncrl in this installation, before any other of that name."""

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
