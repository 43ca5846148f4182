"""JSON lines from a file that may hold anything; every problem is located by its line."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.errors import DataError
from asyncrl.suggestions import shortened
from asyncrl.tasks.rows import MAX_ROW_BYTES, BadRow, Row, checked

_OTHER_FORMATS = (
    (b"\x1f\x8b", "gzip data; decompress it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"(\xb5/\xfd", "zstd data; decompress it first"),
    (b"PAR1", "a parquet file; rename it to .parquet"),
    (codecs.BOM_UTF16_LE, "UTF-16 text; save it as UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16 text; save it as UTF-8"),
)
"""First bytes of files that are often named .jsonl, and what to do about them."""


def read_json_lines(path: Path, *, setting: str) -> Generator[Row | BadRow, None, None]:
    """One row for each line that is not empty.

    Raises:
        DataError: the file cannot be opened or is of another format; `setting` is the key that
            names it.
    """
    try:
        with path.open("rb") as file:
            _refuse_other_formats(path, file, setting)
            for number, line in _lines(file):
                where = f"{path}:{number}"
                if line is None:
                    yield BadRow(where, f"it is longer than {MAX_ROW_BYTES >> 20} MiB")
                elif line.strip():
                    yield _row(line, where)
    except OSError as error:
        raise DataError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _refuse_other_formats(path: Path, file: BinaryIO, setting: str) -> None:
    head = file.read(4)
    for magic, advice in _OTHER_FORMATS:
        if head.startswith(magic):
            raise DataError(f"{setting}: {path} is not JSON lines but {advice}")
    file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
    if path.suffix == ".json" and file.read(1) == b"[":
        raise DataError(
            f"{setting}: {path} is one JSON array; write one object per line, for instance with "
            f"`jq -c '.[]' {path}`"
        )
    file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers from 1; None for a line that is too long."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        is_too_long = len(line) > MAX_ROW_BYTES
        while line and not line.endswith(b"\n") and is_too_long:
            line = file.readline(MAX_ROW_BYTES)
        yield number, None if is_too_long else line


def _row(line: bytes, where: str) -> Row | BadRow:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return BadRow(where, f"byte {error.start + 1} of the line, 0x{byte:02x}, is not UTF-8")
    try:
        return checked(where, _DECODER.decode(text))
    except RecursionError:
        return BadRow(where, "it is nested too deeply")
    except json.JSONDecodeError as error:
        return BadRow(
            where,
            f"not JSON: {error.msg} at character {error.pos + 1}; each line must be one JSON "
            "object",
        )
    except ValueError as error:
        return BadRow(where, shortened(str(error)))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {shortened(name, 40)!r} is in it twice")
            seen.add(name)
    return found


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shortened(text, 40)} is not a finite number")
    return value


def _integer(text: str) -> int:
    if len(text) > len(str(-(2**63))):
        raise ValueError(f"an integer of {len(text.lstrip('-'))} digits does not fit 64 bits")
    return int(text)


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a finite number and not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_float=_number,
    parse_int=_integer,
    parse_constant=_constant,
)
