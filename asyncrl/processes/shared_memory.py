"""Names of the files that the processes of a run share in memory, and their removal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from asyncrl.wire.weights.layout import SHARED_MEMORY

_KINDS = r"(?:(?:trainer|relay-\d+)(?:\.\d+)?-weights-\d+|exchange)"


def local_run_id(run_name: str, parent: int) -> str:
    """The id of a run whose processes are all on this machine.

    It ends with a process id, so that the files of a run that was killed are known as such.

    Args:
        run_name: of the run.
        parent: the process that started the run.
    """
    return f"{run_name}-{parent}"


def weights_id(run_id: str, trainer: str) -> str:
    """The id in the names of a trainer's weight files.

    Each trainer of a run has files of its own, so a late reader of a lost trainer's weights never
    reads those of its replacement under the same policy version.

    Args:
        run_id: of the run.
        trainer: name of the trainer's process.
    """
    return f"{run_id}-{trainer}"


def exchange_directory(run_id: str, folder: Path) -> Path:
    """Where a run's generators on one machine exchange rollouts, under its folder in memory."""
    return folder / f"asyncrl-{run_id}-exchange"


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
    name = re.escape(local_run_id(run_name, parent))
    for path in SHARED_MEMORY.glob("asyncrl-*"):
        if re.fullmatch(rf"asyncrl-{name}-{_KINDS}", path.name):
            _remove(path)


def remove_weights(run_id: str, trainer: str) -> None:
    """Remove the weights of a trainer that has ended. A reader that has one open can finish."""
    for path in SHARED_MEMORY.glob(f"asyncrl-{weights_id(run_id, trainer)}-weights-*"):
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another user's
        shutil.rmtree(path) if path.is_dir() else path.unlink()
