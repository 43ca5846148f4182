"""Reads the rows of a dataset: JSONL, parquet, a folder saved by `datasets`, or a hub id.

JSONL is read with the standard library, so that an error can name the line. `datasets` is imported
only where it is needed. An unreadable file is a DataError; an unusable row is a `BadRow`, and the
caller decides (`task.on_bad_row`).

A row must survive the messages that carry it to the rewards: text is valid Unicode, nesting and
size are limited. A column that does not is left out of the row with the reason, which does no harm
unless it is the prompt, the answer or the id. Integers beyond 64 bits become texts.
"""

import codecs
import datetime as dt
import json
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from asyncrl.errors import DataError
from asyncrl.suggestions import looked_from, nearest_path, shortened
from asyncrl.tasks.data import hub
from asyncrl.user_code.streams import bounded

MAX_ROW_BYTES = 16 << 20
"""Maximum size of a line of JSONL, and of a row as a message."""
MAX_LEVELS = 64

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Row:
    """One example of a dataset."""

    where: str
    values: dict[str, Any]
    unread: dict[str, str] = field(default_factory=dict)
    """Columns that were left out, and why, to follow "it"."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    where: str
    reason: str


def checked(where: str, values: Any, unread: dict[str, str] | None = None) -> Row | BadRow:
    """Return the row as JSON-able values, or a `BadRow` with the reason.

    `unread` has the columns that could not be read, and why.
    """
    if not isinstance(values, dict):
        return BadRow(where, f"each row must be one JSON object, got {type(values).__name__}")
    sizes: dict[str, int] = {}
    unread = dict(unread or {})
    try:
        plain, total = _plain(values)
    except ValueError:
        plain, total = {}, 0
        for name, value in values.items():
            try:
                column, sizes[name] = _plain({name: value})
            except ValueError as error:
                unread[bounded(str(name))] = str(error)
            else:
                plain |= column
                total += sizes[name]
    if total > MAX_ROW_BYTES:
        sizes = sizes or {name: _plain({name: value})[1] for name, value in plain.items()}
        most = max(sizes, key=sizes.__getitem__)
        text = f"it has {total >> 20} MiB, more than {MAX_ROW_BYTES >> 20} MiB, mostly in {most!r}"
        return BadRow(where, text)
    return Row(where, plain, unread)


def _plain(values: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return JSON-able values and their size in a message; raises ValueError with the reason."""
    if not _is_shallow(values, MAX_LEVELS):
        raise ValueError(f"is nested more than {MAX_LEVELS} levels deep")
    try:
        plain = msgspec.to_builtins(values, enc_hook=_iso_text)
        return plain, len(_ENCODER.encode(plain))
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        text = f"has a lone surrogate (\\u{code:04x}), which is not valid Unicode"
        raise ValueError(text) from error
    except (TypeError, ValueError, OverflowError) as error:
        text = f"has a value that cannot be handed to a reward ({shortened(str(error))})"
        raise ValueError(text) from error


def _iso_text(value: Any) -> str:
    """Return the text of pandas' dates and durations, which have nanoseconds."""
    if isinstance(value, dt.datetime | dt.timedelta):
        return str(value.isoformat())  # type: ignore[union-attr]
    raise TypeError(f"a {type(value).__name__}")


