"""Turns the rows of supervised fine-tuning into tokens, and says which of them are learned.

    response    [prompt ........ assistant:][the response and its end]
    assistant   [system, user .. assistant:][answer][user .. assistant:][answer]
    text        [t][he text and its end]
                 not learned                 learned

With a chat template the text is the one that the template writes, and a message is learned from
where generation would begin up to the end of its turn. Some templates write earlier turns in
another way than the last one (Qwen3 drops their thinking). From there on the conversation becomes a
separate example, so that each answer is learned after the text that precedes it in generation.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from asyncrl.errors import DataError, ModelError
from asyncrl.rollout.trajectory import (
    BoolArray,
    IntArray,
    Provenance,
    SampleId,
    Segment,
    Trajectory,
)
from asyncrl.tasks.builtin.arithmetic import Problem, arithmetic_questions, working
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.data.questions import UnusableError, column_of, plain_prompt
from asyncrl.tasks.data.sources import Row
from asyncrl.tasks.loading import dataset_questions
from asyncrl.tasks.prompts import Messages, PromptEncoder, Question
from asyncrl.tasks.sft_config import ALGORITHM, SftConfig
from asyncrl.trainer.algorithms.base import Rewards
from asyncrl.trainer.algorithms.reinforce import Reinforce
from asyncrl.trainer.base.algorithm_registry import provide

log = logging.getLogger(__name__)

_BATCH = 64
"""Rows at a time: a conversation's text takes as often its size as it has answers, and a token's
place takes 240 bytes."""

Piece = tuple[str, bool]
"""A part of an example's text, and True if it is learned."""


