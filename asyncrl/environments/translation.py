"""Between the policy's tokens and what environments say: prompts, actions, observations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from asyncrl.environments.protocol import Action, BadAnswerError, Message, Observation
from asyncrl.errors import AsyncrlError
from asyncrl.rollout.trajectory import IntArray

_TOKEN_CHARACTERS = 256
"""More than a token has. A text that is longer for each token that it may have is not tokenised:
that would hold the generator up for seconds."""

Tools = Sequence[dict[str, Any]]
Read = Callable[[str, Tools, int], tuple[Message, list[dict[str, Any]]]]
"""From a turn's text, the tools and the turn's number: the turn as a message, and its calls."""


class Renderer(Protocol):
    """Makes the tokens around turns; see `asyncrl.environments.rendering`."""

    def prompt(self, messages: Sequence[Message] | str, tools: Tools | None = None) -> IntArray:
        """`[P]` the tokens of a conversation's beginning."""

    def between(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message] | str,
        turn_tokens: Sequence[int] | IntArray,
        tools: Tools | None = None,
    ) -> IntArray:
        """`[N]` the tokens that follow a turn, up to where the next turn begins."""

    @property
    def history(self) -> Literal["keep", "template"]:
        """What holds where the template changes earlier turns."""

    def rewritten(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message] | str,
        turn_tokens: Sequence[int] | IntArray,
        tools: Tools | None = None,
    ) -> IntArray | None:
        """`[P]` the whole prompt of the next turn if the template changes what came before."""

    def other_way(self) -> contextlib.AbstractContextManager[None]:
        """Within, tokens are made as they may have been made at another time."""

    def turn_text(self, turn_tokens: Sequence[int] | IntArray) -> str:
        """The text of a turn, special tokens included, without the stop token at its end."""


class Observed(NamedTuple):
    """An observation as the policy reads it."""

    tokens: IntArray
    """`[N]`"""
    messages: list[Message]
    begins_context: bool = False
    """Whether the tokens are a whole prompt, after which nothing before them is read."""


@contextlib.contextmanager
def _refusals_of_the_template() -> Iterator[None]:
    """Messages that the chat template refuses are a bad answer of the environment."""
    try:
        yield
    except AsyncrlError as error:
        raise BadAnswerError("wrong_type", str(error)) from error


def read_plainly(text: str, tools: Tools, turn: int) -> tuple[Message, list[dict[str, Any]]]:
    """A turn as a message, without looking for calls."""
    del tools, turn
    return {"role": "assistant", "content": text}, []


