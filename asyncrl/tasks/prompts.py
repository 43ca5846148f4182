"""The interface of tasks: prompts, their order of visits, and how questions become prompts.

Example:
    >>> [prompt_order(4, seed=0, position=p) for p in range(8)]  # each epoch has its own order
    [2, 0, 1, 3, 3, 0, 2, 1]
"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import DataError, RenderingError
from asyncrl.rollout.trajectory import IntArray
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.templates.chat_template import ChatTemplate
from asyncrl.tasks.templates.variables import template_variables
from asyncrl.wire.records.evaluations import HELD_OUT


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready for an engine."""

    prompt_id: str
    """Unique among the task's prompts; the same in every epoch and after a resume."""
    tokens: IntArray
    """`[P]` token ids, chat template included; read-only."""
    text: str
    """The text that was tokenised: the question with system prompt and chat template."""
    example: dict[str, Any]
    """The rewards' input, JSON-able: `prompt` (the plain question), `answer`, and for a dataset
    `row`, the user's example. `asyncrl.rewards.values` makes a function's arguments from it."""


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, and what is needed to sample responses to them and score these."""

    train: Sequence[Prompt]
    """Training prompts, at least one."""
    evaluation: Sequence[Prompt]
    """Held-out prompts, disjoint from `train`; may be empty."""
    stop_tokens: tuple[int, ...]
    """Ids that end a response."""
    tokenizer: Any
    """The model's HF tokenizer."""
    left_out: int = 0
    """Number of prompts left out as too long."""
    evaluation_sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Prompts of `evaluation.sets`, by name. They may overlap with `train`, with a warning."""


def held_out_sets(task: Task) -> dict[str, Sequence[Prompt]]:
    """Return all held-out prompts by the name of their set, the task's own first."""
    own = {HELD_OUT: task.evaluation} if task.evaluation else {}
    return {**own, **task.evaluation_sets}


def prompt_order(n: int, seed: int, position: int) -> int:
    """Return the index of the prompt that the `position`-th group of a run visits.

    Every epoch of n positions visits each prompt once. The order depends only on the seed and the
    epoch, so a resumed run continues where it stopped. Recent epochs are cached. Raises ValueError
    if n < 1 or position < 0.
    """
    if n < 1 or position < 0:
        raise ValueError(f"no prompt at position {position} of {n} prompts")
    epoch, place = divmod(position, n)
    return int(_epoch_order(n, seed, epoch)[place])


@functools.lru_cache(maxsize=4)
def _epoch_order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # numpy's SeedSequence refuses negative seeds, which a user may choose.
    entropy = (seed % 2**64, epoch)
    return np.random.default_rng(entropy).permutation(n)


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
        return self._rendered(questions, map(self._messages, questions))

    def _rendered(
        self,
        questions: Sequence[Question],
        conversations: Iterable[Messages],
        *,
        generation_prompt: bool = True,
    ) -> list[str]:
        """Return each conversation's text; `questions` `[N]` are where errors point."""
        assert self._template is not None  # noqa: S101 - only called with one
        texts: list[str] = []
        try:
            for text in self._template.texts(conversations, generation_prompt=generation_prompt):
                texts.append(text)  # noqa: PERF402 - how many there are says which one failed
        except RenderingError as error:
            where = questions[len(texts)].where
            raise DataError(f"{where}: the chat template refused the messages: {error}") from error
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

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def _is_huge(self, question: Question, text: str) -> bool:
        """Return True for a text to leave out by its length: tokenising it could take a minute."""
        if len(text) < _HUGE:
            return False
        least = len(text) // (_SLACK * self._longest_token)
        if self._config.max_prompt_tokens is None and least > (self._room or least):
            raise DataError(
                f"{question.where}: the prompt has {len(text):,} characters, and the engine has "
                f"room for {self._room:,} tokens (engine.max_model_len less sampling.max_tokens). "
                "Shorten it, or leave long ones out: task.max_prompt_tokens, task.too_long: filter"
            )
        return self._too_long(question, least, "at least ")

    def _too_long(self, question: Question, length: int, about: str = "") -> bool:
        limit = self._config.max_prompt_tokens
        if limit is None or length <= limit:
            return False
        if self._config.too_long == "refuse":
            raise DataError(
                f"{question.where}: the prompt has {about}{length} tokens, more than "
                f"task.max_prompt_tokens ({limit}); raise it, or set task.too_long: filter"
            )
        return True
