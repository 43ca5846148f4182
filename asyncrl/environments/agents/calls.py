"""The calls of a program that asks for turns, turned around into the results of `reset` and `step`.

A call whose messages extend those of the previous call and its answer continues their conversation;
any other call begins a new one. Concurrent calls are answered one after another, in the order of
arrival.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from asyncrl.environments.agents.openai_messages import ChatCall, Turn
from asyncrl.environments.chat_messages import RefusedCallError, new_messages
from asyncrl.environments.protocol import StepResult


class _Asked:
    def __init__(self, call: ChatCall) -> None:
        self.call = call
        self.turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.listeners = 0
        """Requests that wait for the answer: the call and its retries."""
        self.heard = False

    @property
    def is_alone(self) -> bool:
        """True if the client has gone without an answer."""
        return not (self.heard or self.listeners)


class ProgramCalls:
    """One program and its calls, used from one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[_Asked] = deque()
        self._present: _Asked | None = None
        self._arrived = asyncio.Event()
        self._ended = False
        self._program: asyncio.Task[Any] | None = None

    @property
    def max_turn_tokens(self) -> int | None:
        """Limit of the turn that the present call asks for."""
        return None if self._present is None else self._present.call.max_tokens

    @property
    def is_waiting(self) -> bool:
        """True if a call has not been answered yet."""
        return any(not asked.turn.done() for asked in self._open())

    async def begin(self, program: Coroutine[Any, Any, Any]) -> ChatCall | None:
        """Run the program up to its first call; None if it ended without one."""
        self._program = asyncio.create_task(program)
        return await self._next()

    async def step(self, turn: Turn) -> StepResult | None:
        """Answer the present call and return what the next one shows; None if the program ended."""
        if self._present is None or self._present.turn.done():
            raise RuntimeError("no call waits for a turn")
        before = self._present.call
        self._present.turn.set_result(turn)
        call = await self._next()
        if call is None:
            return None
        known = [*before.messages, turn.message]
        added = new_messages(known, call.messages) if call.tools == before.tools else None
        if added is None:
            return StepResult(call.messages, new_conversation=True, tools=call.tools)
        return StepResult(added)

    def result(self) -> Any:
        """Return the result of the program that has ended. Raises what it raised."""
        assert self._program is not None  # noqa: S101 - `begin` or `step` gave None
        return self._program.result()

    async def close(self) -> None:
        """Refuse further and waiting calls, and cancel the program. Idempotent."""
        self._ended = True
        for asked in self._open():
            if not asked.turn.done():
                asked.turn.set_exception(_ended())
                asked.turn.exception()  # seen, also if nobody waits
        if self._program is not None:
            self._program.cancel()
            await asyncio.gather(self._program, return_exceptions=True)

    async def answer(self, call: ChatCall) -> Turn:
        """Return the turn that answers a call. Raises RefusedCallError."""
        if self._ended:
            raise _ended()
        asked = self._asked_before(call)
        if asked is None:
            asked = _Asked(call)
            self._waiting.append(asked)
            self._arrived.set()
        asked.listeners += 1
        try:
            turn = await asyncio.shield(asked.turn)
        finally:
            asked.listeners -= 1
        asked.heard = True
        return turn

    async def _next(self) -> ChatCall | None:
        if self._program is None:
            raise RuntimeError("the program has not been started")
        arrival = asyncio.create_task(self._arrival())
        try:
            await asyncio.wait((arrival, self._program), return_when=asyncio.FIRST_COMPLETED)
            return None if self._program.done() else arrival.result()
        finally:
            arrival.cancel()

    async def _arrival(self) -> ChatCall:
        while True:
            while self._waiting:
                asked = self._waiting.popleft()
                if not asked.is_alone:
                    self._present = asked
                    return asked.call
            self._arrived.clear()
            await self._arrived.wait()

    def _open(self) -> list[_Asked]:
        return [*([] if self._present is None else [self._present]), *self._waiting]

    def _asked_before(self, call: ChatCall) -> _Asked | None:
        """Return the call that a client repeats after a timeout or a broken connection."""
        same = [
            one
            for one in self._open()
            if one.call.messages == call.messages and one.call.tools == call.tools
        ]
        alone = [one for one in same if one.is_alone]
        return next(iter(alone or same if call.is_retry else alone), None)


def _ended() -> RefusedCallError:
    return RefusedCallError("the sample has ended: its tokens or its time are used up", status=410)
