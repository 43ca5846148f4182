"""JSON Lines files that stay readable when their writer is killed.

A writer hands each batch of whole lines to the operating system in one call, so a process killed
with SIGKILL leaves at most one incomplete line, at the end. Opening the file for writing removes
that line; readers ignore it. Numbers that JSON lacks (nan, infinities) are written as null.
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
    """Convert numpy's scalars, which msgspec does not know."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


class JsonlWriter:
    """Appends objects to `path`, creating its folder if there is none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_incomplete_line(path)
        self.path = path
        self._encoder = msgspec.json.Encoder(enc_hook=_plain_number)
        self._file = path.open("ab")

    def append(self, records: Iterable[object]) -> None:
        """Write one line per record and hand them to the operating system.

        Raises:
            ValueError: the writer was closed.
            OSError: the disk is full or gone.
        """
        data = b"".join(self._encoder.encode(record) + b"\n" for record in records)
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


def _remove_incomplete_line(path: Path) -> None:
    """Truncate the file after its last newline."""
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
    """All lines of `path`, decoded as `kind`; an incomplete last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: a line other than an incomplete last one cannot be decoded.
    """
    decoder = msgspec.json.Decoder(kind)
    records: list[T] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                records.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    break
                raise RecordError(path, number, str(error)) from error
    return records
