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

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.errors import DataError, ModelError, RenderingError
from asyncrl.rollout.trajectory import (
    BoolArray,
    IntArray,
    Provenance,
    SampleId,
    Segment,
    Trajectory,
)
from asyncrl.suggestions import shortened
from asyncrl.tasks.builtin.arithmetic import Problem, arithmetic_questions, working
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import dataset_questions
from asyncrl.tasks.model_tokenizer import load_tokenizer
from asyncrl.tasks.prompts import Messages, PromptEncoder, Question
from asyncrl.tasks.sft_config import SftConfig

log = logging.getLogger(__name__)

_BATCH = 1024
"""Texts that are tokenised at a time: their offsets take much more memory than their tokens."""

Piece = tuple[str, bool]
"""A part of an example's text, and True if it is learned."""


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

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(len(one) for one in (*self.train, *self.held_out))


def load_examples(task: TaskConfig, sft: SftConfig, model_path: str, seed: int) -> Examples:
    """Read, split and tokenise the rows.

    Raises DataError, naming file and line, if a row is unusable or too long, or none is left;
    ModelError if the model lacks a tokenizer that tells the place of its tokens.
    """
    if task.kind == "arithmetic":
        train, held_out = arithmetic_questions(task, seed)
    else:
        train, held_out = dataset_questions(task.model_copy(update={"answer_field": None}), seed)
    encoder = ExampleEncoder(load_tokenizer(model_path), task, sft)
    found = Examples(encoder.examples(train), encoder.examples(held_out))
    if not found.train:
        raise DataError(
            "no training example is left: all are longer than sft.max_tokens "
            f"({sft.max_tokens}); raise it"
        )
    return found


