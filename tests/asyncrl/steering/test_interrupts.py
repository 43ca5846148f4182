"""One signal ends a run in order, two at once, whatever the run is doing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.errors import Interrupted
from asyncrl.steering.interrupts import Interrupts

BLOCKED = """
import asyncio, os, sys, time
from asyncrl.steering import interrupts
from asyncrl.steering.interrupts import Interrupts

class Run:
    async def stop(self): ...
    def fail(self, error): ...

def note(text):
    print(text, flush=True)

async def main():
    interrupts.AT_ONCE_SECONDS = float(sys.argv[1])
    signals = Interrupts(Run(), lambda: note("kill"), lambda: note("clean up"), note)
    with signals.handled():
        note("ready")
        # The loop never runs again. A signal that comes just before a nap begins does not end it:
        # its handler runs after the nap, so naps are short.
        while True:
            time.sleep(0.1)

asyncio.run(main())
"""


class Run:
    """Takes note of how it is ended."""

    def __init__(self) -> None:
        self.stopped = 0
        self.killed = 0
        self.ended = asyncio.Event()
        self.error: Exception | None = None

    async def stop(self) -> None:
        self.stopped += 1
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def kill(self) -> None:
        self.killed += 1


def nothing(*_: Any) -> None:
    """Takes note of nothing."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_stops_the_run_in_order(number: signal.Signals) -> None:
    async def main() -> Run:
        run = Run()
        with Interrupts(run, run.kill, nothing, nothing).handled():
            os.kill(os.getpid(), number)
            await asyncio.wait_for(run.ended.wait(), 60)
            if number == signal.SIGHUP:  # the kernel and the shell both send it
                os.kill(os.getpid(), number)
        return run

    before = signal.getsignal(number)
    run = asyncio.run(main())
    assert (run.stopped, run.killed, run.error) == (1, 0, None)
    assert signal.getsignal(number) == before


def test_a_stop_that_fails_ends_the_run_with_its_error() -> None:
    class Broken(Run):
        async def stop(self) -> None:
            raise RuntimeError("the scheduler is broken")

    async def main() -> Run:
        run = Broken()
        with Interrupts(run, run.kill, nothing, nothing).handled():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(run.ended.wait(), 60)
        return run

    assert str(asyncio.run(main()).error) == "the scheduler is broken"


@contextlib.contextmanager
def started(limit: float) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(limit)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_second_signal_ends_a_process_whose_loop_is_blocked() -> None:
    with started(limit=0.2) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code
    assert output.split("\n")[-3:] == ["kill", "clean up", ""]


def test_the_third_signal_does_not_wait() -> None:
    with started(limit=600) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "kill\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code


def test_ctrl_c_before_a_run_begins_ends_the_command_without_a_traceback() -> None:
    program = (
        "import os, signal, time, asyncrl.cli.entry as cli\n"
        # A shell starts background jobs with this signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def prepare(): os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "cli.app = prepare\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (Interrupted.exit_code, "")
