"""A program that calls a model, turned around into `reset` and `step`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.environments.adapters.verifiers import Served, VerifiersEnvironment
from asyncrl.environments.agents.calls import ProgramCalls
from asyncrl.environments.agents.openai_messages import ChatCall, PolicySettings, Turn
from asyncrl.environments.protocol import Action, StepResult

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def counting(calls: ProgramCalls) -> int:
    messages = [user("count")]
    for number in range(3):
        turn = await calls.answer(ChatCall(list(messages)))
        messages.append(turn.message)
        messages.append(user(f"{number}?"))
    return len(messages)


def test_only_new_messages_are_seen_and_the_end_has_the_result() -> None:
    async def play() -> tuple[list[Any], Any]:
        calls = ProgramCalls()
        first = await calls.begin(counting(calls))
        assert first is not None
        seen: list[Any] = [first.messages]
        while (result := await calls.step(Turn(reply("one"), 1))) is not None:
            seen.append(result.observation)
        return seen, calls.result()

    seen, result = asyncio.run(play())
    assert seen == [[user("count")], [user("0?")], [user("1?")]]
    assert result == 7


def test_what_the_program_raises_is_raised() -> None:
    async def broken(calls: ProgramCalls) -> None:
        await calls.answer(ChatCall([user("?")]))
        raise ZeroDivisionError("the program's")

    async def play() -> None:
        calls = ProgramCalls()
        await calls.begin(broken(calls))
        assert await calls.step(Turn(reply("!"), 1)) is None
        calls.result()

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
    async def forgetful(calls: ProgramCalls) -> None:
        await calls.answer(ChatCall([user("first")]))
        turn = await calls.answer(ChatCall(second, tools))
        await calls.answer(ChatCall([*second, turn.message, user("last")], tools))

    async def play() -> list[Any]:
        calls = ProgramCalls()
        await calls.begin(forgetful(calls))
        return [await calls.step(Turn(reply("!"), 1)) for _ in range(3)]

    changed, last, end = asyncio.run(play())
    continued = StepResult([user("more")])
    other = StepResult(second, new_conversation=True, tools=tools)
    assert changed == (other if begins else continued)
    assert last == StepResult([user("last")])
    assert end is None


def test_an_episode_that_asks_twice_at_once_is_told() -> None:
    async def play() -> None:
        calls = ProgramCalls()
        served: Any = SimpleNamespace(_open={"trace": calls})

        async def twice() -> None:
            asked = (Served.turn(served, "trace", ChatCall([user("?")])) for _ in range(2))
            await asyncio.gather(*asked)

        assert await calls.begin(twice()) is None
        calls.result()

    with pytest.raises(RuntimeError, match="one turn after another"):
        asyncio.run(asyncio.wait_for(play(), 60))


def test_closing_ends_the_program() -> None:
    ended = []

    async def waiting(calls: ProgramCalls) -> None:
        try:
            await calls.answer(ChatCall([user("?")]))
        finally:
            ended.append(True)

    async def play() -> None:
        calls = ProgramCalls()
        await calls.begin(waiting(calls))
        await calls.close()
        await calls.close()

    asyncio.run(play())
    assert ended == [True]


@pytest.mark.parametrize(
    ("tokens", "reason"), [([1], "stop"), ([1, 1], "length"), ([1, 9], "stop")]
)
def test_an_episode_hears_that_a_turn_was_cut(tokens: list[int], reason: str) -> None:
    heard = []

    async def episode(_: int, calls: ProgramCalls) -> None:
        heard.append((await calls.answer(ChatCall([user("?")]))).finish_reason)
        await calls.answer(ChatCall([user("?"), reply("one"), user("!")]))

    async def play() -> None:
        policy = PolicySettings(stop_tokens=(9,), max_tokens=2)
        served: Any = SimpleNamespace(
            policy=policy, episode=episode, serve=lambda: asyncio.sleep(0)
        )
        environment = VerifiersEnvironment(served, replay=None)
        await environment.reset({"idx": 0}, 1)
        result = await environment.step(Action("one", tokens, reply("one")))
        assert result.observation == [user("!")]
        await environment.close()

    asyncio.run(play())
    assert heard == [reason]
