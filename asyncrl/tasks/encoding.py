"""Turn questions into tokens with the model's tokenizer and chat template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.prompts import Prompt
from asyncrl.tasks.template_variables import template_variables

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
"""Chat messages with `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt before it is tokenised."""

    prompt_id: str
    content: str | Messages
    """The text, or the chat messages, before system prompt and chat template."""
    example: dict[str, Any]
    """Handed to the rewards: see `Prompt.example`."""
    where: str
    """File and line, for errors."""


class PromptEncoder:
    """Turns questions into prompts: system prompt, chat template, tokens, length limit."""

    def __init__(self, tokenizer: Any, config: TaskConfig) -> None:
        """Raises DataError: there is no chat template, or not the variables, that are set."""
        self._tokenizer = tokenizer
        self._config = config
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat_template == "always" and not has_template:
            raise DataError(
                "task.chat_template is 'always', but the model's tokenizer has no chat template; "
                "use 'auto' or 'never', or add chat_template.jinja to the model directory"
            )
        self._template = has_template and config.chat_template != "never"
        used = config.chat_template != "never"
        self._variables = template_variables(tokenizer, config) if used else {}

    def encode(self, questions: Sequence[Question]) -> tuple[list[Prompt], int]:
        """Prompts in order, and the number of questions that were left out as too long.

        Raises:
            DataError: a prompt is empty, chat messages meet a tokenizer without a template, or a
                prompt is longer than `max_prompt_tokens` with `too_long: refuse`.
        """
        if not questions:
            return [], 0
        texts = [self._render(question) for question in questions]
        # A chat template contains the special tokens; without one, the tokenizer adds its own.
        ids = self._tokenizer(texts, add_special_tokens=not self._template)["input_ids"]
        prompts, left_out = [], 0
        for question, text, tokens in zip(questions, texts, ids, strict=True):
            if not tokens:
                raise DataError(f"{question.where}: the prompt is empty once tokenised")
            if self._too_long(question, len(tokens)):
                left_out += 1
                continue
            array = np.asarray(tokens, np.int32)
            array.setflags(write=False)
            prompts.append(Prompt(question.prompt_id, array, text, question.example))
        if left_out:
            log.warning(
                "left out %d of %d prompts longer than %s tokens (task.too_long: filter)",
                left_out,
                len(questions),
                self._config.max_prompt_tokens,
            )
        return prompts, left_out

    def _render(self, question: Question) -> str:
        system = self._config.system_prompt
        content = question.content
        if not self._template:
            if not isinstance(content, str):
                raise DataError(
                    f"{question.where}: the prompt is a list of chat messages, which needs a chat "
                    "template; the tokenizer has none, or task.chat_template is 'never'"
                )
            return content if system is None else f"{system}\n\n{content}"
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._variables
            )
        except TemplateError as error:
            raise DataError(
                f"{question.where}: the model's chat template refused the messages: {error}"
            ) from error
        return str(text)

    def _too_long(self, question: Question, length: int) -> bool:
        limit = self._config.max_prompt_tokens
        if limit is None or length <= limit:
            return False
        if self._config.too_long == "refuse":
            raise DataError(
                f"{question.where}: the prompt has {length} tokens, more than "
                f"task.max_prompt_tokens ({limit}); raise the limit, or leave such prompts out "
                "with task.too_long: filter"
            )
        return True
