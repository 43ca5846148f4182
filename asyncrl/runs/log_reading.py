"""Reads the logs of a run's processes for `asyncrl logs`: the last lines, and new ones."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.suggestions import nearest

_TAIL_BYTES = 1 << 18
_FOLLOW_SECONDS = 0.3


def find_logs(run: Path, process: str | None) -> list[Path]:
    """Return the log of a process, or all logs. Raises UserError if it does not exist."""
    found = sorted((run / "logs").glob("*.log"))
    if process is None:
        return found
    if (chosen := run / "logs" / f"{process}.log") in found:
        return [chosen]
    names = [path.stem for path in found]
    raise UserError(f"{run} does not have a log of process {process!r}.{nearest(process, names)}")


class LogReader:
    """Reads the last `lines` of each file, and later the additions; `files` may change."""

    def __init__(self, files: Callable[[], list[Path]], lines: int) -> None:
        self._files = files
        self._lines: int | None = lines
        self._read: dict[Path, int] = {}
        self._rests: dict[Path, bytes] = {}

    def new_lines(self, *, last: bool = False) -> Iterator[tuple[str, str]]:
        """Yield new lines as (process, line); `last` includes an unfinished one."""
        for path in self._files():
            for line in self._of(path, last=last):
                yield path.stem, without_controls(line)
        self._lines = None

    def _of(self, path: Path, *, last: bool) -> list[str]:
        try:
            size = path.stat().st_size
            begin = self._read.get(path, 0)
            if begin > size:  # another process of that name has begun a new file
                begin, self._rests[path] = 0, b""
            if self._lines is not None:
                begin = max(0, size - _TAIL_BYTES)
            with path.open("rb") as file:
                file.seek(begin)
                data = self._rests.pop(path, b"") + file.read(size - begin)
        except FileNotFoundError:
            return []
        self._read[path] = size
        *whole, rest = data.split(b"\n")
        self._rests[path] = b"" if last else rest
        if last and rest:
            whole.append(rest)
        if self._lines is not None:
            whole = whole[-self._lines :] if self._lines else []
        return [line.decode("utf-8", "replace") for line in whole]


def follow(reader: LogReader, is_over: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """Yield lines as they are written, until the run is over and all its lines were given."""
    while True:
        over = is_over()
        yield from reader.new_lines(last=over)
        if over:
            return
        time.sleep(_FOLLOW_SECONDS)
