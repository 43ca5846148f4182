"""Turns an environment's messages into the tokens around the policy's turns.

    prompt tokens │ turn 1 (generated) │ between │ turn 2 (generated) │ between │ ...
        └ prompt()                        └ between()

The tokens of generated turns are never decoded and tokenised again: a conversation is one growing
sequence of tokens, and only the pieces between turns are made here, from the tokenizer's chat
template: the end of the turn, the answer with its role headers, and the beginning of the next turn.

Pieces are tokenised one by one, so merges of the tokenizer never reach into a generated turn. If
the template puts a special token at the border, which no merge crosses, the pieces give the same
tokens as the whole text. Otherwise the text is the same but a token at the border may differ;
`TurnRenderer.findings` says so.

A turn is rendered with only the messages nearest to it, although a template may change earlier
turns. `ConversationCheck` compares the result with whole conversations: one of our own at the
start, and actual ones later.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncrl.environments.chat_template import (
    beginning_of_turn,
    end_of_turn,
    first_difference,
    nearest_context,
)
from asyncrl.errors import RenderingError
from asyncrl.rollout.trajectory import IntArray
from asyncrl.tasks.model_tokenizer import special_ids
from asyncrl.tasks.templates.chat_template import ChatTemplate, Message, Tools

logger = logging.getLogger(__name__)

History = Literal["keep", "template"]
"""Policy for templates that change earlier turns (Qwen3 removes their reasoning). `keep` keeps the
generated tokens; `template` continues in a new context with the template's version."""

PROBE_QUESTION: Message = {"role": "user", "content": "question"}
_MARK = "words-of-a-message"
_CALL_ID = "abcdefghi"
"""Mistral's templates accept only ids of this length."""
_LATE = (
    ". Conversations are compared at turns 1, 2, 4, 8, ..., so turns between two of these may lack "
    "some of that text until now"
)
_PROBE_TURNS = ("answer", "<think>\nreasoning\n</think>\n\nanswer")


class TurnInConversation(NamedTuple):
    """A turn, the messages before it, and the `new` ones that answer it."""

    messages: Sequence[Message]
    new: Sequence[Message]
    turn: str
    tools: Tools | None


class ConversationCheck:
    """Checks a template against whole conversations, and keeps the findings."""

    def __init__(self, template: ChatTemplate, history: History) -> None:
        self._template = template
        self._history = history
        self.needs_whole = False
        """The text after a turn depends on earlier turns, so all messages are rendered."""
        self.lead = ""
        """White space that the template puts before a turn's text and the policy generates."""
        self.findings: dict[str, str] = {}
        """Warnings for the user, one sentence per kind."""
        self._looked_for: set[Any] = set()

    def probe(self) -> None:
        """Compare with a conversation that every template should accept, once."""
        new: list[Message] = [{"role": "user", "content": "objection"}]
        earlier = [PROBE_QUESTION, {"role": "assistant", "content": "first"}]
        messages = [*earlier, {"role": "user", "content": "doubt"}]
        try:
            self.lead = beginning_of_turn(self._template, messages, new, None)
            near = end_of_turn(self._template, nearest_context(messages), new, None)
            if end_of_turn(self._template, messages, new, None) != near:
                self.needs_whole = True
                self._say_whole()
            for turn in _PROBE_TURNS:
                if self._compare(TurnInConversation(messages, new, self.lead + turn, None), near):
                    return
        except RenderingError as error:
            self.say("refused", f"a conversation of several turns was tried: {error}")

    def probe_answer_of(self, tools: Tools) -> None:
        """Check the answer of a tool, once."""
        if "tool" in self._looked_for:
            return
        function = tools[0].get("function", tools[0])
        call = {"name": function.get("name"), "arguments": {}}
        calls = [{"id": _CALL_ID, "type": "function", "function": call}]
        asked = {"role": "assistant", "content": "", "tool_calls": calls}
        answer = {"role": "tool", "name": call["name"], "tool_call_id": _CALL_ID, "content": "1"}
        self._look_for([PROBE_QUESTION, asked], [answer], tools)

    def look_for(
        self, near: Sequence[Message], new: Sequence[Message], tools: Tools | None
    ) -> None:
        """Check, once for each role, that the template shows the content of messages."""
        if any(message.get("role") not in self._looked_for for message in new):
            self._look_for([*near, {"role": "assistant", "content": _PROBE_TURNS[0]}], new, tools)

    def _look_for(
        self, before: Sequence[Message], new: Sequence[Message], tools: Tools | None
    ) -> None:
        for place, message in enumerate(new):
            role = message.get("role")
            if role in self._looked_for or not message.get("content"):
                continue
            self._looked_for.add(role)
            marked = [*new[:place], {**message, "content": _MARK}, *new[place + 1 :]]
            try:
                if _MARK in self._template.render([*before, *marked], tools):
                    continue
                wrong = "does not show the content of such a message, so the policy cannot read it"
            except RenderingError as error:
                wrong = f"refuses it ({error})"
            self.say(
                f"role {role}",
                f"a message of the role {role} after a turn was tried: the chat template {wrong}",
            )

    def check(self, at: TurnInConversation, text: str) -> str:
        """Compare the end of a turn with the whole conversation as the template renders it.

        The check happens at turns 1, 2, 4, 8, ..., so that all checks together cost a fixed
        number of renderings of the conversation.
        """
        whole = text
        with contextlib.suppress(RenderingError):  # of the turn as plain content: some refuse it
            if not self.needs_whole:
                whole = end_of_turn(self._template, at.messages, at.new, at.tools)
            if whole != text:
                self.needs_whole = True
                self._say_whole(_LATE)
            self._compare(at, whole)
        return whole

    def _compare(self, at: TurnInConversation, text: str) -> bool:
        """Return True, and say so once, if the template changes earlier text."""
        _, found = self.whole(at, text)
        if found is None:
            return False
        kept = {
            "keep": "the tokens that were generated stay (environment.history: keep)",
            "template": "a new context begins there (environment.history: template)",
        }[self._history]
        self.say("history", f"the template changes earlier turns: {kept}. First difference {found}")
        return True

    def whole(self, at: TurnInConversation, text: str) -> tuple[str, str | None]:
        """Render a conversation; return it, and where it differs from ours with `text` behind."""
        own = {"role": "assistant", "content": at.turn.removeprefix(self.lead)}
        whole = self._template.render([*at.messages, own, *at.new], at.tools)
        ours = self._template.render(at.messages, at.tools) + at.turn + text
        return whole, first_difference(ours, whole)

    def _say_whole(self, late: str = "") -> None:
        self.say(
            "whole",
            "the text that the chat template puts behind a turn depends on the turns before it: "
            f"each turn renders the whole conversation, so long ones cost more per turn{late}",
        )

    def say(self, kind: str, finding: str) -> None:
        """Keep and log a finding, once per kind."""
        if kind not in self.findings:
            self.findings[kind] = finding
            logger.warning("%s", finding)


