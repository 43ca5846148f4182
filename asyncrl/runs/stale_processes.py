"""What a killed controller leaves behind, and its removal when the run is resumed or deleted.

Processes are ended (`asyncrl.launch.records`); the folder of sockets and the files in shared memory
are removed. The kernel has released the lock of the run's folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.launch.records import end_leftovers
from asyncrl.launch.shared_memory import remove_files_of
from asyncrl.wire.transport.addresses import remove_stale_directories, runtime_directory_of


def clear_leftovers(
    run: Path, *, name: str, pid: int, control_address: str, say: Callable[[str], None]
) -> None:
    """Remove what the earlier controller of a run left behind. The caller holds the run's lock.

    Args:
        run: the run's folder.
        name: of the run.
        pid: of the earlier controller.
        control_address: where it answered users; the folder of its sockets follows from it.
        say: is told which processes were ended.

    Raises:
        AsyncrlError: a process does not end.
    """
    end_leftovers(run, say)
    sockets = runtime_directory_of(control_address)
    if sockets is not None:
        shutil.rmtree(sockets, ignore_errors=True)
    remove_files_of(name, pid)
    remove_stale_directories()
