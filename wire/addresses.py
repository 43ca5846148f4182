"""The private folder that holds a run's Unix sockets.

The path of a Unix socket is limited to 107 bytes and the run's own folder may have a long path, so
each run gets a folder of mode 0700 under the user's runtime folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from wire.errors import AddressTooLong

_MAX_BYTES = 80
"""Longest path of the folder; leaves room for a socket's name within 107 bytes."""


class RuntimeDirectory:
    """A private folder for the sockets of one run; removed by `close`.

    Raises:
        AddressTooLong: the folder's path is too long for Unix sockets.
    """

    def __init__(self) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        parent = base if base and os.access(base, os.W_OK) else tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=parent))
        if len(os.fsencode(self.path)) > _MAX_BYTES:
            self.close()
            raise AddressTooLong(
                f"the path of the folder for sockets, {parent}, is too long for Unix sockets; set "
                "XDG_RUNTIME_DIR or TMPDIR to a shorter path"
            )

    def address(self, name: str) -> str:
        """The ZeroMQ address of one of the run's sockets."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove the folder and the sockets in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


def is_private(path: Path) -> bool:
    """Whether only this user can access the folder."""
    status = path.stat()
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
