"""Keeps other users from files: those with secrets, and those of a run."""

import os
from pathlib import Path

from asyncrl.errors import UserError

_OTHERS, _GROUP_CHANGES, _GROUP = 0o007, 0o030, 0o070


def refuse_open_file(path: Path, status: os.stat_result, setting: str) -> None:
    """Raise UserError if others could read or change the secret; `setting` names the file.

    Mode 0600 passes, and 0440 or 0640 of root, who has chosen the group, as for mounted secrets.
    """
    mode = status.st_mode & 0o777
    if mode & _OTHERS or mode & _GROUP_CHANGES or (mode & _GROUP and status.st_uid != 0):
        raise UserError(
            f"{setting}: {path} has mode {mode:04o}, so others could read or change the secret. "
            "Give it mode 0600 (chmod 600), or 0440 if root owns it, as a mounted secret of "
            "Kubernetes (defaultMode: 0440) or Docker"
        )


def take_permissions_of(folder: Path) -> None:
    """Make files that this process and its children create as private as the run's folder is.

    A user who opens that folder (mode 0700) opens what later starts write. Raises OSError.
    """
    closed = ~folder.stat().st_mode & 0o077
    os.umask(os.umask(0o077) | closed)
