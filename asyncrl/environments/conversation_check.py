"""Compares what stands around turns with whole conversations, as the chat template renders them.

A turn is rendered with the messages nearest to it only, and a template may change earlier turns.
Whether that makes a difference is tried with a conversation of our own at the start, and later with
those that come.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.environments.chat_template import (
    beginning_of_turn,
    end_of_turn,
    first_difference,
    nearest_context,
)
from asyncrl.errors import RenderingError
from asyncrl.tasks.templates.chat_template import ChatTemplate, Message, Tools

logger = logging.getLogger(__name__)

History = Literal["keep", "template"]
"""What holds where the template changes earlier turns (Qwen3 leaves out their reasoning). `keep`:
the tokens that were generated. `template`: what the template makes of them, as a new context."""

PROBE_QUESTION: Message = {"role": "user", "content": "question"}
_MARK = "words-of-a-message"
_CALL_ID = "abcdefghi"
"""Mistral's templates take ids of this length only."""
_LATE = (
    ". Conversations are compared at turns 1, 2, 4, 8, ..., so turns between two of these may have "
    "had less behind them until now"
)
_PROBE_TURNS = ("answer", "<think>\nreasoning\n</think>\n\nanswer")


class ConversationCheck:
    """What is known of a template, and said about it.

    Args:
        template: of the model.
        history: what holds where the template changes earlier turns.
    """

    def __init__(self, template: ChatTemplate, history: History) -> None:
        self._template = template
        self._history = history
        self.needs_whole = False
        """What follows a turn depends on the turns before it, so all messages are rendered."""
        self.lead = ""
        """White space that the template puts before a turn's text, and the policy generates."""
        self.findings: dict[str, str] = {}
        """What a user should know, a sentence per kind."""
        self._looked_for: set[Any] = set()
        """Roles whose messages were looked for."""

    def probe(self) -> None:
        """Compare with a conversation that every template should take, once."""
        try:
            self._probe()
        except RenderingError as error:
            self.say("refused", f"a conversation of several turns was tried: {error}")

    def _probe(self) -> None:
        new: list[Message] = [{"role": "user", "content": "objection"}]
        earlier = [PROBE_QUESTION, {"role": "assistant", "content": "first"}]
        messages = [*earlier, {"role": "user", "content": "doubt"}]
        self.lead = beginning_of_turn(self._template, messages, new, None)
        near = end_of_turn(self._template, nearest_context(messages), new, None)
        if end_of_turn(self._template, messages, new, None) != near:
            self.needs_whole = True
            self._say_whole()
        for turn in _PROBE_TURNS:
            if self._compare(messages, new, self.lead + turn, None, near):
                return

    def probe_answer_of(self, tools: Tools) -> None:
        """Look for the answer of a tool, once."""
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
        """See once for each role that the template shows what its messages say."""
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
                wrong = "shows nothing of what such a message says, so the policy does not read it"
            except RenderingError as error:
                wrong = f"refuses it ({error})"
            self.say(
                f"role {role}",
                f"a message of the role {role} after a turn was tried: the chat template {wrong}",
            )

    def check(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        turn: str,
        tools: Tools | None,
        text: str,
    ) -> str:
        """Compare with the whole conversation as the template renders it.

        It happens at turn 1, 2, 4, 8, ..., so all checks together cost a fixed number of renderings
        of the conversation.

        Returns:
            What the template puts behind the turn.
        """
        whole = text
        with contextlib.suppress(RenderingError):  # of the turn as plain content: some refuse it
            if not self.needs_whole:
                whole = end_of_turn(self._template, messages, new, tools)
            if whole != text:
                self.needs_whole = True
                self._say_whole(_LATE)
            self._compare(messages, new, turn, tools, whole)
        return whole

    def _compare(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        turn: str,
        tools: Tools | None,
        text: str,
    ) -> bool:
        """Whether the template changes what came before; said once."""
        _, found = self.whole(messages, new, turn, tools, text)
        if found is None:
            return False
        kept = {
            "keep": "the tokens that were generated stay (environment.history: keep)",
            "template": "a new context begins there (environment.history: template)",
        }[self._history]
        self.say(
            "history", f"the chat template changes earlier turns: {kept}. First difference {found}"
        )
        return True

    def whole(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        turn: str,
        tools: Tools | None,
        text: str,
    ) -> tuple[str, str | None]:
        """A conversation as the template renders it, and where it differs from ours.

        Args:
            messages: before the turn.
            new: after it.
            turn: its text.
            tools: that the model may call.
            text: what we put behind the turn.
        """
        own = {"role": "assistant", "content": turn.removeprefix(self.lead)}
        whole = self._template.render([*messages, own, *new], tools)
        return whole, first_difference(self._template.render(messages, tools) + turn + text, whole)

    def _say_whole(self, late: str = "") -> None:
        self.say(
            "whole",
            "what the chat template puts behind a turn depends on the turns before it: each turn "
            f"renders the whole conversation, so long ones cost more per turn{late}",
        )

    def say(self, kind: str, finding: str) -> None:
        """Keep and log a finding, once per kind."""
        if kind not in self.findings:
            self.findings[kind] = finding
            logger.warning("%s", finding)