@dataclass(frozen=True, slots=True)
class Supervised(Reinforce):
    """-log p of every learned token. Not for `asyncrl run`: it does not look at rewards."""

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` ones."""
        return np.ones_like(rewards)


provide(ALGORITHM, Supervised)


@dataclass(frozen=True, slots=True)
class Example:
    """A text to learn from; P tokens before the first learned one, and L from there on."""

    name: str
    prompt: IntArray
    """`[P]`, at least one token."""
    tokens: IntArray
    """`[L]`, up to the last learned token."""
    learned: BoolArray
    """`[L]` True for each token that is learned."""

    @classmethod
    def of(cls, name: str, tokens: IntArray, learned: BoolArray) -> Self:
        """Split a text, both arrays `[P + L]` or longer, some token of which is learned."""
        places = np.flatnonzero(learned)
        first, end = places[0], places[-1] + 1
        parts = tokens[:first].copy(), tokens[first:end].copy(), learned[first:end].copy()
        for part in parts:
            part.setflags(write=False)
        return cls(name, *parts)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def trajectory(self, position: int, version: int) -> Trajectory:
        """Return the sample that the learner of this policy version takes for it."""
        provenance = np.where(self.learned, Provenance.SAMPLED, Provenance.OBSERVED)
        return Trajectory(
            SampleId(position, 0),
            self.name,
            self.prompt,
            self.tokens,
            np.zeros(len(self.tokens), np.float32),
            provenance.astype(np.uint8),
            (Segment(version, 0, len(self.tokens)),),
            "stop",
        )


@dataclass(frozen=True, slots=True)
class Examples:
    """The training and held-out examples."""

    train: list[Example]
    held_out: list[Example]
    digest: str = field(init=False)
    """Identifies what is learned, and in which order."""

    def __post_init__(self) -> None:
        found = hashlib.blake2b(digest_size=16)
        for one in (*self.train, None, *self.held_out):
            parts = () if one is None else (one.prompt, one.tokens, one.learned)
            for part in parts:
                found.update(len(part).to_bytes(4, "little") + part.tobytes())
        object.__setattr__(self, "digest", found.hexdigest())

    def named(self) -> Iterator[tuple[str, IntArray]]:
        """Yield the name and the tokens of each example, its prompt and the rest apart."""
        for one in (*self.train, *self.held_out):
            yield f"example {one.name}", one.prompt
            yield f"example {one.name}", one.tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(len(one) for one in (*self.train, *self.held_out))


def load_examples(
    task: TaskConfig, sft: SftConfig, tokenizer: Any, seed: int, most_tokens: int | None = None
) -> Examples:
    """Read, split and tokenise the rows; `most_tokens` is what the model reads.

    Raises DataError, naming file and line, if a row is unusable or too long, or none is left;
    ModelError if the tokenizer does not tell the place of its tokens.
    """
    if task.kind == "arithmetic":
        train, held_out = arithmetic_questions(task, seed)
    else:
        train, held_out = dataset_questions(task.model_copy(update={"answer_field": None}), seed)
    encoder = ExampleEncoder(tokenizer, task, sft, most_tokens)
    found = Examples(encoder.examples(train), encoder.examples(held_out))
    if not found.train:
        raise DataError(f"no training example is left of {len(train):,}; the log says why")
    return found


class ExampleEncoder(PromptEncoder):
    """Turns questions into examples: system prompt, chat template, tokens, length limit."""

    def __init__(
        self, tokenizer: Any, task: TaskConfig, sft: SftConfig, most_tokens: int | None = None
    ) -> None:
        """Raises DataError for the template, as of prompts; ModelError for the tokenizer."""
        super().__init__(tokenizer, task)
        self._sft = sft
        self._limit = min((n for n in (sft.max_tokens, most_tokens) if n), default=None)
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                "the model's tokenizer does not tell which characters a token is made of, so "
                "learned tokens cannot be told from others; save a fast one (tokenizer.json)"
            )
        if not tokenizer.eos_token:
            raise ModelError("the model's tokenizer has no eos_token, with which an example ends")
        self._end = str(tokenizer.eos_token)
        self._unusable: list[str] = []
        self._too_long_count = self._crossing = 0

    def examples(self, questions: Sequence[Question]) -> list[Example]:
        """Return the examples in order; what is left out is counted in the log."""
        self._unusable, self._too_long_count, self._crossing = [], 0, 0
        adds_special = self._template is None or self._sft.learn == "text"
        found: list[Example] = []
        for start in range(0, len(questions), _BATCH):
            written = list(self._written(questions[start : start + _BATCH]))
            if not written:
                continue
            texts = ["".join(text for text, _ in pieces) for _, pieces in written]
            encoded = self._tokenizer(
                texts, add_special_tokens=adds_special, return_offsets_mapping=True
            )
            for index, (question, pieces) in enumerate(written):
                offsets = np.array(encoded["offset_mapping"][index])
                one = self._example(question, pieces, encoded["input_ids"][index], offsets)
                if one is not None:
                    found.append(one)
        self._say_what_is_left_out()
        return found

    def _say_what_is_left_out(self) -> None:
        if self._too_long_count:
            text = "left out %d examples longer than %s tokens (sft.too_long: %s)"
            log.warning(text, self._too_long_count, self._limit, self._sft.too_long)
        if self._unusable:
            text = "left out %d rows (task.on_bad_row: skip), the first: %s"
            log.warning(text, len(self._unusable), self._unusable[0])
        if self._crossing:
            log.warning(
                "in %d examples a token has characters of the prompt and of the response; it is "
                "not learned. Let prompts end where a token does, before a space, say",
                self._crossing,
            )

    def _example(
        self, question: Question, pieces: Sequence[Piece], ids: list[int], offsets: IntArray
    ) -> Example | None:
        """Return the example, or None if it is left out; `offsets` `[N, 2]` are in characters."""
        tokens, limit = np.asarray(ids, np.int32), self._limit
        ends = np.cumsum([len(text) for text, _ in pieces])
        is_learned = np.array([learned for _, learned in pieces])
        starts = offsets[:, 0]
        piece = np.searchsorted(ends, starts, side="right").clip(max=len(pieces) - 1)
        learned = is_learned[piece]
        learned[0] = False  # nothing comes before it
        if any(((starts < end) & (end < offsets[:, 1])).any() for end in ends[:-1]):
            self._crossing += 1
        if limit is not None and len(tokens) > limit:
            if self._sft.too_long == "refuse":
                whose = "sft.max_tokens" if limit == self._sft.max_tokens else "the model's limit"
                raise DataError(
                    f"{question.where}: the example has {len(tokens):,} tokens, more than "
                    f"{whose} ({limit:,}); set sft.too_long to filter or truncate"
                )
            if self._sft.too_long == "filter" or not learned[:limit].any():
                self._too_long_count += 1
                return None
            tokens, learned = tokens[:limit], learned[:limit]
        if not learned.any():
            raise DataError(f"{question.where}: the text to learn is empty once tokenised")
        return Example.of(question.prompt_id, tokens, learned)

    def _written(self, questions: Sequence[Question]) -> Iterator[tuple[Question, list[Piece]]]:
        """Yield the pieces of each example's text."""
        conversations: list[tuple[Question, Messages, int]] = []
        for question in questions:
            try:
                if self._sft.learn == "text":
                    yield question, [(self._ended(self._plain_text(question)), True)]
                elif self._template is None:
                    yield question, self._without_template(question)
                else:
                    conversations.append((question, *self._conversation(question)))
            except UnusableError as error:
                if self._config.on_bad_row == "refuse":
                    raise DataError(f"{question.where}: {error}") from error
                self._unusable.append(f"{question.where}: {error}")
        if conversations:
            yield from self._turns(conversations)

    def _turns(
        self, conversations: list[tuple[Question, Messages, int]]
    ) -> Iterator[tuple[Question, list[Piece]]]:
        """Yield the pieces of conversations; the number is that of messages not to be learned."""
        turns = [
            (question, messages, place)
            for question, messages, first in conversations
            for place in range(first, len(messages))
            if messages[place]["role"] == "assistant"
        ]
        each = [question for question, _, _ in turns]
        before = self._rendered(each, (messages[:n] for _, messages, n in turns))
        whole = (messages[: n + 1] for _, messages, n in turns)
        after = self._rendered(each, whole, generation_prompt=False)
        current, pieces, text = None, list[Piece](), ""
        for (question, _, _), start, end in zip(turns, before, after, strict=True):
            if not end.startswith(start):
                raise DataError(
                    f"{question.where}: the model's chat template writes the messages before an "
                    "answer in another way once the answer is there, so a model that learns from "
                    "it would not see what it sees when it generates; give the model directory "
                    "another chat_template.jinja"
                )
            if current is not question or not start.startswith(text):
                if current is not None:
                    yield current, pieces
                current, pieces, text = question, [], ""
            pieces += [(start[len(text) :], False), (end[len(start) :], True)]
            text = end
        if current is not None:
            yield current, pieces

    def _conversation(self, question: Question) -> tuple[Messages, int]:
        """Return all messages, and how many of them are not to be learned."""
        messages = self._messages(question)
        first = 1  # an answer without anything before it cannot be generated
        if self._sft.learn == "response":
            answer, first = self._answer(question), len(messages)
            more = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            messages = [*messages, *more]
        if all(one["role"] != "assistant" for one in messages[first:]):
            raise UnusableError(
                "there is no message of the role assistant to learn; the roles are "
                f"{', '.join(one['role'] for one in messages)}"
            )
        return messages, first

    def _without_template(self, question: Question) -> list[Piece]:
        answer = None if self._sft.learn == "assistant" else self._answer(question)
        if not isinstance(answer, str) or not isinstance(question.content, str):
            raise UnusableError(
                "chat messages need a chat template; the tokenizer has none, or "
                "task.chat_template is 'never'"
            )
        return [(self._plain(question), False), (self._ended(answer), True)]

    def _plain_text(self, question: Question) -> str:
        if isinstance(question.content, str):
            return self._plain(question)
        raise UnusableError(
            "sft.learn: text takes a text, not chat messages (sft.learn: assistant)"
        )

    def _ended(self, text: str) -> str:
        return text if text.endswith(self._end) else text + self._end

    def _answer(self, question: Question) -> str | Messages:
        if self._config.kind == "arithmetic":
            example = question.example
            return working(Problem(example["a"], example["b"], 0))
        name, setting = self._sft.response_field, "sft.response_field"
        row = Row(question.where, question.example["row"])
        answer = column_of(row, name, setting)
        try:
            return plain_prompt(answer, "response")
        except UnusableError as error:
            raise UnusableError(f"its {name!r} ({setting}): {error}") from error
