"""A program that calls a model, turned around into `reset` and `step`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.environments.adapters.verifiers import (
    Conversation,
    ModelCall,
    VerifiersEnvironment,
)
from asyncrl.environments.agents.openai_messages import PolicySettings, Turn
from asyncrl.environments.protocol import Action

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def counting(conversation: Conversation) -> int:
    messages = [user("count")]
    for number in range(3):
        turn = await conversation.ask(ModelCall(list(messages), []))
        messages.append(turn.message)
        messages.append(user(f"{number}?"))
    return len(messages)


def test_only_new_messages_are_seen_and_the_end_has_the_result() -> None:
    async def play() -> tuple[list[Any], Any]:
        conversation = Conversation()
        conversation.start(counting(conversation))
        seen = []
        while (call := await conversation.next()) is not None:
            seen.append(call.messages)
            conversation.answer(Turn(reply("one"), 1))
        return seen, conversation.result()

    seen, result = asyncio.run(play())
    assert seen == [[user("count")], [user("0?")], [user("1?")]]
    assert result == 7


def test_what_the_program_raises_is_raised() -> None:
    async def broken(conversation: Conversation) -> None:
        await conversation.ask(ModelCall([user("?")], []))
        raise ZeroDivisionError("the program's")

    async def play() -> None:
        conversation = Conversation()
        conversation.start(broken(conversation))
        await conversation.next()
        conversation.answer(Turn(reply("!"), 1))
        await conversation.next()

    with pytest.raises(ZeroDivisionError, match="the program's"):
        asyncio.run(play())


@pytest.mark.parametrize(
    ("second", "tools", "begins"),
    [
        ([user("first"), reply("!"), user("more")], [], False),
        ([user("other"), reply("!"), user("more")], [], True),
        ([user("first"), reply("?"), user("more")], [], True),
        ([user("first"), {**reply("!"), "refusal": None}, user("more")], [], False),
        ([user("first"), {**reply("!"), "tool_calls": [CALL]}, user("more")], [], True),
        ([user("first"), reply("!")], [], True),
        ([user("first"), reply("!"), user("more")], [{"type": "function"}], True),
    ],
)
def test_what_does_not_continue_a_conversation_begins_another(
    second: list[Any], tools: list[Any], begins: bool
) -> None:
    async def forgetful(conversation: Conversation) -> None:
        await conversation.ask(ModelCall([user("first")], []))
        turn = await conversation.ask(ModelCall(second, tools))
        await conversation.ask(ModelCall([*second, turn.message, user("last")], tools))

    async def play() -> list[Any]:
        conversation = Conversation()
        conversation.start(forgetful(conversation))
        calls = []
        while (call := await conversation.next()) is not None:
            calls.append(call)
            conversation.answer(Turn(reply("!"), 1))
        return calls

    first, changed, last = asyncio.run(play())
    assert first == ModelCall([user("first")], [])
    assert changed == ModelCall(second if begins else [user("more")], tools, begins)
    assert last == ModelCall([user("last")], tools)


def test_a_program_that_asks_twice_at_once_is_told() -> None:
    async def play() -> None:
        conversation = Conversation()

        async def twice() -> None:
            await asyncio.gather(*(conversation.ask(ModelCall([user("?")], [])) for _ in range(2)))

        conversation.start(twice())
        await conversation.next()
        await conversation.next()

    with pytest.raises(RuntimeError, match="one turn after another"):
        asyncio.run(asyncio.wait_for(play(), 60))


def test_closing_ends_the_program() -> None:
    ended = []

    async def waiting(conversation: Conversation) -> None:
        try:
            await conversation.ask(ModelCall([user("?")], []))
        finally:
            ended.append(True)

    async def play() -> None:
        conversation = Conversation()
        conversation.start(waiting(conversation))
        await conversation.next()
        await conversation.close()
        await conversation.close()

    asyncio.run(play())
    assert ended == [True]


@pytest.mark.parametrize(
    ("tokens", "reason"), [([1], "stop"), ([1, 1], "length"), ([1, 9], "stop")]
)
def test_the_program_hears_that_a_turn_was_cut(tokens: list[int], reason: str) -> None:
    heard = []

    async def program(conversation: Conversation) -> None:
        heard.append((await conversation.ask(ModelCall([user("?")], []))).finish_reason)
        await conversation.ask(ModelCall([user("?"), reply("one"), user("!")], []))

    async def play() -> None:
        conversation = Conversation()

        async def begin(_: int) -> Conversation:
            conversation.start(program(conversation))
            return conversation

        policy = PolicySettings(stop_tokens=(9,), max_tokens=2)
        served: Any = SimpleNamespace(policy=policy, begin=begin)
        environment = VerifiersEnvironment(served, replay=None)
        await environment.reset({"idx": 0}, 1)
        result = await environment.step(Action("one", tokens, reply("one")))
        assert result.observation == [user("!")]
        await environment.close()

    asyncio.run(play())
    assert heard == [reason]
