"""Load the task that the configuration describes, tokenised with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.errors import DataError
from asyncrl.tasks.arithmetic import arithmetic_questions
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.dataset import dataset_questions
from asyncrl.tasks.encoding import PromptEncoder
from asyncrl.tasks.evaluation_config import EvaluationSetConfig
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.model_tokenizer import load_tokenizer, model_stop_tokens
from asyncrl.tasks.prompts import LoadedTask, Prompt, Task, prompt_order
from asyncrl.tasks.questions import read_questions

__all__ = ["LoadedTask", "Prompt", "Task", "load_task", "prompt_order", "resolve_model"]


def load_task(
    config: TaskConfig,
    model_path: str,
    seed: int,
    sets: Mapping[str, EvaluationSetConfig] | None = None,
    *,
    whole_rows: bool = False,
) -> LoadedTask:
    """Read, split and tokenise the examples.

    Args:
        config: of the task.
        model_path: what `resolve_model` returned.
        seed: of the run.
        sets: further held-out sets, by name (`evaluation.sets`).
        whole_rows: see `dataset_questions`.

    Raises:
        DataError: an example cannot be used; the message names file and line.
        ModelError: the model has no tokenizer or no end-of-sequence token.
    """
    if config.kind == "arithmetic":
        train_questions, evaluation_questions = arithmetic_questions(config, seed)
    else:
        train_questions, evaluation_questions = dataset_questions(
            config, seed, whole_rows=whole_rows
        )
    tokenizer = load_tokenizer(model_path)
    encoder = PromptEncoder(tokenizer, config)
    train, left_out = encoder.encode(train_questions)
    evaluation, left_out_of_evaluation = encoder.encode(evaluation_questions)
    if not train:
        raise DataError(
            f"all {left_out} training prompts are longer than task.max_prompt_tokens "
            f"({config.max_prompt_tokens}); raise it"
        )
    named: dict[str, list[Prompt]] = {}
    for name, chosen in (sets or {}).items():
        named[name], more = _read_set(name, chosen, config, encoder)
        left_out_of_evaluation += more
    return LoadedTask(
        train=train,
        evaluation=evaluation,
        stop_tokens=model_stop_tokens(model_path, tokenizer),
        tokenizer=tokenizer,
        left_out=left_out + left_out_of_evaluation,
        evaluation_sets=named,
    )


def _read_set(
    name: str, chosen: EvaluationSetConfig, task: TaskConfig, encoder: PromptEncoder
) -> tuple[list[Prompt], int]:
    """The prompts of a named held-out set, and how many were too long."""
    own = chosen.model_dump(exclude={"prompts", "samples"}, exclude_none=True)
    cleared = {"kind": "dataset", "subset": None, "id_field": None, "map": None}
    settings = task.model_copy(update=cleared | own)
    questions = read_questions(
        settings,
        chosen.path,
        chosen.split,
        setting=f"evaluation.sets.{name}.path",
        prefix=f"{name}/",
    )
    prompts, left_out = encoder.encode(questions)
    if not prompts:
        raise DataError(
            f"evaluation.sets.{name}: all {left_out} prompts are longer than "
            f"task.max_prompt_tokens ({task.max_prompt_tokens}); raise it, or leave the set out"
        )
    return prompts, left_out
