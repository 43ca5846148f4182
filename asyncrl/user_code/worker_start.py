"""How a process begins that runs a user's code. Import-light: such processes load this file."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

from asyncrl.cores import stay_on_helper_cores
from asyncrl.user_code.streams import Streams
from asyncrl.user_code.supervisor import supervise

_OOM_SCORE_ADJUSTMENT = 500
"""Of -1000 to 1000; processes that the functions start inherit it."""


def begin() -> Streams:
    """Fork below a supervisor; returns in the worker, with the streams that it is spoken to on.

    The command line is `PARENT STATUS PROCESSES`, see `asyncrl.user_code.supervisor.supervise`.
    """
    parent, status, max_processes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    stay_on_helper_cores()
    supervise(parent, status, max_processes)
    _be_the_first_to_run_out_of_memory()
    return Streams()


def _be_the_first_to_run_out_of_memory() -> None:
    """Have the kernel kill reward functions for memory before the engine or the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJUSTMENT))
