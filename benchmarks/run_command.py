"""The command line of a real run that a benchmark starts: it ends with the benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def run_command(config: Path | str, settings: Iterable[str], *more: str) -> list[str]:
    """`asyncrl run CONFIG` with this interpreter.

    Start it in the main thread: the run ends when the thread that has started it ends, however that
    happens.
    """
    overrides = [part for setting in settings for part in ("--set", setting)]
    parent = ("--end-with", str(os.getpid()))
    return [sys.executable, "-m", "asyncrl", "run", str(config), *parent, *more, *overrides]
