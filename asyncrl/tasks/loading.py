"""Load the task that the configuration describes, tokenised with the model's own tokenizer."""

from __future__ import annotations

from asyncrl.errors import DataError
from asyncrl.tasks.arithmetic import arithmetic_questions
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.dataset import dataset_questions
from asyncrl.tasks.encoding import PromptEncoder
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.model_tokenizer import load_tokenizer, model_stop_tokens
from asyncrl.tasks.prompts import LoadedTask, Prompt, Task, prompt_order

__all__ = ["LoadedTask", "Prompt", "Task", "load_task", "prompt_order", "resolve_model"]


def load_task(config: TaskConfig, model_path: str, seed: int) -> LoadedTask:
    """Read, split and tokenise the examples. `model_path` is what `resolve_model` returned.

    Raises:
        DataError: an example cannot be used; the message names file and line.
        ModelError: the model has no tokenizer or no end-of-sequence token.
    """
    source = arithmetic_questions if config.kind == "arithmetic" else dataset_questions
    train_questions, evaluation_questions = source(config, seed)
    tokenizer = load_tokenizer(model_path)
    encoder = PromptEncoder(tokenizer, config)
    train, left_out = encoder.encode(train_questions)
    evaluation, left_out_of_evaluation = encoder.encode(evaluation_questions)
    if not train:
        raise DataError(
            f"all {left_out} training prompts are longer than task.max_prompt_tokens "
            f"({config.max_prompt_tokens}); raise it"
        )
    return LoadedTask(
        train=train,
        evaluation=evaluation,
        stop_tokens=model_stop_tokens(model_path, tokenizer),
        tokenizer=tokenizer,
        left_out=left_out + left_out_of_evaluation,
    )
