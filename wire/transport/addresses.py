"""The private folder that holds a run's Unix sockets.

The path of a Unix socket is limited to 107 bytes, so each run gets a folder of mode 0700 under the
user's runtime folder. Its process holds a lock on it, which the kernel releases however the process
ends; so folders of killed runs are recognized. The processes of one node that meet in a folder
(`MeetingPlace`) share its lock.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from asyncrl.wire.errors import AddressTooLong, FolderNotPrivate

_PREFIX = "asyncrl-"
_LOCK = ".lock"
_MAX_BYTES = 80
"""Longest path of the folder; leaves room for a socket's name within 107 bytes."""


class RuntimeDirectory:
    """A private folder for a run's sockets, removed by `close`. Raises AddressTooLong."""

    def __init__(self) -> None:
        parent = _parent()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock: int | None = self._locked()
        if len(os.fsencode(self.path)) > _MAX_BYTES:
            self.close()
            raise AddressTooLong(
                f"the path of the folder for sockets, {parent}, is too long for Unix sockets; set "
                "XDG_RUNTIME_DIR or TMPDIR to a shorter path"
            )

    def address(self, name: str) -> str:
        """Return the ZeroMQ address of one of the run's sockets."""
        return f"ipc://{self.path / name}"

    def _locked(self) -> int:
        # Not inherited by children, so that the lock ends with this process.
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def restore(self) -> bool:
        """Return True if the folder was lost and made again. Raises OSError, FolderNotPrivate."""
        if self._lock is None or (self.path / _LOCK).exists():
            return False
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.is_symlink() or not is_private(self.path):
            raise FolderNotPrivate(f"{self.path} can be accessed by others")
        before, self._lock = self._lock, self._locked()
        os.close(before)
        return True

    def close(self) -> None:
        """Remove the folder and the sockets in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class MeetingPlace:
    """A private folder whose path several processes of a node know; the last one removes it.

    `address` is that of a socket in it. Raises AddressTooLong if its path is too long for Unix
    sockets, FolderNotPrivate if others can access it.
    """

    def __init__(self, address: str) -> None:
        self._path = Path(address.removeprefix("ipc://")).parent
        if len(os.fsencode(self._path)) > _MAX_BYTES:
            raise AddressTooLong(
                f"the path of the folder for sockets, {self._path}, is too long for Unix sockets; "
                "set TMPDIR to a shorter path on this node"
            )
        self._lock: int | None = self._enter()

    def _enter(self) -> int:
        while True:
            self._path.mkdir(mode=0o700, exist_ok=True)
            if self._path.is_symlink() or not is_private(self._path):
                raise FolderNotPrivate(f"{self._path} can be accessed by others; remove it")
            with contextlib.suppress(FileNotFoundError):  # it is being removed: make another one
                lock = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                fcntl.flock(lock, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if (self._path / _LOCK).stat().st_ino == os.fstat(lock).st_ino:
                        return lock
                os.close(lock)

    def close(self) -> None:
        """Leave it. Idempotent."""
        if self._lock is None:
            return
        with contextlib.suppress(BlockingIOError):  # others are there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def runtime_directory_of(address: str) -> Path | None:
    """Return an address's runtime folder, if it exists and only this user can access it."""
    folder = Path(address.removeprefix("ipc://")).parent
    if not address.startswith("ipc://") or not folder.name.startswith(_PREFIX):
        return None
    return folder if folder.is_dir() and is_private(folder) else None


def remove_stale_directories() -> None:
    """Remove the runtime folders of this user's runs whose process was killed."""
    parents = {Path(_parent()), Path(tempfile.gettempdir())}
    for folder in [found for parent in parents for found in parent.glob(f"{_PREFIX}*")]:
        with contextlib.suppress(OSError):  # another user's, or not ours
            if not is_private(folder):
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _parent() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return base if base and os.access(base, os.W_OK) else tempfile.gettempdir()


def is_private(path: Path) -> bool:
    """Return True if only this user can access the folder."""
    status = path.stat()
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
