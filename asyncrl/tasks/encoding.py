"""Turns questions into tokens with the model's tokenizer and chat template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.errors import DataError, RenderingError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.prompts import Prompt
from asyncrl.tasks.templates.chat_template import ChatTemplate
from asyncrl.tasks.templates.variables import template_variables

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
_HUGE = 1 << 17
"""Characters of a text that is judged before it is tokenised."""
_SLACK = 16
"""Characters per token of such a text, at most, as a multiple of the longest token's."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt before tokenisation."""

    prompt_id: str
    content: str | Messages
    """The text or chat messages, before system prompt and chat template."""
    example: dict[str, Any]
    where: str


class PromptEncoder:
    """Turns questions into prompts: system prompt, chat template, tokens, length limit."""

    def __init__(self, tokenizer: Any, config: TaskConfig, room: int | None = None) -> None:
        """`room` is the engine's limit in tokens, if known.

        Raises DataError if a configured chat template or variable does not exist.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._room = room
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat_template == "always" and not has_template:
            raise DataError(
                "task.chat_template is 'always', but the model's tokenizer has no chat template; "
                "use 'auto' or 'never', or add chat_template.jinja to the model directory"
            )
        used = config.chat_template != "never"
        variables = template_variables(tokenizer, config) if used else {}
        self._template = ChatTemplate(tokenizer, variables) if used and has_template else None

    def encode(self, questions: Sequence[Question]) -> tuple[list[Prompt], int]:
        """Return prompts in order, and the number of questions left out as too long.

        Raises DataError if a prompt is empty, chat messages meet a tokenizer without a template,
        the template fails for a prompt or exceeds its limits, or a prompt is longer than
        `max_prompt_tokens` with `too_long: refuse`.
        """
        all_texts = zip(questions, self._texts(questions), strict=True)
        kept = [(one, text) for one, text in all_texts if not self._is_huge(one, text)]
        prompts, left_out = [], len(questions) - len(kept)
        texts, ids = [text for _, text in kept], []
        if texts:
            # A chat template contains the special tokens; without one, the tokenizer adds its own.
            ids = self._tokenizer(texts, add_special_tokens=self._template is None)["input_ids"]
        for (question, text), tokens in zip(kept, ids, strict=True):
            if not tokens:
                raise DataError(f"{question.where}: the prompt is empty once tokenised")
            if self._too_long(question, len(tokens)):
                left_out += 1
                continue
            array = np.asarray(tokens, np.int32)
            array.setflags(write=False)
            prompts.append(Prompt(question.prompt_id, array, text, question.example))
        if left_out:
            text = "left out %d of %d prompts longer than %s tokens (task.too_long: filter)"
            log.warning(text, left_out, len(questions), self._config.max_prompt_tokens)
        return prompts, left_out

    def _texts(self, questions: Sequence[Question]) -> list[str]:
        if self._template is None:
            return [self._plain(question) for question in questions]
        texts: list[str] = []
        try:
            for text in self._template.texts(map(self._messages, questions)):
                texts.append(text)  # noqa: PERF402 - how many there are says which one failed
        except RenderingError as error:
            raise DataError(
                f"{questions[len(texts)].where}: the model's chat template refused the messages: "
                f"{error}"
            ) from error
        return texts

    def _plain(self, question: Question) -> str:
        system, content = self._config.system_prompt, question.content
        if not isinstance(content, str):
            raise DataError(
                f"{question.where}: the prompt is a list of chat messages, which needs a chat "
                "template; the tokenizer has none, or task.chat_template is 'never'"
            )
        return content if system is None else f"{system}\n\n{content}"

    def _messages(self, question: Question) -> Messages:
        system, content = self._config.system_prompt, question.content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return messages if system is None else [{"role": "system", "content": system}, *messages]

    def _is_huge(self, question: Question, text: str) -> bool:
        """Return True for a text to leave out that is too long by its number of characters.

        To tokenise it could take a minute.
        """
        if len(text) < _HUGE:
            return False
        least = len(text) // (_SLACK * max(map(len, self._tokenizer.get_vocab())))
        if self._config.max_prompt_tokens is None and least > (self._room or least):
            raise DataError(
                f"{question.where}: the prompt has {len(text):,} characters, and the engine has "
                f"room for {self._room:,} tokens (engine.max_model_len less sampling.max_tokens). "
                "Shorten it, or leave out long prompts with task.max_prompt_tokens and "
                "task.too_long: filter"
            )
        return self._too_long(question, least, "at least ")

    def _too_long(self, question: Question, length: int, about: str = "") -> bool:
        limit = self._config.max_prompt_tokens
        if limit is None or length <= limit:
            return False
        if self._config.too_long == "refuse":
            raise DataError(
                f"{question.where}: the prompt has {about}{length} tokens, more than "
                f"task.max_prompt_tokens ({limit}); raise the limit, or leave such prompts out "
                "with task.too_long: filter"
            )
        return True
