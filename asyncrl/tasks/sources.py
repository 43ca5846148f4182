"""Read the rows of a dataset: JSONL, parquet, a folder saved by `datasets`, or a hub id.

JSONL is read with the standard library, so that an error can name the line. `datasets` is imported
only where it is needed. A file that cannot be read at all is a DataError; a single row that cannot
be used is a `BadRow`, and the caller decides (`task.on_bad_row`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from pathlib import Path

from asyncrl.errors import DataError
from asyncrl.suggestions import nearest_path, shortened
from asyncrl.tasks import hub
from asyncrl.tasks.jsonl import read_json_lines
from asyncrl.tasks.rows import BadRow, Row, checked

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = ".parquet"
_BATCH_ROWS = 1024
"""Rows of a parquet file that are in memory as Python objects at once."""
_UNREADABLE_CELL = (ValueError, OverflowError, TypeError)
"""What pyarrow raises for text that is not UTF-8, and for dates that Python cannot represent."""


def read_rows(
    path: str, split: str, subset: str | None = None, *, setting: str = "task.path"
) -> Generator[Row | BadRow, None, None]:
    """The rows in order, each with its location.

    Args:
        path: a file, a folder, or a hub id.
        split: of a saved folder or a hub dataset.
        subset: configuration name of a hub dataset.
        setting: the key that holds `path`, for errors.

    Raises:
        DataError: there is no such file or id, or it cannot be read in the format that its name
            promises.
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
        return _from_datasets(str(place), split, subset, setting, saved=_is_saved(place))
    if place.exists():
        raise DataError(
            f"{setting}: {place} is neither a file nor a folder; write what a pipe or device gives "
            "to a .jsonl file first"
        )
    looks_like_file = place.suffix in (*_JSON_LINES, _PARQUET)
    if looks_like_file or not hub.is_id(path):
        raise DataError(
            f"{setting}: there is no dataset at {path} (looked from {Path.cwd()})."
            f"{nearest_path(place)}"
        )
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
                try:
                    (values,) = batch.slice(index, 1).to_pylist()
                except _UNREADABLE_CELL as error:
                    yield BadRow(where, f"it cannot be read: {error}")
                else:
                    yield checked(where, values)
                number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{setting}: {path} cannot be read as parquet: {error}") from error


def _from_datasets(
    path: str, split: str, subset: str | None, setting: str, *, saved: bool
) -> Generator[Row | BadRow, None, None]:
    # Before `datasets` is imported, which reads HF_HUB_OFFLINE then.
    without_hub = None if Path(path).is_dir() else hub.unusable()
    import datasets

    try:
        if saved:
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, subset, split=split)
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


def _is_saved(folder: Path) -> bool:
    """Whether this folder was saved with `datasets`' save_to_disk."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
