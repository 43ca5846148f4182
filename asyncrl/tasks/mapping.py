"""Apply the user's `task.map` to the rows of a dataset, in a process of its own.

The process has a time limit for each example. Its input is a temporary file with all examples, so
neither side ever waits for the other to read.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.errors import DataError
from asyncrl.tasks.map_messages import Answer, Failed, Load, Loaded, Mapped, Refused
from asyncrl.tasks.rows import BadRow, Row, checked
from asyncrl.tasks.supervised import ProcessEnded, SupervisedProcess
from asyncrl.user_code.streams import pack

IMPORT_SECONDS = 60.0
"""Longest time for importing the function's module."""
MAX_PROCESSES = 64
"""Most processes that the function may start."""

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
        self._process = SupervisedProcess("asyncrl.tasks.map_worker", MAX_PROCESSES, examples)
        self.close = self._process.close

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
        try:
            frame = self._process.frame(seconds)
            if frame is None:
                raise DataError(
                    f"{who} did not return within {seconds:g} s ({limit}); its process was killed"
                )
            return _DECODER.decode(frame)
        except ProcessEnded as ended:
            raise DataError(f"{who}: its process {ended}") from ended
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DataError(f"{who} wrote to its process's pipes: {error}") from error
