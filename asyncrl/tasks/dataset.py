"""The user's own questions: JSONL, parquet, a folder saved by `datasets`, or a hub id.

JSONL is read with the standard library, so that an error can name the line; `datasets` is only
imported for what needs it.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.encoding import Question

log = logging.getLogger(__name__)

EVALUATION_SIZE = 512
"""Examples held out by default, but at most one in `_HELD_OUT_SHARE`."""

_HELD_OUT_SHARE = 10
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

Located = tuple[str, dict[str, Any]]
"""An example and where it stands (`file:line`)."""


def dataset_questions(config: TaskConfig, seed: int) -> tuple[list[Question], list[Question]]:
    """Training and evaluation questions; the split depends on the seed and the examples only.

    Training examples whose prompt is also held out are dropped and counted in the log.

    Raises:
        DataError: nothing there, an example without a field, or more held out than there is.
    """
    assert config.path is not None  # noqa: S101 - TaskConfig refuses kind: dataset without a path
    questions = _questions(config, config.path, config.split)
    order = np.random.default_rng(seed % 2**64).permutation(len(questions))
    shuffled = [questions[i] for i in order]
    if config.evaluation_path is not None:
        evaluation = _questions(config, config.evaluation_path, config.evaluation_split, "eval-")
        evaluation = evaluation[: config.evaluation_size]
        train = shuffled
    else:
        size = _held_out_size(config, len(questions))
        evaluation, train = shuffled[:size], shuffled[size:]
    train = _without(train, evaluation)
    if not train:
        raise DataError(
            f"{config.path}: no example is left to train on: {len(evaluation)} are held out, and "
            "those equal to them are dropped; lower task.evaluation_size, or give other examples"
        )
    return train[: config.train_size], evaluation


def read_examples(path: str, split: str, subset: str | None = None) -> Iterator[Located]:
    """Examples in order with their places.

    Raises:
        DataError: no such file or id, not readable as what its name says, or an example that is no
            object.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix in _JSON_LINES:
            return _json_lines(place)
        if place.suffix == ".parquet":
            return _parquet(place)
        raise DataError(
            f"{place}: a dataset file must be .jsonl (one JSON object per line) or .parquet"
        )
    if place.is_dir():
        return _from_datasets(str(place), split, subset, saved=_is_saved(place))
    looks_like_file = place.suffix in (*_JSON_LINES, ".parquet")
    if looks_like_file or not _HUB_ID.fullmatch(path):
        raise DataError(f"there is no dataset at {path} (looked from {Path.cwd()}).{_near(place)}")
    return _from_datasets(path, split, subset, saved=False)


def _questions(config: TaskConfig, path: str, split: str, prefix: str = "") -> list[Question]:
    examples = read_examples(path, split, config.subset)
    questions = [
        _question(config, index, where, example, prefix)
        for index, (where, example) in enumerate(examples)
    ]
    if not questions:
        raise DataError(f"{path}: there are no examples")
    seen: dict[str, str] = {}
    for question in questions:
        before = seen.setdefault(question.prompt_id, question.where)
        if before != question.where:
            raise DataError(
                f"{question.where}: task.id_field {config.id_field!r} must be unique, but "
                f"{question.prompt_id!r} is also at {before}"
            )
    return questions


def _question(
    config: TaskConfig, index: int, where: str, example: dict[str, Any], prefix: str
) -> Question:
    content = _field(example, config.prompt_field, "task.prompt_field", where)
    answer = None
    if config.answer_field is not None:
        answer = _field(example, config.answer_field, "task.answer_field", where)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
    identity = str(index)
    if config.id_field is not None:
        identity = str(_field(example, config.id_field, "task.id_field", where))
    try:
        plain: dict[str, Any] = msgspec.to_builtins(example)
    except (TypeError, msgspec.ValidationError) as error:
        raise DataError(f"{where}: the example cannot be written as JSON: {error}") from error
    plain |= {"prompt": _plain_text(content, where), "answer": answer}
    return Question(prefix + identity, content, plain, where)


def _field(example: dict[str, Any], name: str, setting: str, where: str) -> Any:
    value = example.get(name)
    if value is None:
        there = ", ".join(repr(key) for key in example) or "none"
        raise DataError(
            f"{where}: the example has no {name!r}; {setting} must name one of its fields ({there})"
        )
    return value


def _plain_text(content: Any, where: str) -> str:
    """The question itself: the text, or the last user message's."""
    if isinstance(content, str):
        if not content.strip():
            raise DataError(f"{where}: the prompt is empty")
        return content
    if not isinstance(content, list) or not content or not all(map(_is_message, content)):
        raise DataError(
            f"{where}: the prompt must be a text or a list of chat messages with role and content, "
            f"got {type(content).__name__}"
        )
    asked = [message["content"] for message in content if message["role"] == "user"]
    return str(asked[-1] if asked else content[-1]["content"])


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in _MESSAGE_KEYS)


_MESSAGE_KEYS = ("role", "content")


def _held_out_size(config: TaskConfig, examples: int) -> int:
    if config.evaluation_size is None:
        return min(EVALUATION_SIZE, examples // _HELD_OUT_SHARE)
    if config.evaluation_size >= examples:
        raise DataError(
            f"{config.path} has {examples} examples; task.evaluation_size "
            f"({config.evaluation_size}) would leave none to train on; lower it, or give "
            "task.evaluation_path"
        )
    return config.evaluation_size


def _without(train: Sequence[Question], held_out: Sequence[Question]) -> list[Question]:
    contents = {_key(question) for question in held_out}
    kept = [question for question in train if _key(question) not in contents]
    if len(kept) < len(train):
        log.warning("dropped %d training examples that are also held out", len(train) - len(kept))
    return kept


def _key(question: Question) -> str:
    content = question.content
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


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
    """Whether `datasets` wrote this folder with save_to_disk."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f" Did you mean {path.parent / close[0]}?" if close else ""
