"""Parts for `asyncrl.gpu_check.runner`: each ends in another way."""

from __future__ import annotations

import fcntl
import os
import signal
import sys

from asyncrl.gpu_check.parts import Context, LeftOut, PartFailed, Said
from asyncrl.gpu_check.runner import run_command


def goes_well(context: Context) -> Said:
    print("not shown")
    return f"{context.device}, {'small' if context.small else 'full'}", {"gpus": context.gpus}


def finds_a_fault(_context: Context) -> Said:
    raise PartFailed("two and two are five", {"sum": 5})


def breaks(_context: Context) -> Said:
    print("before it broke")
    raise ValueError("no such kernel\nand more")


def cannot_run(_context: Context) -> Said:
    raise LeftOut("there is no such engine")


def dies(_context: Context) -> Said:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def waits_for_a_run(context: Context) -> Said:
    """For a program that removes what it holds at its second SIGTERM, as a run does."""
    program = (
        "import pathlib, signal, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "(folder / 'begun').touch()\n"
        "for _ in range(2): signal.sigwait([signal.SIGTERM])\n"
        "(folder / 'held').unlink()\n"
    )
    (context.folder / "held").touch()
    return str(run_command([sys.executable, "-c", program, str(context.folder)])), {}


def hangs(context: Context) -> Said:
    """For ever, with a child that ignores SIGTERM and holds a lock while it lives."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with (context.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            print("waiting for ever", flush=True)
            (context.folder / "begun").touch()
            while True:
                signal.pause()
    while True:
        signal.pause()
