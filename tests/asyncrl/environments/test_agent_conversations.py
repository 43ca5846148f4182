"""Agents with several conversations, one after another or at once."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from played_agents import QUESTION, TOOLS, action, client_of, environment_of, play, run

from asyncrl.environments.agents.calls import ProgramCalls
from asyncrl.environments.agents.openai_messages import ChatCall, Turn
from asyncrl.environments.agents.sessions import ClientSettings
from asyncrl.environments.chat_messages import RefusedCallError


def test_other_messages_or_tools_begin_another_conversation() -> None:
    """Again, with an edited history, as a sub-agent, with a tool more, and back to the first."""
    other: Any = {"role": "user", "content": "something else"}

    def agent(row: Any, settings: ClientSettings) -> None:
        client = client_of(settings)

        def ask(*messages: Any, **more: Any) -> Any:
            call = client.chat.completions.create(model="m", messages=[*messages], **more)
            return call.choices[0].message

        first = ask(QUESTION)
        ask(QUESTION)
        ask(QUESTION, {"role": "assistant", "content": "no"}, other)
        sub = ask(other, tools=TOOLS)
        ask(other, sub, QUESTION, tools=TOOLS)
        ask(other, sub, QUESTION)
        ask(QUESTION, first, other)
        client.close()

    first, *said, end = play(agent, ["a", "b", "c", "d", "e", "f", "g"])
    a, d = ({"role": "assistant", "content": content} for content in "ad")
    assert first == [QUESTION]
    assert [(one.observation, one.new_conversation, one.tools) for one in said] == [
        ([QUESTION], True, []),
        ([QUESTION, {"role": "assistant", "content": "no"}, other], True, []),
        ([other], True, TOOLS),
        ([QUESTION], False, None),
        ([other, d, QUESTION], True, []),
        ([QUESTION, a, other], True, []),
    ]
    assert end.done


def test_calls_at_once_are_answered_one_after_another() -> None:
    """Equal ones too: each is a turn of its own."""
    heard: list[tuple[str, str]] = []
    questions = ["x", "y", "x", "x"]

    async def agent(row: Any, settings: ClientSettings) -> float:
        client = openai.AsyncOpenAI(base_url=settings.base_url, api_key=settings.api_key)

        async def ask(question: str) -> None:
            asked: Any = [{"role": "user", "content": question}]
            chat = await client.chat.completions.create(model="m", messages=asked)
            heard.append((question, chat.choices[0].message.content or ""))

        await asyncio.gather(*map(ask, questions))
        await client.close()
        return 1.0

    async def scenario() -> None:
        environment = environment_of(agent)
        said: Any = await environment.reset({}, 0)
        for turn in range(4):
            result = await environment.step(action(f"{said[-1]['content']}{turn}"))
            said = result.observation
        assert (result.done, result.reward) == (True, 1.0)
        await environment.close()
        await environment._endpoint.stop()

    run(scenario())
    assert sorted(question for question, _ in heard) == sorted(questions)
    assert all(text.startswith(question) for question, text in heard)
    assert sorted(text[-1] for _, text in heard) == ["0", "1", "2", "3"]


def test_a_waiting_call_whose_client_has_gone_is_dropped_unless_it_asks_again() -> None:
    async def scenario() -> None:
        calls = ProgramCalls()

        def asked(content: str) -> asyncio.Task[Turn]:
            call = ChatCall([{"role": "user", "content": content}])
            return asyncio.create_task(calls.answer(call))

        async def shown_after(turn: str) -> Any:
            result = await calls.step(Turn({"role": "assistant", "content": turn}, 1))
            assert result is not None
            return result.observation

        first, gone, late, last = (asked(content) for content in ("a", "gone", "late", "b"))
        call = await calls.begin(asyncio.sleep(1000))
        assert call is not None
        assert call.messages[0]["content"] == "a"
        for one in (gone, late):
            one.cancel()
        await asyncio.wait([gone, late])
        late = asked("late")
        await asyncio.sleep(0)
        assert [one["content"] for one in await shown_after("1")] == ["late"]
        assert [one["content"] for one in await shown_after("2")] == ["b"]
        assert not calls._waiting
        await calls.close()
        assert [(await one).message["content"] for one in (first, late)] == ["1", "2"]
        with pytest.raises(RefusedCallError):
            await last

    run(scenario())
