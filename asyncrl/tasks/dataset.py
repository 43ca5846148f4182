"""The user's own questions: examples of a dataset, checked, and split into training and held-out.

`asyncrl.tasks.sources` reads the examples.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.encoding import Question
from asyncrl.tasks.sources import read_examples

log = logging.getLogger(__name__)

EVALUATION_SIZE = 512
"""Examples held out by default, but at most one in `_HELD_OUT_SHARE`."""

_HELD_OUT_SHARE = 10
_MESSAGE_KEYS = ("role", "content")


def dataset_questions(config: TaskConfig, seed: int) -> tuple[list[Question], list[Question]]:
    """Training and evaluation questions. The split depends on the seed and the examples only.

    Training examples whose prompt is also held out are dropped; the log says how many.

    Raises:
        DataError: the dataset is missing or empty, an example lacks a field, or the held-out
            examples leave none to train on.
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
        row: dict[str, Any] = msgspec.to_builtins(example)
    except (TypeError, msgspec.ValidationError) as error:
        raise DataError(f"{where}: the example cannot be converted to JSON: {error}") from error
    prompt = _plain_text(content, where)
    return Question(
        prefix + identity, content, {"prompt": prompt, "answer": answer, "row": row}, where
    )


def _field(example: dict[str, Any], name: str, setting: str, where: str) -> Any:
    value = example.get(name)
    if value is None:
        there = ", ".join(repr(key) for key in example) or "none"
        raise DataError(
            f"{where}: the example has no {name!r}; {setting} must name one of its fields ({there})"
        )
    return value


def _plain_text(content: Any, where: str) -> str:
    """The question without a template: the text itself, or the last user message."""
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
