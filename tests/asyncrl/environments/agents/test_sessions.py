"""Agents that speak with the endpoint through the real `openai` client."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import openai
import pytest
from chat_models import chat_tokenizer, stop_ids
from played_agents import (
    POLICY,
    QUESTION,
    TOOLS,
    action,
    client_of,
    environment_of,
    play,
    run,
)
from tiny_models import make_qwen3, save

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.environments.agents.endpoint import Endpoint
from asyncrl.environments.agents.openai_messages import PolicySettings, read_call
from asyncrl.environments.agents.sessions import (
    AgentEnvironment,
    ClientSettings,
    adapter,
    command_program,
    in_thread,
)
from asyncrl.environments.chat_messages import RefusedCallError
from asyncrl.environments.protocol import Action
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.errors import RewardError
from asyncrl.rollout.trajectory import SampleId, TrajectoryBuilder

STOP = POLICY.stop_tokens[0]


def test_an_agent_calls_tools_and_its_return_value_is_the_reward() -> None:
    seen = []

    def agent(row: dict[str, Any], settings: ClientSettings) -> dict[str, float]:
        client = client_of(settings)
        assert [model.id for model in client.models.list()] == ["policy"]
        messages: list[Any] = [{"role": "developer", "content": "be brief"}, row["question"]]
        for _ in range(2):
            choice = client.chat.completions.create(
                model="any",
                messages=messages,
                tools=TOOLS,
                temperature=0.5,
                top_p=1,
                max_tokens=100,
            ).choices[0]
            seen.append(choice)
            messages.append(choice.message)
            for call in choice.message.tool_calls or []:
                total = json.loads(call.function.arguments)["a"] + 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        client.close()
        return {"reward": 0.25}

    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    first, second, end = play(agent, [text, "it is 2"], {"question": QUESTION})
    assert first == [{"role": "system", "content": "be brief"}, QUESTION]
    ((result),) = second.observation
    assert (result["role"], result["content"], second.done) == ("tool", "2", False)
    assert (end.done, end.reward, end.observation) == (True, 0.25, None)
    assert [choice.finish_reason for choice in seen] == ["tool_calls", "stop"]
    assert result["tool_call_id"] == seen[0].message.tool_calls[0].id
    assert (seen[0].message.content, seen[1].message.content) == ("so", "it is 2")


def test_a_stream_brings_the_turn() -> None:
    pieces = []

    async def agent(row: Any, settings: ClientSettings) -> float:
        client = openai.AsyncOpenAI(base_url=settings.base_url, api_key=settings.api_key)
        stream = await client.chat.completions.create(
            model="policy",
            messages=[QUESTION],  # type: ignore[list-item]
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces.extend([chunk async for chunk in stream])
        await client.close()
        return 1.0

    play(agent, ['a <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'])
    deltas = [choice.delta for chunk in pieces for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "a"
    (call,) = [one.function for delta in deltas for one in delta.tool_calls or []]
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    used = pieces[-1].usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (100, 63, 163)
    assert [c.finish_reason for chunk in pieces for c in chunk.choices][-1] == "tool_calls"


REFUSED = [
    ({"temperature": 0.7}, "temperature=0.7 would draw the turns from another policy"),
    ({"top_p": 0.9}, "set sampling.top_p of the run"),
    ({"n": 2}, "n=2: a call is answered with one turn"),
    ({"logprobs": True}, "log-probabilities are not returned"),
    ({"seed": 1}, "seed is not supported"),
    ({"logit_bias": {"5": 1}}, "another policy"),
    ({"presence_penalty": 0.1}, "another policy"),
    ({"stop": ["X"]}, "sampling.stop of the run, which is ['END']"),
    ({"max_tokens": True}, "a whole number"),
    ({"tool_choice": "required", "tools": TOOLS}, "another policy"),
    ({"reasoning_effort": "low"}, "reasoning_effort is not supported"),
    ({"response_format": {"type": "json_object"}}, "another policy"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "robot"}]}, "the role 'robot'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts that are texts"),
    ({"tools": [{"type": "web"}]}, "tools must be a list"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_would_be_another_policy_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedCallError) as refused:
        read_call({"model": "m", "messages": [QUESTION], **change}, POLICY)
    assert sentence in str(refused.value)
    assert refused.value.status == 400


def test_what_equals_the_run_is_accepted() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5, "top_p": 1, "n": 1, "stop": "END", "logit_bias": {}, "seed": None,
        "tool_choice": "auto", "max_completion_tokens": 100, "user": "me", "frequency_penalty": 0.0,
    }  # fmt: skip
    more = {"prompt_cache_key": "k", "service_tier": "auto", "parallel_tool_calls": False}
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "1 + 1?"}]
    call = read_call({"messages": [{"role": "user", "content": parts}], **same, **more}, POLICY)
    assert call.messages == [QUESTION]


def test_a_limit_of_a_turn_cuts_it() -> None:
    reasons = []

    def agent(row: Any, settings: ClientSettings) -> None:
        with client_of(settings) as client:
            messages: list[Any] = [QUESTION]
            for limit in (5, 5, None):
                more = {} if limit is None else {"max_tokens": limit}
                chat = client.chat.completions.create(model="m", messages=messages, **more)
                reasons.append(chat.choices[0].finish_reason)
                messages += [chat.choices[0].message, QUESTION]

    async def scenario() -> None:
        environment = environment_of(agent)
        limits = []
        await environment.reset({}, 0)
        for last in (1, STOP, 1):  # the stop token as the fifth token is no cut
            limits.append(environment.max_turn_tokens)
            said = {"role": "assistant", "content": "a"}
            await environment.step(Action("a", [1, 1, 1, 1, last], said))
        await environment.close()
        await environment._endpoint.stop()
        assert limits == [5, 5, 100]

    run(scenario())
    assert reasons == ["length", "stop", "stop"]


def test_a_call_that_is_refused_costs_no_turn() -> None:
    def agent(row: Any, settings: ClientSettings) -> None:
        client = client_of(settings)

        def ask(messages: list[Any], **more: Any) -> Any:
            return client.chat.completions.create(model="m", messages=messages, **more).choices[0]

        first = ask([QUESTION]).message
        with pytest.raises(openai.BadRequestError, match="another policy"):
            ask([QUESTION, first, QUESTION], temperature=1.5)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="m", prompt="a")
        ask([QUESTION, first, QUESTION])
        client.close()

    _, second, end = play(agent, ["a", "b"])
    assert (second.observation, second.new_conversation) == ([QUESTION], False)
    assert (end.done, end.reward) == (True, 0.0)


def test_a_client_whose_time_is_up_asks_again_and_hears_the_same_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []

    def agent(row: Any, settings: ClientSettings) -> None:
        with client_of(settings).with_options(timeout=0.3, max_retries=100) as client:
            answer = client.chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
            heard.append(answer.choices[0].message.content)

    async def scenario() -> None:
        environment, asked = environment_of(agent), asyncio.Semaphore(0)
        answer = environment._calls.answer

        async def counting(call: Any) -> Any:
            asked.release()
            return await answer(call)

        monkeypatch.setattr(environment._calls, "answer", counting)
        await environment.reset({}, 0)
        for _ in range(2):
            await asked.acquire()
        assert (await environment.step(action("late"))).done
        await environment.close()
        await environment._endpoint.stop()

    run(scenario())
    assert heard == ["late"]


def test_a_sample_that_ends_refuses_the_agents_call_and_ends_the_agent() -> None:
    errors = []

    async def agent(row: Any, settings: ClientSettings) -> None:
        client = openai.AsyncOpenAI(base_url=settings.base_url, api_key=settings.api_key)
        messages: Any = [QUESTION]
        try:
            await client.chat.completions.create(model="m", messages=messages)
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            await client.close()

    play(agent, [])
    assert isinstance(errors.pop(), openai.APIStatusError | asyncio.CancelledError)


def test_an_agent_that_raises_or_never_asks_is_an_error() -> None:
    def fails(row: Any, settings: ClientSettings) -> None:
        raise ZeroDivisionError("in the agent")

    with pytest.raises(ZeroDivisionError, match="in the agent"):
        play(fails, [])
    with pytest.raises(RuntimeError, match="without a call of the model"):
        play(lambda row, settings: 1.0, [])


COMMAND = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.read())
body = json.dumps({"messages": [{"role": "user", "content": row["question"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
print("thinking")
print(len(answer["choices"][0]["message"]["content"]) / 10)
sys.exit(row.get("code", 0))
"""