class TokenPieces:
    """Tokenises and decodes texts that follow other tokens; `stop_tokens` end a turn."""

    def __init__(self, tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_tokens = frozenset(stop_tokens)
        self._special = special_ids(tokenizer) | self._stop_tokens
        self._anchor = _anchor(tokenizer)

    def beginning(self, text: str) -> list[int]:
        """Return the tokens of the very first text, including those that the tokenizer adds."""
        return list(self._tokenizer(text)["input_ids"])

    def ends(self, turn_tokens: Sequence[int] | IntArray) -> bool:
        """Return True if a turn has ended with a stop token."""
        return len(turn_tokens) > 0 and int(turn_tokens[-1]) in self._stop_tokens

    def end_token(self, ids: Sequence[int]) -> int | None:
        """Return the index of the first special token, or None."""
        return next((place for place, token in enumerate(ids) if token in self._special), None)

    def name(self, token: int) -> str:
        """Return a token as the tokenizer's files write it."""
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that already holds all special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def after(self, text: str) -> list[int]:
        """Return the tokens of a text that follows others: nothing is added at its beginning."""
        if not text or self._anchor is None:
            return self.encode(text)
        # Some tokenizers put a space before the first word of a text, but not after a token.
        return self.encode(self._anchor + text)[1:]

    def text(self, turn_tokens: Sequence[int] | IntArray) -> str:
        """Return a turn's text as it stands in the conversation, without its stop token."""
        ids = [int(token) for token in turn_tokens]
        if ids and ids[-1] in self._stop_tokens:
            ids.pop()
        if self._anchor is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        # Some tokenizers leave out a space at the beginning of a text, but not after a token.
        after = [self._tokenizer.convert_tokens_to_ids(self._anchor), *ids]
        text = str(self._tokenizer.decode(after, skip_special_tokens=False))
        return text.removeprefix(self._anchor)


def _anchor(tokenizer: Any) -> str | None:
    """Return a special token that leaves the text behind it unchanged, or None."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return next((str(one.content) for one in added if one.special and not one.rstrip), None)


class TurnRenderer:
    """Makes the tokens around turns; without a chat template, texts are used as they are.

    `stop_tokens` end a turn; `chat_template` selects the tokenizer's template, if it has one;
    `arguments` are further variables of the template; `history` is described at `History`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_tokens: Sequence[int] = (),
        chat_template: bool = True,
        arguments: Mapping[str, Any] | None = None,
        history: History = "keep",
    ) -> None:
        self._pieces = TokenPieces(tokenizer, stop_tokens)
        self.history = history
        self._closing: list[int] = []
        self._template: ChatTemplate | None = None
        if chat_template and getattr(tokenizer, "chat_template", None):
            self._template = ChatTemplate(tokenizer, arguments)
            self._check = ConversationCheck(self._template, history)
            self._closing = self._closing_of(self._template, self._check)
            self._check.probe()

    @property
    def findings(self) -> Sequence[str]:
        """Warnings about this template, one sentence each."""
        return () if self._template is None else tuple(self._check.findings.values())

    def prompt(self, messages: Sequence[Message] | str, tools: Tools | None = None) -> IntArray:
        """Return `[P]` the tokens up to the start of the first turn. Raises RenderingError."""
        if self._template is None:
            ids = self._pieces.beginning(_plain(messages))
        else:
            ids = self._pieces.encode(self._template.render(_as_messages(messages), tools))
            if tools:
                self._check.probe_answer_of(tools)
        if not ids:
            raise RenderingError("the prompt of an environment is empty once tokenised")
        return np.asarray(ids, np.int32)

    def between(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message] | str,
        turn_tokens: Sequence[int] | IntArray,
        tools: Tools | None = None,
    ) -> IntArray:
        """Return `[N]` the tokens that follow a turn, up to the start of the next turn.

        A final stop token in `turn_tokens` `[T]` replaces the template's end of the turn, whichever
        of the two it is. After another ending (a stop string, a limit) the template's end comes
        first. `messages` is the conversation before the turn, `new_messages` the answer to it.
        Raises RenderingError if the template refuses the messages.
        """
        if self._template is None:
            return np.asarray(self._pieces.after(_plain(new_messages)), np.int32)
        new = _as_messages(new_messages)
        near = list(messages) if self._check.needs_whole else nearest_context(messages)
        text = end_of_turn(self._template, near, new, tools)
        self._check.look_for(near, new, tools)
        turn = 1 + [m.get("role") for m in messages].count("assistant")
        if turn & (turn - 1) == 0:  # 1, 2, 4, 8, ...
            at = TurnInConversation(messages, new, self._pieces.text(turn_tokens), tools)
            text = self._check.check(at, text)
        return np.asarray(self._after(text, turn_tokens), np.int32)

    def rewritten(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message] | str,
        turn_tokens: Sequence[int] | IntArray,
        tools: Tools | None = None,
    ) -> IntArray | None:
        """Return `[P]` the next turn's whole prompt, or None if the conversation only grows.

        It is needed where the template changes earlier turns. The arguments and errors are those of
        `between`.
        """
        if self._template is None:
            return None
        new = _as_messages(new_messages)
        text = end_of_turn(self._template, messages, new, tools)
        at = TurnInConversation(messages, new, self._pieces.text(turn_tokens), tools)
        whole, changed = self._check.whole(at, text)
        return None if changed is None else np.asarray(self._pieces.encode(whole), np.int32)

    @contextlib.contextmanager
    def other_way(self) -> Iterator[None]:
        """Invert `needs_whole` inside this context, as at another time or in another process."""
        if self._template is None:
            yield
            return
        before = self._check.needs_whole
        self._check.needs_whole = not before
        try:
            yield
        finally:
            self._check.needs_whole = before

    def turn_text(self, turn_tokens: Sequence[int] | IntArray) -> str:
        """Return a turn's content for a message, with special tokens but not its stop token."""
        text = self._pieces.text(turn_tokens)
        return text if self._template is None else text.removeprefix(self._check.lead)

    def _after(self, text: str, turn_tokens: Sequence[int] | IntArray) -> list[int]:
        ids = self._pieces.after(text)
        if not self._pieces.ends(turn_tokens):
            return ids
        closing = self._closing or [int(turn_tokens[-1])]  # the next role's, if that ends a turn
        return ids[len(closing) :] if ids[: len(closing)] == closing else ids

    def _closing_of(self, template: ChatTemplate, check: ConversationCheck) -> list[int]:
        """Return the tokens with which the template ends a turn, up to the first special one.

        Empty if the next role's token ends it, as in GLM: the policy chooses that token.
        """
        text = end_of_turn(template, [PROBE_QUESTION], [], None, generation_prompt=False)
        ids = self._pieces.after(text)
        place = self._pieces.end_token(ids)
        by_role = not ids
        if by_role:
            text = end_of_turn(template, [PROBE_QUESTION], [PROBE_QUESTION], None)
            ids = self._pieces.after(text)
            place = 0 if self._pieces.end_token(ids) == 0 else None
        if place is None:
            check.say(
                "border",
                "the chat template ends a turn of the assistant without a special token: the text "
                "after a turn is tokenised on its own, so the tokens at the border may differ from "
                "those of the whole text; those of the turn stay",
            )
            return []
        if not self._pieces.ends(ids[: place + 1]):
            check.say(
                "stop",
                "the chat template ends a turn of the assistant with "
                f"{self._pieces.name(ids[place])}, which is not among the model's stop tokens, so "
                "a turn does not end where the template ends it; add it to "
                '"eos_token_id" in generation_config.json',
            )
        return [] if by_role else ids[: place + 1]


def _as_messages(messages: Sequence[Message] | str) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return list(messages)


def _plain(messages: Sequence[Message] | str) -> str:
    if isinstance(messages, str):
        return messages
    return "".join(str(message.get("content") or "") for message in messages)
