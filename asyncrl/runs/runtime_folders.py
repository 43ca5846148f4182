"""Checks during a run that its folder and the folder of its sockets still exist.

    the run's folder is removed or moved   the run ends with an error: nothing of it can be saved
    the folder of sockets is removed       it is made again, and every socket in it bound again;
                                           where that is refused, the run ends in order

An open connection does not need its socket's file, so the run would notice only when a process must
be replaced: the replacement could never connect. systemd removes XDG_RUNTIME_DIR when its user logs
out, and cleaners of temporary folders remove old files.

After a controller was killed, `clear_leftovers` ends its processes (`asyncrl.launch.records`) and
removes the folder of sockets and the files in shared memory. The kernel has released the lock of
the run's folder.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from asyncrl.errors import AsyncrlError, Interrupted, RunFailed
from asyncrl.launch.records import end_leftovers
from asyncrl.launch.shared_memory import remove_files_of
from asyncrl.suggestions import resume_command
from asyncrl.wire import Hub, RuntimeDirectory, WireError
from asyncrl.wire.transport.addresses import remove_stale_directories, runtime_directory_of


def clear_leftovers(
    run: Path, *, name: str, pid: int, control_address: str, say: Callable[[str], None]
) -> None:
    """Remove what the earlier controller of a run left behind. The caller holds the run's lock.

    `pid` is the earlier controller's; `control_address`, where it answered users, tells the folder
    of its sockets. `say` reports ended processes. Raises AsyncrlError if one does not end.
    """
    end_leftovers(run, say)
    sockets = runtime_directory_of(control_address)
    if sockets is not None:
        shutil.rmtree(sockets, ignore_errors=True)
    remove_files_of(name, pid)
    remove_stale_directories()


LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder's identity, whatever its path leads to later."""

    path: Path
    device: int
    inode: int
    verb: str = "run"
    """The command that continues the run."""

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the folder that the path leads to now. Raises OSError."""
        found = path.stat()
        return cls(path.absolute(), found.st_dev, found.st_ino)

    def is_gone(self) -> bool:
        """Return True if the path leads elsewhere or nowhere; a disk error does not count."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return (found.st_dev, found.st_ino) != (self.device, self.inode)

    def refuse_gone(self) -> None:
        """Raise RunFailed if it is gone."""
        if self.is_gone():
            raise RunFailed(
                f"the run's folder {self.path} was removed, moved or replaced while the run was "
                "active, so nothing of the run can be saved there. If you have moved it, move it "
                f"back and continue with `{resume_command(self.path, verb=self.verb)}`"
            )

    @contextlib.contextmanager
    def required(self) -> Iterator[None]:
        """Raise RunFailed at the end of the block if it is gone, as the cause of other failures."""
        try:
            yield
        except Interrupted:
            raise
        except (AsyncrlError, OSError):
            self.refuse_gone()
            raise
        self.refuse_gone()


class Endable(Protocol):
    """A run that can be ended: the controller."""

    async def stop(self) -> None:
        """Finish the current step, then end the run."""

    def fail(self, error: Exception) -> None:
        """End the run with this error."""


@dataclass(eq=False)
class Surroundings:
    """Checks whether the folders exist, and binds the sockets of the hubs again if needed."""

    _folder: Folder
    _runtime: RuntimeDirectory
    _hubs: Sequence[Hub[Any]]
    _say: Callable[[str], None]
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    error: RunFailed | None = field(default=None, init=False)
    """The reason why the run is ended in order; None if this module does not end it."""

    async def look_after(self, run: Endable) -> None:
        """Check every few seconds, until the run has to end or this is cancelled."""
        while self.error is None:
            await self._sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(self._folder.refuse_gone)  # its disk may hang
            except RunFailed as error:
                self._say(f"the run's folder {self._folder.path} is gone, so the run ends")
                run.fail(error)
                return
            self.error = self._restore_sockets()
            if self.error is not None:
                self._say(f"{self.error}. The run finishes the current step and ends")
                await run.stop()

    def _restore_sockets(self) -> RunFailed | None:
        path = self._runtime.path
        try:
            made = self._runtime.restore()
            bound = [hub.listen_again() for hub in self._hubs]
        except (OSError, WireError) as error:
            return RunFailed(
                f"the folder of the run's sockets, {path}, was removed and cannot be made again "
                f"({error}), so no process could be replaced. Continue with "
                f"`{resume_command(self._folder.path)}`; TMPDIR, with XDG_RUNTIME_DIR unset, or "
                "`loginctl enable-linger` gives the run a folder that a logout does not remove"
            )
        if made or any(bound):
            self._say(f"the folder of the run's sockets, {path}, was removed; it is there again")
        return None
