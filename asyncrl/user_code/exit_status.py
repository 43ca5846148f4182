"""How a process that runs user code ended, in words that follow "the process"."""

from __future__ import annotations

import contextlib
import os
import signal

import msgspec

from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.user_code.supervisor import Ending

_OUTPUT_LINES = 20
"""Last lines of its output that an error message quotes."""
_MAX_BYTES = 1 << 16


def read_ending(status: int) -> Ending | None:
    """What the supervisor has written to this pipe, which must not block; None if it was lost."""
    try:
        return msgspec.msgpack.decode(os.read(status, _MAX_BYTES), type=Ending)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def how_it_ended(ending: Ending) -> str:
    """How it exited, what it had started, and the end of its output."""
    how = how_it_exited(ending.exit_code)
    if ending.exit_code == -signal.SIGKILL and ending.out_of_memory:
        how += ", by the kernel because the machine's or the container's memory was full"
    if ending.leftover:
        how += f", and {ending.leftover} processes that it had started were killed"
    lines = without_controls(ending.output).strip().splitlines()[-_OUTPUT_LINES:]
    return f"{how}. Its last lines:\n" + "\n".join(lines) if lines else how


def how_it_exited(exit_code: int) -> str:
    """An exit code, negative for a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"was killed by signal {-exit_code}"