def _is_shallow(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return True
    return levels > 0 and all(_is_shallow(entry, levels - 1) for entry in value)


_OTHER_FORMATS = (
    (b"\x1f\x8b", "gzip data; decompress it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"(\xb5/\xfd", "zstd data; decompress it first"),
    (b"PAR1", "a parquet file; rename it to .parquet"),
    (codecs.BOM_UTF16_LE, "UTF-16 text; save it as UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16 text; save it as UTF-8"),
)
"""First bytes of files that are often named .jsonl, and the advice for them."""


def read_json_lines(path: Path, *, setting: str) -> Generator[Row | BadRow, None, None]:
    """Yield a row for each line that is not empty. Raises DataError, naming `setting`."""
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
    if path.suffix == ".json" and head.removeprefix(codecs.BOM_UTF8).startswith(b"["):
        raise DataError(
            f"{setting}: {path} is one JSON array; write one object per line, for instance with "
            f"`jq -c '.[]' {path}`"
        )
    file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers from 1; None for a line that is too long."""
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
        wrong = f"not JSON: {error.msg} at character {error.pos + 1}"
        return BadRow(where, f"{wrong}; each line must be one JSON object")
    except ValueError as error:
        return BadRow(where, shortened(str(error)))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shortened(twice, 40)!r} is in it twice")
    return found


def _integer(text: str) -> int | str:
    """Return the text itself where no message can carry the number."""
    fits = len(text) <= len(str(-(2**63))) and -(2**63) <= int(text) < 2**64
    return int(text) if fits else text


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)


_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = ".parquet"
_BATCH_ROWS = 1024
"""Rows of a parquet file that are in memory as Python objects at once."""
_UNREADABLE_CELL = (ValueError, OverflowError, TypeError)
"""Exceptions of pyarrow for text that is not UTF-8, and for dates outside Python's range."""


def read_rows(
    path: str, split: str, subset: str | None = None, *, setting: str = "task.path"
) -> Generator[Row | BadRow, None, None]:
    """Yield the rows in order, each with its location.

    `path` is a file, a folder or a hub id; `split` and `subset` select from a saved folder or hub
    dataset; `setting` is the key of `path`, for errors. Raises DataError if the file or id does not
    exist or does not have the format that its name promises.
    """
    place = Path(path)
    if place.is_file():
        if place.suffix in _JSON_LINES:
            return read_json_lines(place, setting=setting)
        if place.suffix == _PARQUET:
            return _parquet(place, setting)
        raise DataError(
            f"{setting}: {place}: a dataset file must be .jsonl (one JSON object per line) or "
            ".parquet, and not compressed"
        )
    if place.is_dir():
        if place.suffix in (*_JSON_LINES, _PARQUET):
            raise DataError(f"{setting}: {place} is a folder; give the file in it")
        saved = any((place / f"dataset_{one}.json").is_file() for one in ("info", "dict"))
        return _from_datasets(str(place), split, subset, setting, saved=saved)
    if place.exists():
        raise DataError(
            f"{setting}: {place} is neither a file nor a folder; write the data of a pipe or "
            "device to a .jsonl file first"
        )
    if place.suffix in (*_JSON_LINES, _PARQUET) or not hub.is_id(path):
        near = f"{looked_from()}.{nearest_path(place)}"
        raise DataError(f"{setting}: there is no dataset at {path} {near}")
    return _from_datasets(path, split, subset, setting, saved=False)


def _parquet(path: Path, setting: str) -> Generator[Row | BadRow, None, None]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        for name, count in Counter(names).items():
            if count > 1:
                raise DataError(f"{setting}: {path} has {count} columns named {name!r}")
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for index in range(batch.num_rows):
                where = f"{path}, example {number}"
                values, unread = {}, {}
                for name, column in zip(names, batch.columns, strict=True):
                    try:
                        values[name] = column[index].as_py()
                    except _UNREADABLE_CELL as error:
                        unread[name] = f"cannot be read: {error}"
                yield checked(where, values, unread)
                number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{setting}: {path} cannot be read as parquet: {error}") from error


def _from_datasets(
    path: str, split: str, subset: str | None, setting: str, *, saved: bool
) -> Generator[Row | BadRow, None, None]:
    # This must precede the import of `datasets`, which reads HF_HUB_OFFLINE.
    without_hub = None if Path(path).is_dir() else hub.unusable()
    import datasets

    try:
        if saved:
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, subset, split=split)
        for name, feature in loaded.features.items():
            if getattr(feature, "decode", False):  # a picture or a sound, as in a parquet file
                loaded = loaded.cast_column(name, replace(feature, decode=False))
    except Exception as error:  # whatever a builder or a decompressor raises on a damaged file
        if without_hub is not None:
            raise DataError(hub.not_found(path, setting, "file or folder", without_hub)) from error
        reason = shortened(str(error).strip().split("\n", 1)[0]) or type(error).__name__
        raise DataError(
            f"{setting}: the dataset {path!r} (split {split!r}, subset {subset!r}) cannot be "
            f"loaded: {reason}"
        ) from error
    for number, example in enumerate(loaded):
        yield checked(f"{path}[{split}], example {number}", example)