class ExampleEncoder(PromptEncoder):
    """Turns questions into examples: system prompt, chat template, tokens, length limit."""

    def __init__(self, tokenizer: Any, task: TaskConfig, sft: SftConfig) -> None:
        """Raises DataError for the template, as of prompts; ModelError for the tokenizer."""
        super().__init__(tokenizer, task)
        self._sft = sft
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                "the model's tokenizer does not tell which characters a token is made of, so "
                "learned tokens cannot be told from others; save a fast one (tokenizer.json)"
            )
        if not tokenizer.eos_token:
            raise ModelError("the model's tokenizer has no eos_token, with which an example ends")

    def examples(self, questions: Sequence[Question]) -> list[Example]:
        """Return the examples in order; those left out as too long are counted in the log."""
        written = list(self._written(questions))
        found: list[Example] = []
        left_out = 0
        for start in range(0, len(written), _BATCH):
            some = written[start : start + _BATCH]
            texts = ["".join(text for text, _ in pieces) for _, pieces in some]
            encoded = self._tokenizer(
                texts, add_special_tokens=self._template is None, return_offsets_mapping=True
            )
            for index, (question, pieces) in enumerate(some):
                offsets = np.array(encoded["offset_mapping"][index])[:, 0]
                one = self._example(question, pieces, encoded["input_ids"][index], offsets)
                if one is None:
                    left_out += 1
                else:
                    found.append(one)
        if left_out:
            text = "left out %d of %d examples longer than %s tokens (sft.too_long: %s)"
            log.warning(text, left_out, len(written), self._sft.max_tokens, self._sft.too_long)
        return found

    def _example(
        self, question: Question, pieces: Sequence[Piece], ids: list[int], starts: IntArray
    ) -> Example | None:
        """Return the example, or None if it is left out; `starts` are the tokens' first chars."""
        tokens, limit = np.asarray(ids, np.int32), self._sft.max_tokens
        ends = np.cumsum([len(text) for text, _ in pieces])
        is_learned = np.array([learned for _, learned in pieces])
        piece = np.searchsorted(ends, starts, side="right").clip(max=len(pieces) - 1)
        learned = is_learned[piece]
        learned[0] = False  # nothing comes before it
        if limit is not None and len(tokens) > limit:
            if self._sft.too_long == "refuse":
                raise DataError(
                    f"{question.where}: the example has {len(tokens):,} tokens, more than "
                    f"sft.max_tokens ({limit:,}); raise the limit, or set sft.too_long to filter "
                    "or truncate"
                )
            if self._sft.too_long == "filter" or not learned[:limit].any():
                return None
            tokens, learned = tokens[:limit], learned[:limit]
        places = np.flatnonzero(learned)
        if not len(places):
            raise DataError(f"{question.where}: the text to learn is empty once tokenised")
        first, end = places[0], places[-1] + 1
        parts = tokens[:first].copy(), tokens[first:end].copy(), learned[first:end].copy()
        for part in parts:
            part.setflags(write=False)
        return Example(question.prompt_id, *parts)

    def _written(self, questions: Sequence[Question]) -> Iterator[tuple[Question, list[Piece]]]:
        """Yield the pieces of each example's text."""
        end = str(self._tokenizer.eos_token)
        if self._sft.learn == "text":
            for question in questions:
                yield question, [(self._plain(question) + end, True)]
            return
        if self._template is None:
            for question in questions:
                prompt, answer = self._plain(question), self._answer(question)
                if self._sft.learn == "assistant" or not isinstance(answer, str):
                    raise DataError(
                        f"{question.where}: chat messages need a chat template; the tokenizer has "
                        "none, or task.chat_template is 'never'"
                    )
                yield question, [(prompt, False), (answer + end, True)]
            return
        yield from self._turns([self._conversation(question) for question in questions], questions)

    def _turns(
        self, conversations: list[tuple[Messages, int]], questions: Sequence[Question]
    ) -> Iterator[tuple[Question, list[Piece]]]:
        """Yield the pieces of conversations; the number is that of the prompt's messages."""
        turns = [
            (question, messages, place)
            for question, (messages, first) in zip(questions, conversations, strict=True)
            for place in range(first, len(messages))
            if messages[place]["role"] == "assistant"
        ]
        before = self._rendered([(one, messages[:n]) for one, messages, n in turns], True)
        after = self._rendered([(one, messages[: n + 1]) for one, messages, n in turns], False)
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

    def _rendered(
        self, conversations: Sequence[tuple[Question, Messages]], prompt: bool
    ) -> list[str]:
        assert self._template is not None  # noqa: S101 - only called with one
        texts: list[str] = []
        messages = [messages for _, messages in conversations]
        try:
            for text in self._template.texts(messages, generation_prompt=prompt):
                texts.append(text)  # noqa: PERF402 - how many there are says which one failed
        except RenderingError as error:
            where = conversations[len(texts)][0].where
            raise DataError(
                f"{where}: the model's chat template refused the messages: {error}"
            ) from error
        return texts

    def _conversation(self, question: Question) -> tuple[Messages, int]:
        """Return all messages, and how many of them are the prompt's."""
        messages = self._messages(question)
        if self._sft.learn == "assistant":
            if all(one["role"] != "assistant" for one in messages):
                raise DataError(
                    f"{question.where}: the conversation has no message of the role assistant, so "
                    "there is nothing to learn"
                )
            return messages, 0
        answer = self._answer(question)
        more = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return [*messages, *more], len(messages)

    def _answer(self, question: Question) -> str | Messages:
        if self._config.kind == "arithmetic":
            example = question.example
            return working(Problem(example["a"], example["b"], 0))
        row, name = question.example["row"], self._sft.response_field
        answer = row.get(name)
        if isinstance(answer, str) and answer:
            return answer
        if isinstance(answer, list) and answer and all(map(_is_message, answer)):
            return answer
        if name in row:
            raise DataError(
                f"{question.where}: its {name!r} (sft.response_field) must be a text or a list of "
                f"chat messages with role and content, got {shortened(repr(answer), 80)}"
            )
        raise DataError(
            f"{question.where}: the example has no {name!r}; sft.response_field must name one of "
            f"its fields ({shortened(', '.join(map(repr, row)))})"
        )


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and {"role", "content"} <= one.keys()