class Translation:
    """Translates for one model.

    Args:
        renderer: of its chat template.
        decode: tokens as text, without special tokens.
        vocabulary: how many token ids there are.
        max_observation_tokens: see `environment.max_observation_tokens`.
        max_prompt_tokens: longest prompt that is worth tokenising; None: any.
        system_prompt: before every conversation that does not begin with one.
        read: finds the calls of tools in a turn.
        stop: strings that end a turn; its message is without them, as other servers give it.
    """

    def __init__(
        self,
        renderer: Renderer,
        decode: Callable[[list[int]], str],
        vocabulary: int,
        *,
        max_observation_tokens: int,
        max_prompt_tokens: int | None = None,
        system_prompt: str | None = None,
        read: Read = read_plainly,
        stop: Sequence[str] = (),
    ) -> None:
        self._renderer = renderer
        self._decode = decode
        self._vocabulary = vocabulary
        self._max_observation_tokens = max_observation_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._system_prompt = system_prompt
        self._read = read
        self._stop = stop

    def conversation(
        self, first: Sequence[Message] | str | None, row: dict[str, Any]
    ) -> list[Message]:
        """The messages before the first turn: the environment's, else the row's prompt."""
        said = first if first is not None else row.get("prompt", "")
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        system = self._system_prompt
        if system is not None and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": system}, *messages]
        return messages

    def prompt(self, messages: Sequence[Message], tools: Tools) -> IntArray:
        """`[P]` the tokens before the first turn. Raises BadAnswerError."""
        self.check_prompt(messages)
        if tools and self._max_prompt_tokens is not None:
            _check_size("list of tools", tools, self._max_prompt_tokens, "engine.max_model_len")
        with _refusals_of_the_template():
            tokens = self._renderer.prompt(messages, tools or None)
        if not len(tokens):
            raise BadAnswerError("wrong_type", "the prompt is empty once tokenised")
        return tokens

    def action(self, tokens: IntArray, tools: Tools, turn: int) -> Action:
        """A turn of the policy as its environment gets it."""
        ids = tokens.tolist()
        message, calls = self._read(self._renderer.turn_text(ids), tools, turn)
        text = self._decode(ids)
        if not calls:
            message = {"role": "assistant", "content": text}
        content = message["content"]
        if places := [place for one in self._stop if (place := content.find(one)) >= 0]:
            message = {**message, "content": content[: min(places)]}
        return Action(text, ids, message, calls)

    def other_way(self) -> contextlib.AbstractContextManager[None]:
        """Within, observations have the tokens that they may have had at another time.

        What a chat template needs to know for them is found out in the course of a run, and differs
        from process to process.
        """
        return self._renderer.other_way()

    @property
    def keeps_history(self) -> bool:
        """Whether generated tokens stay where the chat template changes earlier turns."""
        return self._renderer.history == "keep"

    def begun(self, observation: Observation, tools: Tools) -> Observed:
        """A whole conversation, as if none had been before it. Raises BadAnswerError."""
        if is_ids(observation):
            return Observed(*self._of_ids(observation), begins_context=True)
        messages = self.conversation(observation, {})  # type: ignore[arg-type]  # no ids
        return Observed(self.prompt(messages, tools), messages, begins_context=True)

    def check_prompt(self, messages: Sequence[Message]) -> None:
        """Refuse a conversation that no prompt can hold. Raises BadAnswerError."""
        if self._max_prompt_tokens is not None:
            _check_size("prompt", messages, self._max_prompt_tokens, "engine.max_model_len")

    def between(
        self, before: Sequence[Message], new: Observation, turn: IntArray, tools: Tools
    ) -> IntArray:
        """`[N]` the tokens that follow a turn. Raises BadAnswerError."""
        said: Any = new
        with _refusals_of_the_template():
            tokens = self._renderer.between(before, said, turn, tools or None)
        if not len(tokens):
            raise BadAnswerError("wrong_type", "the observation is empty once tokenised")
        return tokens

    def observed(
        self,
        before: Sequence[Message],
        observation: Observation,
        turn_tokens: IntArray,
        tools: Tools,
    ) -> Observed:
        """The tokens of an observation, and its messages. Raises BadAnswerError."""
        rewritten: IntArray | None = None
        limit = self._max_observation_tokens
        _check_size("observation", observation, limit, "environment.max_observation_tokens")
        if is_ids(observation):
            ids, messages = self._of_ids(observation)
        else:
            said: Any = observation
            ids = self.between(before, said, turn_tokens, tools)
            if not self.keeps_history:
                with _refusals_of_the_template():
                    rewritten = self._renderer.rewritten(before, said, turn_tokens, tools or None)
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        if len(ids) > self._max_observation_tokens:
            raise BadAnswerError(
                "too_long",
                f"the observation has {len(ids)} tokens, more than "
                f"environment.max_observation_tokens ({self._max_observation_tokens})",
            )
        if rewritten is not None:
            return Observed(rewritten, messages, begins_context=True)
        return Observed(ids, messages)

    def _of_ids(self, observation: Observation) -> tuple[IntArray, list[Message]]:
        """Token ids, and what they say as a message. Raises BadAnswerError."""
        tokens = np.asarray(observation, np.int64)
        if tokens.max() >= self._vocabulary:
            raise BadAnswerError(
                "wrong_type",
                f"the observation has the token id {tokens.max()}, and the model has "
                f"{self._vocabulary}",
            )
        said = self._decode(tokens.tolist())
        return tokens.astype(np.int32), [{"role": "user", "content": said}]


def is_ids(observation: Observation | None) -> bool:
    """Whether an observation is token ids."""
    return bool(observation) and isinstance(observation[0], int)  # type: ignore[index]  # not None


def _check_size(what: str, said: Observation | Sequence[Message], most: int, setting: str) -> None:
    """Refuse what cannot fit into so many tokens, before it is tokenised. Raises BadAnswerError."""
    if isinstance(said, str):
        size = len(said)
    else:
        size = sum(
            len(str(value)) for one in said if not isinstance(one, int) for value in one.values()
        )
    if size > most * _TOKEN_CHARACTERS:
        raise BadAnswerError(
            "too_long", f"the {what} has {size} characters, which {setting} ({most}) cannot hold"
        )
    if len(said) > most and isinstance(said[0], int):
        raise BadAnswerError(
            "too_long", f"the {what} has {len(said)} tokens, more than {setting} ({most})"
        )
