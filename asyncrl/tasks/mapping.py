"""Apply the user's `task.map` to the rows of a dataset, in a process of its own.

User code never runs in the controller: it could hang it, end it, or leave threads and modules
behind. The process below has a time limit for each example and is killed with everything that it
has started. Its input is a temporary file with all examples, so neither side ever waits for the
other to read.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.errors import DataError
from asyncrl.rewards.endings import how_it_ended, read_ending
from asyncrl.rewards.streams import pack, take_frame
from asyncrl.tasks.map_messages import Answer, Failed, Load, Loaded, Mapped, Refused
from asyncrl.tasks.rows import BadRow, Row, checked

IMPORT_SECONDS = 60.0
"""Longest time for importing the function's module."""
MAX_PROCESSES = 64
"""Most processes that the function may start."""
_END_SECONDS = 30.0
"""Longest wait for the supervisor to end the process."""
_CHUNK = 1 << 20

_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def mapped_rows(
    rows: Sequence[Row | BadRow], name: str, *, seconds: float
) -> Generator[Row | BadRow | None, None, None]:
    """What the function makes of each row, in order; None for a row that it leaves out.

    Bad rows are passed on. A row for which the function fails, or returns what no row can be, is a
    `BadRow`.

    Args:
        rows: of a dataset.
        name: the function, as in `task.map`.
        seconds: longest time for one row.

    Raises:
        DataError: the function cannot be loaded, took too long, or ended its process.
    """
    with tempfile.TemporaryFile() as examples:
        examples.write(pack(Load(name, str(Path.cwd()))))
        for row in rows:
            if isinstance(row, Row):
                examples.write(pack(row.values))
        examples.seek(0)
        with contextlib.closing(_MapProcess(name, examples.fileno())) as process:
            process.load()
            for row in rows:
                yield _mapped(row, name, process, seconds) if isinstance(row, Row) else row


def _mapped(row: Row, name: str, process: _MapProcess, seconds: float) -> Row | BadRow | None:
    answer = process.answer(seconds, f"{row.where}: task.map {name!r}")
    if isinstance(answer, Failed):
        return BadRow(row.where, f"task.map {name!r} {answer.message}")
    if not isinstance(answer, Mapped):
        raise DataError(f"{row.where}: task.map {name!r} wrote to its process's pipes")
    if answer.values is None:
        return None
    result = checked(row.where, answer.values)
    if isinstance(result, BadRow):
        return replace(result, reason=f"what task.map {name!r} made of it: {result.reason}")
    return result


class _MapProcess:
    """The process that runs the function."""

    def __init__(self, name: str, examples: int) -> None:
        self._name = name
        self._buffer = bytearray()
        self._status, status = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "asyncrl.tasks.map_worker",
                    *(str(os.getpid()), str(status), str(MAX_PROCESSES)),
                ],
                stdin=examples,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # its end is in the supervisor's report
                env={"OMP_NUM_THREADS": "1", **os.environ},
                pass_fds=(status,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(status)

    def load(self) -> None:
        """Wait until the function is loaded. Raises DataError."""
        who = f"task.map {self._name!r}, while it was imported,"
        answer = self.answer(IMPORT_SECONDS, who, limit="a fixed limit")
        if isinstance(answer, Refused):
            raise DataError(answer.message)
        if not isinstance(answer, Loaded):
            raise DataError(f"task.map {self._name!r} wrote to its process's pipes")

    def answer(
        self, seconds: float, who: str, *, limit: str = "task.map_timeout_seconds"
    ) -> Answer:
        """The next answer within `seconds`. A DataError begins with `who` and names `limit`."""
        deadline = time.monotonic() + seconds
        while (frame := self._whole_frame()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._output], [], [], remaining)[0]:
                raise DataError(
                    f"{who} did not return within {seconds:g} s ({limit}); its process was killed"
                )
            chunk = os.read(self._output, _CHUNK)
            if not chunk:
                raise DataError(f"{who}: its process {self._how_it_ended()}")
            self._buffer += chunk
        try:
            return _DECODER.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{who} wrote to its process's pipes: {error}") from error

    def close(self) -> None:
        """End the process and everything it has started. Idempotent."""
        self._end()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def _output(self) -> int:
        assert self._process.stdout is not None  # noqa: S101 - it was started with a pipe
        return self._process.stdout.fileno()

    def _whole_frame(self) -> bytes | None:
        try:
            return take_frame(self._buffer)
        except ValueError as error:
            raise DataError(f"task.map {self._name!r} wrote to its process's pipes") from error

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the supervisor kills what is below it
            self._process.send_signal(signal.SIGCONT)  # it may be suspended
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._end()
        os.set_blocking(self._status, False)
        ending = read_ending(self._status)
        if ending is None:
            return "was lost with its supervisor"
        if ending.too_many:
            return f"was killed because it had started {ending.too_many} processes"
        return how_it_ended(ending)
