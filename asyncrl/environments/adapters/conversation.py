"""A program that calls a model, turned around: its calls become what `reset` and `step` return.

    program   call(messages) ──────────────► wait for the answer ──► call(messages) ──► end
    session   reset ──► its messages         step(action) ──────────► new messages      done

The program runs as a task of the worker's event loop. A call whose messages begin with those of the
call before and the policy's answer to it continues their conversation; any other begins a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from asyncrl.environments.agents.openai_messages import Turn
from asyncrl.environments.chat_messages import Message, new_messages


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What the program asks the model."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    begins: bool = False
    """The messages are a whole conversation, not the continuation of the one before."""


class CalledTwiceError(Exception):
    """The program asked again before it was answered."""


class Conversation:
    """One program and its calls. Used from one event loop."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._answer: asyncio.Future[Turn] | None = None
        self._seen: list[Message] = []
        self._tools: list[dict[str, Any]] = []
        self._program: asyncio.Task[Any] | None = None

    def start(self, program: Coroutine[Any, Any, Any]) -> None:
        """Run the program."""
        self._program = asyncio.create_task(program)

    async def ask(self, call: ModelCall) -> Turn:
        """The program's side: the policy's answer."""
        if self._answer is not None:
            raise CalledTwiceError(
                "it called the model again before the first call was answered; a sample is one "
                "turn after another"
            )
        self._answer = asyncio.get_running_loop().create_future()
        self._calls.put_nowait(call)
        return await self._answer

    def answer(self, turn: Turn) -> None:
        """The policy's side: answer the call that waits."""
        waiting, self._answer = self._answer, None
        if waiting is None or waiting.done():
            raise RuntimeError("no call of the program waits for an answer")
        self._seen.append(turn.message)
        waiting.set_result(turn)

    async def next(self) -> ModelCall | None:
        """The next call, with only the messages that are new; None when the program has ended.

        What the program raises is raised here.
        """
        if self._program is None:
            raise RuntimeError("the program was not started")
        called = asyncio.ensure_future(self._calls.get())
        await asyncio.wait({called, self._program}, return_when=asyncio.FIRST_COMPLETED)
        if not called.done():
            called.cancel()
            self._program.result()
            return None
        call = called.result()
        known, self._seen = self._seen, list(call.messages)
        tools, self._tools = self._tools, call.tools
        if not known:
            return call
        new = new_messages(known, call.messages) if tools == call.tools else None
        if new is None:
            return ModelCall(call.messages, call.tools, begins=True)
        return ModelCall(new, call.tools)

    def result(self) -> Any:
        """What the program returned."""
        assert self._program is not None  # noqa: S101 - `next` gave None
        return self._program.result()

    async def close(self) -> None:
        """End the program. Idempotent."""
        if self._program is not None and not self._program.done():
            self._program.cancel()
            with contextlib.suppress(BaseException):
                await self._program
