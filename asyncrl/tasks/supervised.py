"""A supervised process that runs untrusted code and answers in frames.

The user's `task.map` and the chat template of a downloaded model never run in our processes: they
could hang, exit, fill the memory, or leave threads and modules behind. The process is killed with
everything that it has started.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from asyncrl.user_code.process import environment, how_it_ended, read_ending
from asyncrl.user_code.streams import take_frame

_END_SECONDS = 30.0
_CHUNK = 1 << 20


class ProcessEnded(Exception):  # noqa: N818 - says what happened
    """The process ended; the message says how, in words that follow "the process"."""

    def __init__(self, how: str, exit_code: int | None) -> None:
        super().__init__(how)
        self.exit_code = exit_code
        """Negative for a signal; None: its supervisor was lost."""


class SupervisedProcess:
    """Runs a module as `python -m MODULE PARENT STATUS PROCESSES`.

    The module calls `asyncrl.user_code.supervisor.supervise` before anything else, and may start up
    to `max_processes` processes. `input_file` is the descriptor of its standard input; with None,
    `send` writes to it.
    """

    def __init__(self, module: str, max_processes: int, input_file: int | None = None) -> None:
        self._buffer = bytearray()
        self._status, status = os.pipe()
        try:
            numbers = map(str, (os.getpid(), status, max_processes))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *numbers],
                stdin=subprocess.PIPE if input_file is None else input_file, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # its end is in the supervisor's report
                bufsize=0, env=environment(), pass_fds=(status,), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(status)

    def send(self, frame: bytes, seconds: float) -> bool:
        """Write a frame; False if the process does not read it in time. Raises ProcessEnded."""
        assert self._process.stdin is not None  # noqa: S101 - it was started with a pipe
        inbox = self._process.stdin.fileno()
        os.set_blocking(inbox, False)
        deadline, rest = time.monotonic() + seconds, memoryview(frame)
        while rest:
            if not select.select([], [inbox], [], max(0.0, deadline - time.monotonic()))[1]:
                return False
            try:
                rest = rest[os.write(inbox, rest) :]
            except BrokenPipeError:
                raise self._ended() from None
        return True

    def frame(self, seconds: float) -> bytes | None:
        """Return the next frame, or None after `seconds`. Raises ProcessEnded, ValueError."""
        assert self._process.stdout is not None  # noqa: S101 - it was started with a pipe
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while (frame := take_frame(self._buffer)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([output], [], [], remaining)[0]:
                return None
            chunk = os.read(output, _CHUNK)
            if not chunk:
                raise self._ended()
            self._buffer += chunk
        return frame

    def close(self) -> None:
        """End the process and everything it has started. Idempotent."""
        self._end()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the supervisor kills what is below it
            self._process.send_signal(signal.SIGCONT)  # it may be suspended
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _ended(self) -> ProcessEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._end()
        os.set_blocking(self._status, False)
        ending = read_ending(self._status)
        if ending is None:
            return ProcessEnded("was lost with its supervisor", None)
        many = f"was killed because it had started {ending.too_many} processes"
        return ProcessEnded(many if ending.too_many else how_it_ended(ending), ending.exit_code)
