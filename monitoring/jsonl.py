"""Files of one JSON object per line, that survive their writer's sudden death.

A writer hands each batch of whole lines to the operating system at once, so that a process killed
with SIGKILL can leave at most one cut line, and that at the end. Opening the file again removes
it; readers ignore it. Numbers that JSON does not have (nan, infinities) are written as null.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from monitoring.errors import RecordError

T = TypeVar("T")

_CHUNK = 1 << 16


def _plain_number(value: Any) -> Any:
    """Let numpy's scalars through as what they stand for."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no place in a line of JSON: {value!r}")


class JsonlWriter:
    """Append objects to `path`; its folder is made if need be."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_cut_line(path)
        self.path = path
        self._encoder = msgspec.json.Encoder(enc_hook=_plain_number)
        self._file = path.open("ab")

    def append(self, rows: Iterable[object]) -> None:
        """Write the rows and hand them to the operating system.

        Raises:
            ValueError: the writer was closed.
            OSError: the disk is full or gone.
        """
        data = b"".join(self._encoder.encode(row) + b"\n" for row in rows)
        if data:
            self._file.write(data)
            self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _remove_cut_line(path: Path) -> None:
    """Cut the file behind its last newline."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        keep = end
        while keep > 0:
            start = max(0, keep - _CHUNK)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def read_jsonl(path: Path, kind: type[T]) -> list[T]:
    """All whole lines of `path`, decoded as `kind`; a cut last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: a line other than a cut last one cannot be decoded.
    """
    decoder = msgspec.json.Decoder(kind)
    rows: list[T] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    break
                raise RecordError(path, number, str(error)) from error
    return rows
