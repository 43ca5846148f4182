"""Names of the files that the processes of a run share in memory, and their removal."""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.wire.weights.layout import SHARED_MEMORY

_LOOKED_AT_SECONDS = 2.0

_KINDS = r"(?:(?:trainer|relay-\d+)(?:\.\d+)?-weights-\d+|exchange|owner)"


def local_run_id(run_name: str, parent: int) -> str:
    """Return a local run's id; it ends with `parent`, so that dead runs are recognised."""
    return f"{run_name}-{parent}"


def weights_id(run_id: str, trainer: str) -> str:
    """Return the id in the names of a trainer's weight files; a replacement has other files."""
    return f"{run_id}-{trainer}"


def exchange_directory(run_id: str, folder: Path) -> Path:
    """Return the folder in memory where a run's generators on one machine exchange rollouts."""
    return folder / f"asyncrl-{run_id}-exchange"


@contextmanager
def owned(run_id: str) -> Iterator[None]:
    """Mark a run's files in memory as owned by this process, until it ends.

    Containers may share memory without seeing each other's processes, so a process id does not
    suffice. If the file cannot be written, the files stay unmarked. Raises UserError if a process
    of another container owns files of the same names.
    """
    path = SHARED_MEMORY / f"asyncrl-{run_id}-owner"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        if not _locked(descriptor):
            raise UserError(
                f"another run has the files {SHARED_MEMORY}/asyncrl-{run_id}-*: two containers "
                "share this memory. Give another run.name"
            )
        try:
            yield
        finally:
            _remove(path)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Return True if this process has the lock now. A check for stale files holds it briefly."""
    until = time.monotonic() + _LOOKED_AT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:
            return True  # a file system without locks
        else:
            return True


def remove_stale_files() -> None:
    """Remove shared files of runs that this process started or whose process no longer exists."""
    for path in SHARED_MEMORY.glob("asyncrl-*"):
        match = re.fullmatch(rf"asyncrl-(.+-(\d+))-{_KINDS}", path.name)
        if match is None or path.name.endswith("-owner"):
            continue
        owner = int(match[2])
        if owner == os.getpid() or not (Path(f"/proc/{owner}").exists() or _is_owned(match[1])):
            _remove(path)
    for path in SHARED_MEMORY.glob("asyncrl-*-owner"):
        if not _is_owned(path.name.removeprefix("asyncrl-").removesuffix("-owner")):
            _remove(path)


def _is_owned(run_id: str) -> bool:
    """Return True if a process, perhaps in another container, holds the lock of a run's files."""
    try:
        descriptor = os.open(SHARED_MEMORY / f"asyncrl-{run_id}-owner", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def remove_files_of(run_name: str, parent: int) -> None:
    """Remove the files of a dead run, even if another process has its id by now."""
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
