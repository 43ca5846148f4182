"""Plays environments of the real verifiers through the adapter, in verifiers' own interpreter.

What it has seen, as JSON, is compared in tests/asyncrl/environments/adapters. One process plays
all of them, because loading verifiers takes seconds.
"""

import asyncio
import json

from aiohttp import web

from asyncrl.environments.agents.openai_messages import POLICY
from asyncrl.environments.protocol import Action, checked_reset, checked_step, traits_of
from asyncrl.environments.registry import load_factory
from asyncrl.errors import RewardError


def act(text, *calls):
    written = [
        {"id": f"call{n:05}", "type": "function", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text} | ({"tool_calls": written} if calls else {})
    return Action(text, [1], message)


async def judge(request):
    """A model of somebody else: says yes to 42."""
    asked = (await request.json())["messages"][-1]["content"]
    said = "yes" if "42" in str(asked) else "no"
    message = {"role": "assistant", "content": said}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
    return web.json_response(head | {"choices": [choice], "usage": usage})


async def episode(factory, index, *turns):
    """Messages of the prompt and of each answer, then the reward."""
    environment = factory()
    seen = [[m["content"] for m in checked_reset(await environment.reset({"idx": index}, 0))]]
    try:
        for turn in turns:
            result = checked_step(
                await environment.step(turn if isinstance(turn, Action) else act(turn))
            )
            seen.append([m["content"] for m in result.observation or ()])
            if result.done:
                return [*seen, result.reward]
    except RuntimeError as error:
        return [*seen, str(error)]
    finally:
        await environment.close()
    return seen


def refused(name, args):
    try:
        load_factory(name, args)
    except RewardError as error:
        return str(error)
    return "not refused"


async def mixed(url):
    elsewhere = {"base_url": url, "api_key_var": "NO_KEY", "model": "judge"}
    plain = load_factory("verifiers:tiny_mixed", {})
    env = {"taskset": {"task": {"sceptic": elsewhere}}}
    own_judge = load_factory("verifiers:tiny_mixed", {"env": env})
    plugged = [{"id": "reference", **elsewhere}]
    env = {"taskset": {"task": {"judges": plugged}}, "agent": {"max_turns": 2}}
    with_plugged = load_factory("verifiers:tiny_mixed", {"env": env})
    in_time = load_factory(
        "verifiers:tiny_mixed", {"env": {"agent": {"timeout": {"scoring": 0.05}}}}
    )
    sampling = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 64, "reasoning_effort": "low"}
    settings = {"sampling": sampling, "max_output_tokens": 2}
    run = {"temperature": 1.0, "max_tokens": 64}
    own_settings = load_factory("verifiers:tiny_mixed", {"env": {"agent": settings}, POLICY: run})
    untold = load_factory("verifiers:tiny_mixed", {"env": {"agent": settings}})
    found = {
        "notes": [one.notes for one in (plain, untold, own_settings)],
        "at most two tokens": await episode(own_settings, 3, "7", "6", "8"),
        "rows": plain.rows(),
        "replay": traits_of(plain()).replay,
        "right": await episode(plain, 1, "2"),
        "wrong": await episode(plain, 1, "3 or so"),
        "messages": await episode(plain, 4, "2"),
        "broken reward": await episode(plain, 0, "break"),
        "late reward": await episode(in_time, 0, "sleep"),
        "no such task": await outcome(plain, 99),
        "games": await asyncio.gather(*(episode(plain, 3, *turns) for turns in ("385", "5", "9"))),
        "stopped": await episode(plain, 3, "7", "stop"),
        "judged": [await episode(own_judge, 0, text) for text in ("42", "4")],
        "plugged judge": [await episode(with_plugged, 0, text) for text in ("42", "4")],
        "at most two turns": await episode(with_plugged, 3, "7", "6", "8"),
    }
    for factory in (plain, own_judge, with_plugged, in_time, own_settings, untold):
        await factory.close()
    return found


async def outcome(factory, index):
    try:
        return await episode(factory, index)
    except Exception as error:  # noqa: BLE001 - its text is what is looked at
        return f"{type(error).__name__}: {error}"


async def tools():
    factory = load_factory("verifiers:tiny_tools", {})
    environment = factory()
    await environment.reset({"idx": 0}, 0)
    schemas = [tool["function"] for tool in traits_of(environment).tools]
    add, fail = (schema["name"] for schema in schemas)
    calls = (add, {"a": 5, "b": 7}), (fail, {}), (add, {"a": "x"}), ("subtract", {})
    answered = checked_step(await environment.step(act("", *calls)))
    end = checked_step(await environment.step(act("12")))
    await factory.close()
    return {
        "names": [add, fail],
        "required": schemas[0]["parameters"]["required"],
        "answers": [(m["role"], m["tool_call_id"], m["content"]) for m in answered.observation],
        "end": [end.done, end.reward],
    }


def critic(url):
    client = {"type": "eval", "base_url": url, "api_key_var": "NO_KEY"}
    return {"model": "critic", "client": client}


async def pairs(url):
    args = {"agent": "solver", "tasks": 3, "env": {"critic": critic(url)}}
    factory = load_factory("verifiers:tiny_pairs", args)
    found = {
        "rows": [row["prompt"] for row in factory.rows()],
        "solved": [await episode(factory, 2, text) for text in ("42", "43")],
    }
    await factory.close()
    return found


async def everything():
    application = web.Application()
    application.router.add_post("/v1/chat/completions", judge)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = site._server.sockets[0].getsockname()
    url = f"http://{host}:{port}/v1"
    found = {
        "mixed": await mixed(url),
        "pairs": await pairs(url),
        "tools": await tools(),
        "refused": {
            "two agents": refused("verifiers:tiny_pairs", {"tasks": 1}),
            "client": refused(
                "verifiers:tiny_mixed", {"env": {"agent": {"client": critic(url)["client"]}}}
            ),
            "no model": refused("verifiers:tiny_pairs", {"agent": "solver"}),
            "no end": refused(
                "verifiers:tiny_pairs",
                {"agent": "solver", "env": {"critic": critic(url)}},
            ),
            "no taskset": refused("verifiers:no-such-taskset", {}),
            "setting": refused("verifiers:tiny_mixed", {"env": {"agnt": {}}}),
        },
    }
    await runner.cleanup()
    return found


class Play:
    """An environment whose first text is what was seen."""

    async def reset(self, row, seed):
        return json.dumps(await everything())

    def step(self, action):
        raise NotImplementedError
