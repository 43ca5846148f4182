"""Follows metrics.jsonl as it grows, reading each line once."""

import contextlib
import os
from array import array
from bisect import bisect_left
from collections import deque
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.monitoring.records.jsonl import whole_lines
from asyncrl.wire.records.step import StepGroups, StepMetrics

MAX_STEPS_IN_MEMORY = 2000
"""Maximum number of steps, the newest, in the page's curves."""


class StepFile:
    """The newest record of each step, in order; a file that a rewind has cut is read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(StepMetrics)
        self._forget()

    def _forget(self) -> None:
        self.recent: deque[StepMetrics] = deque(maxlen=MAX_STEPS_IN_MEMORY)
        self._steps = array("q")
        self._starts = array("q")
        self._ends = array("q")
        self._read = 0
        self._before = b""
        """The last line read; it has the time of its step, so it is unique."""
        self._inode = -1

    def refresh(self) -> None:
        """Read what is new."""
        try:
            with self._path.open("rb") as file:
                if self._is_another(file):
                    self._forget()
                    self._inode = _inode(file)
                self._read_lines(file)
        except FileNotFoundError:
            self._forget()

    def _is_another(self, file: BinaryIO) -> bool:
        if self._inode != _inode(file):
            return True
        file.seek(self._read - len(self._before))
        return file.read(len(self._before)) != self._before

    def _read_lines(self, file: BinaryIO) -> None:
        file.seek(self._read)
        for line in whole_lines(file):
            start, self._read = self._read, self._read + len(line)
            self._before = line
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                self._add(self._decoder.decode(line), start)

    def _add(self, step: StepMetrics, start: int) -> None:
        while self._steps and self._steps[-1] >= step.step:
            for column in (self._steps, self._starts, self._ends):
                column.pop()
            with contextlib.suppress(IndexError):
                self.recent.pop()
        self._steps.append(step.step)
        self._starts.append(start)
        self._ends.append(self._read - 1)
        batch = msgspec.structs.replace(step.batch, response_lengths={})
        self.recent.append(msgspec.structs.replace(step, batch=batch, groups=StepGroups()))

    def lines(self, first: int, limit: int) -> list[bytes]:
        """Return up to `limit` lines of steps from `first` on, unchanged."""
        begin = bisect_left(self._steps, first)
        wanted = range(begin, min(len(self._steps), begin + limit))
        found: list[bytes] = []
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            for index in () if self._is_another(file) else wanted:
                file.seek(self._starts[index])
                found.append(file.read(self._ends[index] - self._starts[index]))
        return found


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino
