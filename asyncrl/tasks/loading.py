"""Loads the configured task, tokenised with the model's own tokenizer.

The user's questions, which `tasks.data.questions` makes from a dataset's rows, are checked and
split into training and held-out.
"""

import json
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.errors import DataError
from asyncrl.tasks.builtin.arithmetic import arithmetic_questions
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.data.questions import read_questions
from asyncrl.tasks.evaluation_config import EvaluationSetConfig
from asyncrl.tasks.model_tokenizer import load_tokenizer, model_stop_tokens
from asyncrl.tasks.prompts import Prompt, PromptEncoder, Question, Task

log = logging.getLogger(__name__)

EVALUATION_SIZE = 512
"""Examples held out by default, but at most one in `_HELD_OUT_SHARE`."""

_HELD_OUT_SHARE = 10


def dataset_questions(
    config: TaskConfig, seed: int, *, whole_rows: bool = False
) -> tuple[list[Question], list[Question]]:
    """Return training and evaluation questions, split by the seed and the examples only.

    Training examples whose prompt is also held out are dropped and counted in the log. With
    `whole_rows`, examples are equal only if their whole rows are, since an environment makes
    different samples from rows with equal prompts. Raises DataError if the dataset is missing or
    empty, an example lacks a field, or the held-out examples leave none to train on.
    """
    assert config.path is not None  # noqa: S101 - TaskConfig refuses kind: dataset without a path
    questions = read_questions(config, config.path, config.split, setting="task.path")
    order = np.random.default_rng(seed % 2**64).permutation(len(questions))
    shuffled = [questions[i] for i in order]
    if config.evaluation_path is not None:
        path, split = config.evaluation_path, config.evaluation_split
        setting = "task.evaluation_path"
        evaluation = read_questions(config, path, split, setting=setting, prefix="eval-")
        _refuse_shared_ids(questions, evaluation)
        evaluation = evaluation[: config.evaluation_size]
        train = shuffled
    else:
        size = _held_out_size(config, len(questions))
        evaluation, train = shuffled[:size], shuffled[size:]
    train = _without(train, evaluation, whole_rows=whole_rows)
    if not train:
        raise DataError(
            f"task.path: {config.path}: no examples are left to train on: {len(evaluation)} are "
            "held out, and equal ones are dropped; lower task.evaluation_size, or add examples"
        )
    return train[: config.train_size], evaluation


def _refuse_shared_ids(train: Sequence[Question], evaluation: Sequence[Question]) -> None:
    """Refuse ids that occur in both of the user's files, since they would name two prompts."""
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


def load_task(
    config: TaskConfig,
    model_path: str,
    seed: int,
    sets: Mapping[str, EvaluationSetConfig] | None = None,
    *,
    whole_rows: bool = False,
    room: int | None = None,
) -> Task:
    """Read, split and tokenise the examples.

    `model_path` is the result of `resolve_model`, `sets` are the further held-out sets of
    `evaluation.sets`, `whole_rows` is as in `dataset_questions`, and `room` is the engine's limit
    of a prompt in tokens. Raises DataError, naming file and line, if an example is unusable, and
    ModelError if the model lacks a tokenizer or an end-of-sequence token.
    """
    if config.kind == "arithmetic":
        questions = arithmetic_questions(config, seed)
    else:
        questions = dataset_questions(config, seed, whole_rows=whole_rows)
    tokenizer = load_tokenizer(model_path)
    encoder = PromptEncoder(tokenizer, config, room)
    train, left_out = encoder.encode(questions[0])
    evaluation, left_out_of_evaluation = encoder.encode(questions[1])
    if not train:
        raise DataError(
            f"all {left_out} training prompts are longer than task.max_prompt_tokens "
            f"({config.max_prompt_tokens}); raise it"
        )
    named: dict[str, list[Prompt]] = {}
    for name, chosen in (sets or {}).items():
        named[name], more = _read_set(name, chosen, config, encoder)
        left_out_of_evaluation += more
    stop_tokens = model_stop_tokens(model_path, tokenizer)
    left_out += left_out_of_evaluation
    return Task(train, evaluation, stop_tokens, tokenizer, left_out, named)


def _read_set(
    name: str, chosen: EvaluationSetConfig, task: TaskConfig, encoder: PromptEncoder
) -> tuple[list[Prompt], int]:
    own = chosen.model_dump(exclude={"prompts", "samples"}, exclude_none=True)
    cleared = {"kind": "dataset", "subset": None, "id_field": None, "map": None}
    settings = task.model_copy(update=cleared | own)
    setting, prefix = f"evaluation.sets.{name}.path", f"{name}/"
    questions = read_questions(settings, chosen.path, chosen.split, setting=setting, prefix=prefix)
    prompts, left_out = encoder.encode(questions)
    if not prompts:
        raise DataError(
            f"evaluation.sets.{name}: all {left_out} prompts are longer than "
            f"task.max_prompt_tokens ({task.max_prompt_tokens}); raise it, or leave the set out"
        )
    return prompts, left_out
