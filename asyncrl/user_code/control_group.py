"""A control group for one reward worker, where the system allows one (cgroup v2).

A control group holds every descendant of the worker whatever it does, and `cgroup.kill` ends all of
them at once. Making one needs write access below this process's own group: as root, in a systemd
unit with `Delegate=yes`, or in a container with a writable /sys/fs/cgroup. Elsewhere, and with
ASYNCRL_CONTROL_GROUPS=0 in the environment, the subreaper and the sweep of `process_tree` do the
same work. Import-light: a worker's supervisor loads this file.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

SWITCH = "ASYNCRL_CONTROL_GROUPS"
"""Environment variable; "0": make no control groups."""
_PREFIX = "asyncrl-reward-"
_POLL_SECONDS = 0.005


class ControlGroup:
    """The control group of the worker whose supervisor has process id `owner`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, owner: int) -> ControlGroup | None:
        """The group of this supervisor; None if there is no cgroup v2 to use. Makes nothing."""
        own = None if os.environ.get(SWITCH) == "0" else _own_group()
        return None if own is None else cls(own / f"{_PREFIX}{owner}")

    def create(self, max_processes: int) -> bool:
        """Make the group; False where that is not allowed. Removes what dead owners have left."""
        try:
            _remove_abandoned(self._folder.parent)
            self._folder.mkdir()
            if not (self._folder / "cgroup.kill").exists():  # Linux before 5.14
                self._folder.rmdir()
                return False
        except OSError:
            return False
        with contextlib.suppress(OSError):  # the pids controller is not always delegated
            # It counts threads too, and only has to hold until the supervisor looks.
            (self._folder / "pids.max").write_text(str(4 * max_processes + 1024))
        return True

    def join(self) -> None:
        """Move this process into the group; its children will be in it too."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.procs").write_text("0")

    def kill(self, seconds: float) -> None:
        """Kill every process of the group and remove it. Does nothing if there is no such group."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")
        while time.monotonic() < deadline:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # its processes are still ending
                time.sleep(_POLL_SECONDS)
            else:
                return


def _own_group() -> Path | None:
    """The folder of this process's cgroup v2; None if there is none."""
    with contextlib.suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        relative = next((line[3:] for line in groups if line.startswith("0::")), None)
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mount = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
        if relative is not None and mount is not None:
            return Path(mount + relative)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove empty groups whose supervisor has ended. Groups with processes cannot be removed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX)
        if not Path(f"/proc/{owner}").exists() or owner == str(os.getpid()):
            with contextlib.suppress(OSError):
                folder.rmdir()
