"""The entry point: prepares a command, and turns an error into a paragraph and an exit code."""

import errno
import io
import logging
import sys

from rich.console import Console
from rich.markup import escape

from asyncrl.cli import agents, machine, steering, training, watching  # noqa: F401 - add commands
from asyncrl.cli.app import app
from asyncrl.errors import AsyncrlError, Interrupted, UserError
from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.runs.folder_lock import UnlockableError

_ABOUT_PATHS = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
    *(errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Errors that a user can fix if they come with a file name."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ABOUT_DISKS = (
    *(errno.EIO, errno.ESTALE, errno.ENOLCK, errno.ENOTCONN),
    *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO),
)


def main() -> None:
    """Run the command line; an expected error becomes one paragraph and an exit code."""
    try:
        _main()
    except KeyboardInterrupt:  # before a run handles signals itself, or after it
        sys.exit(Interrupted.exit_code)


def _main() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or log that is not UTF-8
        sys.stdout.reconfigure(errors="replace")
    from asyncrl.engine.errors import EngineError
    from asyncrl.monitoring.errors import MonitoringError
    from asyncrl.scheduler.errors import SchedulerError
    from asyncrl.trainer.base.errors import TrainerError
    from asyncrl.wire.errors import WireError

    try:
        app()
    except AsyncrlError as error:
        _exit(error, error.exit_code)
    except MonitoringError as error:
        _exit(error, UserError.exit_code)
    except OSError as error:
        named = error.filename is not None
        if isinstance(error, UnlockableError) or (named and error.errno in _ABOUT_PATHS):
            _exit(error, UserError.exit_code)
        if (named and error.errno in _ABOUT_DISKS) or error.errno in _FULL:
            _exit(error, AsyncrlError.exit_code)
        # A fault, not a user's mistake: a traceback, and an exit code on which supervisors retry.
        raise
    except (EngineError, SchedulerError, TrainerError, WireError) as error:
        _exit(error, AsyncrlError.exit_code)


class _PlainFormatter(logging.Formatter):
    """Formats lines without terminal escapes: a warning may quote a downloaded data set."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return without_controls(super().format(record))


def _exit(error: Exception, code: int) -> None:
    message = f"[bold red]error:[/] {escape(without_controls(str(error)))}"
    Console(stderr=True).print(message, highlight=False, soft_wrap=True)
    sys.exit(code)
