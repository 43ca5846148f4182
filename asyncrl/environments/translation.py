"""Translates between the policy's tokens and the environments' prompts, actions, observations."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncrl.environments.protocol import Action, BadAnswerError, Message, Observation
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.errors import AsyncrlError
from asyncrl.rollout.trajectory import IntArray

_TOKEN_CHARACTERS = 256
"""An upper bound of characters per token. A text with more characters than its token limit allows
is not tokenised, since that would block the generator for seconds."""

Tools = Sequence[dict[str, Any]]
Read = Callable[[str, Tools, int], tuple[Message, list[dict[str, Any]]]]
"""Maps a turn's text, the tools and the turn's number to a message and its calls."""


class Observed(NamedTuple):
    """An observation as the policy reads it."""

    tokens: IntArray
    """`[N]`"""
    messages: list[Message]
    begins_context: bool = False
    """True if the tokens are a whole prompt, which replaces the context."""


@contextlib.contextmanager
def _refusals_of_the_template() -> Iterator[None]:
    """Convert a chat template's refusal into a bad answer of the environment."""
    try:
        yield
    except AsyncrlError as error:
        raise BadAnswerError("wrong_type", str(error)) from error


def read_plainly(text: str, tools: Tools, turn: int) -> tuple[Message, list[dict[str, Any]]]:
    """Convert a turn to a message without looking for calls."""
    del tools, turn
    return {"role": "assistant", "content": text}, []


@dataclass(slots=True)
class Translation:
    """Translates for one model.

    `decode` returns text without special tokens; `vocabulary` is the number of token ids;
    `max_prompt_tokens` bounds prompts that are worth tokenising (None: unbounded); `system_prompt`
    precedes every conversation that does not begin with one; `read` finds the tool calls of a turn;
    `stop` holds strings that end a turn and are removed from its message, as other servers do.
    """

    renderer: TurnRenderer
    decode: Callable[[list[int]], str]
    vocabulary: int
    _: KW_ONLY
    max_observation_tokens: int
    max_prompt_tokens: int | None = None
    system_prompt: str | None = None
    read: Read = read_plainly
    stop: Sequence[str] = ()

    def conversation(
        self, first: Sequence[Message] | str | None, row: dict[str, Any]
    ) -> list[Message]:
        """Return the messages before the first turn: the environment's, else the row's prompt."""
        said = first if first is not None else row.get("prompt", "")
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        system = self.system_prompt
        if system is None or (messages and messages[0].get("role") == "system"):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def prompt(self, messages: Sequence[Message], tools: Tools) -> IntArray:
        """Return `[P]` the tokens before the first turn. Raises BadAnswerError."""
        self.check_prompt(messages)
        if tools and self.max_prompt_tokens is not None:
            _check_size("list of tools", tools, self.max_prompt_tokens, "engine.max_model_len")
        with _refusals_of_the_template():
            tokens = self.renderer.prompt(messages, tools or None)
        if not len(tokens):
            raise BadAnswerError("wrong_type", "the prompt is empty once tokenised")
        return tokens

    def action(self, tokens: IntArray, tools: Tools, turn: int) -> Action:
        """Return a turn of the policy as its environment receives it."""
        ids = tokens.tolist()
        message, calls = self.read(self.renderer.turn_text(ids), tools, turn)
        text = self.decode(ids)
        if not calls:
            message = {"role": "assistant", "content": text}
        content = message["content"]
        if places := [place for one in self.stop if (place := content.find(one)) >= 0]:
            message = {**message, "content": content[: min(places)]}
        return Action(text, ids, message, calls)

    @property
    def keeps_history(self) -> bool:
        """True if generated tokens stay where the chat template changes earlier turns."""
        return self.renderer.history == "keep"

    def begun(self, observation: Observation, tools: Tools) -> Observed:
        """Render a whole new conversation. Raises BadAnswerError."""
        if is_ids(observation):
            return Observed(*self._of_ids(observation), begins_context=True)
        messages = self.conversation(observation, {})  # type: ignore[arg-type]  # no ids
        return Observed(self.prompt(messages, tools), messages, begins_context=True)

    def check_prompt(self, messages: Sequence[Message]) -> None:
        """Refuse a conversation that exceeds any prompt. Raises BadAnswerError."""
        if self.max_prompt_tokens is not None:
            _check_size("prompt", messages, self.max_prompt_tokens, "engine.max_model_len")

    def between(
        self, before: Sequence[Message], new: Any, turn: IntArray, tools: Tools
    ) -> IntArray:
        """Return `[N]` the tokens that follow a turn. Raises BadAnswerError."""
        with _refusals_of_the_template():
            tokens = self.renderer.between(before, new, turn, tools or None)
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
        """Return an observation's tokens and messages. Raises BadAnswerError."""
        rewritten: IntArray | None = None
        limit, setting = self.max_observation_tokens, "environment.max_observation_tokens"
        _check_size("observation", observation, limit, setting)
        if is_ids(observation):
            ids, messages = self._of_ids(observation)
        else:
            said: Any = observation
            ids = self.between(before, said, turn_tokens, tools)
            if not self.keeps_history:
                with _refusals_of_the_template():
                    rewritten = self.renderer.rewritten(before, said, turn_tokens, tools or None)
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        if len(ids) > limit:
            text = f"the observation has {len(ids)} tokens, more than {setting} ({limit})"
            raise BadAnswerError("too_long", text)
        if rewritten is not None:
            return Observed(rewritten, messages, begins_context=True)
        return Observed(ids, messages)

    def _of_ids(self, observation: Observation) -> tuple[IntArray, list[Message]]:
        tokens = np.asarray(observation, np.int64)
        if tokens.max() >= self.vocabulary:
            most = self.vocabulary - 1
            text = f"the observation has the token id {tokens.max()}; the model's ids end at {most}"
            raise BadAnswerError("wrong_type", text)
        said = self.decode(tokens.tolist())
        return tokens.astype(np.int32), [{"role": "user", "content": said}]


def is_ids(observation: Observation | None) -> bool:
    """Return True if an observation is token ids."""
    return bool(observation) and isinstance(observation[0], int)  # type: ignore[index]  # not None


def _check_size(what: str, said: Observation | Sequence[Message], most: int, setting: str) -> None:
    """Refuse, before it is tokenised, what cannot fit into `most` tokens. Raises BadAnswerError."""
    size = len(said)
    if not isinstance(said, str):
        size = sum(len(str(v)) for one in said if not isinstance(one, int) for v in one.values())
    if size > most * _TOKEN_CHARACTERS:
        text = f"the {what} has {size} characters, which {setting} ({most}) cannot hold"
        raise BadAnswerError("too_long", text)
    if len(said) > most and isinstance(said[0], int):
        text = f"the {what} has {len(said)} tokens, more than {setting} ({most})"
        raise BadAnswerError("too_long", text)
