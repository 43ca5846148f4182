"""The user's own questions: examples of a dataset, checked, and split into training and held-out.

`asyncrl.tasks.questions` makes them of the dataset's rows, which `asyncrl.tasks.sources` reads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import numpy as np

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.encoding import Question
from asyncrl.tasks.questions import read_questions

log = logging.getLogger(__name__)

EVALUATION_SIZE = 512
"""Examples held out by default, but at most one in `_HELD_OUT_SHARE`."""

_HELD_OUT_SHARE = 10


def dataset_questions(
    config: TaskConfig, seed: int, *, whole_rows: bool = False
) -> tuple[list[Question], list[Question]]:
    """Training and evaluation questions. The split depends on the seed and the examples only.

    Training examples whose prompt is also held out are dropped; the log says how many.

    Args:
        config: of the task.
        seed: of the run.
        whole_rows: examples are the same only if their whole rows are: an environment makes
            different samples of rows whose prompts are equal.

    Raises:
        DataError: the dataset is missing or empty, an example lacks a field, or the held-out
            examples leave none to train on.
    """
    assert config.path is not None  # noqa: S101 - TaskConfig refuses kind: dataset without a path
    questions = read_questions(config, config.path, config.split, setting="task.path")
    order = np.random.default_rng(seed % 2**64).permutation(len(questions))
    shuffled = [questions[i] for i in order]
    if config.evaluation_path is not None:
        evaluation = read_questions(
            config,
            config.evaluation_path,
            config.evaluation_split,
            setting="task.evaluation_path",
            prefix="eval-",
        )
        _refuse_shared_ids(questions, evaluation)
        evaluation = evaluation[: config.evaluation_size]
        train = shuffled
    else:
        size = _held_out_size(config, len(questions))
        evaluation, train = shuffled[:size], shuffled[size:]
    train = _without(train, evaluation, whole_rows=whole_rows)
    if not train:
        raise DataError(
            f"task.path: {config.path}: no example is left to train on: {len(evaluation)} are held "
            "out, and those equal to them are dropped; lower task.evaluation_size, or give other "
            "examples"
        )
    return train[: config.train_size], evaluation


def _refuse_shared_ids(train: Sequence[Question], evaluation: Sequence[Question]) -> None:
    """An id that a user gave in both files would name two prompts."""
    places = {question.prompt_id: question.where for question in evaluation}
    for question in train:
        if question.prompt_id in places:
            raise DataError(
                f"{question.where}: the id {question.prompt_id!r} (task.id_field) is also that of "
                f"the held-out example at {places[question.prompt_id]}; ids must be unique"
            )


def _held_out_size(config: TaskConfig, examples: int) -> int:
    if config.evaluation_size is None:
        return min(EVALUATION_SIZE, examples // _HELD_OUT_SHARE)
    if config.evaluation_size >= examples:
        raise DataError(
            f"task.path: {config.path} has {examples} examples; task.evaluation_size "
            f"({config.evaluation_size}) would leave none to train on; lower it, or give "
            "task.evaluation_path"
        )
    return config.evaluation_size


def _without(
    train: Sequence[Question], held_out: Sequence[Question], *, whole_rows: bool
) -> list[Question]:
    contents = {_key(question, whole_rows=whole_rows) for question in held_out}
    kept = [question for question in train if _key(question, whole_rows=whole_rows) not in contents]
    if len(kept) < len(train):
        log.warning("dropped %d training examples that are also held out", len(train) - len(kept))
    return kept


def _key(question: Question, *, whole_rows: bool) -> str:
    content = question.content
    if whole_rows:
        return json.dumps([content, question.example["row"]], sort_keys=True, default=str)
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
