"""Read the examples of a dataset: JSONL, parquet, a folder saved by `datasets`, or a hub id.

JSONL is read with the standard library, so that an error can name the line. `datasets` is imported
only where it is needed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from asyncrl.tasks.config import HUB_ID

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = ".parquet"

Located = tuple[str, dict[str, Any]]
"""Where an example stands (`file:line`), and the example."""


def read_examples(path: str, split: str, subset: str | None = None) -> Iterator[Located]:
    """The examples in order, each with its location.

    Raises:
        DataError: there is no such file or id, it cannot be read in the format that its name
            promises, or an example is not an object.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix in _JSON_LINES:
            return _json_lines(place)
        if place.suffix == _PARQUET:
            return _parquet(place)
        raise DataError(
            f"{place}: a dataset file must be .jsonl (one JSON object per line) or .parquet"
        )
    if place.is_dir():
        return _from_datasets(str(place), split, subset, saved=_is_saved(place))
    looks_like_file = place.suffix in (*_JSON_LINES, _PARQUET)
    if looks_like_file or not HUB_ID.fullmatch(path):
        raise DataError(f"there is no dataset at {path} (looked from {Path.cwd()}).{_near(place)}")
    return _from_datasets(path, split, subset, saved=False)


def _json_lines(path: Path) -> Iterator[Located]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        example = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}; each line must be one JSON object") from error
    if not isinstance(example, dict):
        raise DataError(
            f"{where}: each line must be one JSON object, this one is a {type(example).__name__}"
        )
    return example


def _parquet(path: Path) -> Iterator[Located]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for example in batch.to_pylist():
                yield f"{path}, example {number}", example
                number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _from_datasets(path: str, split: str, subset: str | None, *, saved: bool) -> Iterator[Located]:
    import datasets

    try:
        if saved:
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise DataError(
            f"the dataset {path!r} (split {split!r}, subset {subset!r}) cannot be loaded: {reason}"
        ) from error
    for number, example in enumerate(loaded):
        yield f"{path}[{split}], example {number}", example


def _is_saved(folder: Path) -> bool:
    """Whether this folder was saved with `datasets`' save_to_disk."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f" Did you mean {path.parent / close[0]}?" if close else ""
