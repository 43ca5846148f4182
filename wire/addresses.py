"""Where the sockets of a run lie: Unix sockets in a private folder with a short path.

The run's own folder will not do: the path of a Unix socket is limited to 107 bytes, and a run may
live anywhere. So each run gets a folder of mode 0700 under the user's runtime folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from wire.errors import AddressTooLong


class RuntimeDirectory:
    """A private folder for the sockets of one run; removed by `close`."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        parent = base if base and os.access(base, os.W_OK) else tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=parent))
        if len(os.fsencode(self.path)) > 80:
            self.close()
            raise AddressTooLong(
                f"the folder for sockets, {parent}, has too long a path for Unix sockets; "
                "set XDG_RUNTIME_DIR or TMPDIR to a shorter one"
            )

    def address(self, name: str) -> str:
        """The ZeroMQ address of one socket of the run."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove the folder and the sockets in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


def is_private(path: Path) -> bool:
    """Whether a socket's folder belongs to this user alone."""
    status = path.stat()
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
