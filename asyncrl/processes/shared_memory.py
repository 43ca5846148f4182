"""Names of the files that the processes of a run share in memory, and their removal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from wire.weights.layout import SHARED_MEMORY

_KINDS = r"(?:weights-\d|exchange)"


def weights_id(run_name: str, parent: int) -> str:
    """The id in the names of a run's weight files; `parent` is the process that started the run."""
    return f"{run_name}-{parent}"


def exchange_directory(run_name: str, parent: int) -> Path:
    """Where a run's generators exchange rollouts; `parent` is the process that started the run."""
    return SHARED_MEMORY / f"asyncrl-{weights_id(run_name, parent)}-exchange"


def remove_stale_files() -> None:
    """Remove shared files of runs that this process started or whose process no longer exists."""
    for path in SHARED_MEMORY.glob("asyncrl-*"):
        match = re.fullmatch(rf"asyncrl-.+-(\d+)-{_KINDS}", path.name)
        if match is None:
            continue
        owner = int(match[1])
        if owner == os.getpid() or not Path(f"/proc/{owner}").exists():
            _remove(path)


def remove_files_of(run_name: str, parent: int) -> None:
    """Remove the shared files of a run that was started by a process that has ended.

    Unlike `remove_stale_files` it also removes them when another process has its id by now.
    """
    name = re.escape(weights_id(run_name, parent))
    for path in SHARED_MEMORY.glob("asyncrl-*"):
        if re.fullmatch(rf"asyncrl-{name}-{_KINDS}", path.name):
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another user's
        shutil.rmtree(path) if path.is_dir() else path.unlink()