def test_a_command_line_is_an_agent() -> None:
    program = command_program([sys.executable, "-S", "-c", COMMAND])

    async def scenario() -> None:
        environment = AgentEnvironment(program, Endpoint(POLICY))
        first = await environment.reset({"question": "hello"}, 0)
        assert first == [{"role": "user", "content": "hello"}]
        assert (await environment.step(action("12345"))).reward == 0.5
        await environment.close()
        failing = AgentEnvironment(program, environment._endpoint)
        await failing.reset({"question": "hello", "code": 3}, 0)
        with pytest.raises(RuntimeError, match="exit code 3"):
            await failing.step(action("12345"))
        await failing.close()
        await environment._endpoint.stop()

    run(scenario())
    with pytest.raises(RewardError, match="a list of words"):
        adapter("command", {"command": "python agent.py"})
    with pytest.raises(RewardError, match="the program 'pithon' does not exist"):
        adapter("command", {"command": ["pithon", "agent.py"]})


async def sample(engine: Any, renderer: TurnRenderer, endpoint: Endpoint, number: int) -> None:
    """One sample, as a generator makes it."""
    texts: list[str] = []

    def agent(row: Any, settings: ClientSettings) -> float:
        client, messages = client_of(settings), list[Any]([QUESTION])
        for turn in range(3):
            chat = client.chat.completions.create(model="m", messages=messages)
            texts.append(chat.choices[0].message.content or "")
            more = {"role": "user", "content": f"no {turn}"}
            messages += [chat.choices[0].message, more]
        client.close()
        return float(len(texts))

    environment = AgentEnvironment(
        lambda row, client: in_thread(lambda: agent(row, client)), endpoint
    )
    messages = await environment.reset({}, number)
    builder = TrajectoryBuilder(SampleId(0, number), "p", renderer.prompt(messages))
    turns: list[list[int]] = []
    while True:
        request = GenerateRequest(
            request_id=f"{number}-{len(turns)}",
            cache_key="p",
            prompt_tokens=builder.prompt_tokens,
            prefix_tokens=builder.tokens(),
            turn_start=builder.turn_start,
            sampling=SamplingParams(
                max_tokens=len(builder) + 12, stop_tokens=stop_ids("qwen3"), seed=number
            ),
        )
        turns.append([])
        async for chunk in engine.generate(request):
            chunk.append_to(builder)
            turns[-1] += chunk.tokens.tolist()
        message = {"role": "assistant", "content": renderer.turn_text(turns[-1])}
        result = await environment.step(Action(message["content"], turns[-1], message))
        if result.done:
            break
        assert isinstance(result.observation, list)
        between = renderer.between(messages, result.observation, turns[-1])  # type: ignore[arg-type]
        builder.append_observed(between)
        messages += [message, *result.observation]  # type: ignore[list-item]
    await environment.close()
    trajectory = builder.finish("stop")
    assert trajectory.tokens[trajectory.trained].tolist() == [*np.concatenate(turns)]
    assert texts == [renderer.turn_text(turn) for turn in turns]
    assert result.reward == 3.0


def test_an_unchanged_client_speaks_with_the_policy_of_a_real_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = make_qwen3(vocab_size=512, max_position_embeddings=2048, eos_token_id=1)
    path = save(model, tmp_path_factory.mktemp("agents"))

    async def scenario() -> None:
        config = EngineConfig(kind="torch", slots=4, threads=1, max_model_len=1024, device="cpu")
        engine = create_engine(config, path, cache_config=CacheConfig(max_bytes=1 << 20), seed=5)
        await engine.start()
        endpoint = Endpoint(PolicySettings())
        renderer = TurnRenderer(chat_tokenizer("qwen3"), stop_tokens=stop_ids("qwen3"))
        try:
            await asyncio.gather(*(sample(engine, renderer, endpoint, n) for n in range(4)))
        finally:
            await endpoint.stop()
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 400))
