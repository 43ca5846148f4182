"""Plays environments behind a real OpenEnv server through the adapter, in OpenEnv's interpreter.

What it has seen, as JSON, is compared in tests/asyncrl/environments/adapters. The server runs in a
thread of the same process, because loading OpenEnv takes seconds.
"""

import asyncio
import json

from worlds import served

from asyncrl.environments.protocol import Action, checked_reset, checked_step, traits_of
from asyncrl.environments.registry import load_factory
from asyncrl.errors import RewardError


def act(text, *calls):
    written = [
        {"id": f"call{n:05}", "name": name, "arguments": given}
        for n, (name, given) in enumerate(calls)
    ]
    return Action(text, [1], {"role": "assistant", "content": text}, written)


async def session(factory, row, seed, *turns):
    """What is shown first, and what each turn is answered with."""
    environment = factory()
    try:
        seen = [checked_reset(await environment.reset(row, seed))]
        for turn in turns:
            result = checked_step(
                await environment.step(turn if isinstance(turn, Action) else act(turn))
            )
            shown = result.observation
            if isinstance(shown, list):
                shown = [message["content"] for message in shown]
            seen.append([shown, result.reward, result.done])
            if result.done:
                break
    except Exception as error:  # noqa: BLE001 - its text is what is looked at
        return f"{type(error).__name__}: {error}"
    finally:
        await environment.close()
    return seen


async def guesses(url):
    args = {"base_url": f"{url}/guess", "action": "text", "observation": "hint"}
    factory = load_factory("openenv:generic", args | {"replay": "deterministic"})
    row = {"reset": {"high": 3}}
    sessions = await asyncio.gather(*(session(factory, row, seed, *"0123") for seed in (1, 1, 2)))
    whole = load_factory("openenv:generic", args | {"observation": None})
    no_field = load_factory("openenv:generic", args | {"observation": "board"})
    return {
        "sessions": sessions,
        "whole": (await session(whole, {}, 1, "99"))[1][0],
        "no field": await session(no_field, {}, 1),
        "server's error": await session(factory, row, 1, "three"),
        "goes back": [traits_of(one()).goes_back for one in (factory, whole)],
        "nobody": await session(
            load_factory("openenv:generic", args | {"base_url": "http://127.0.0.1:9"}), {}, 1
        ),
    }


async def code(url):
    args = {"base_url": f"{url}/code", "action": "worlds:code_of", "observation": "stdout"}
    args["max_result_characters"] = 40
    factory = load_factory("openenv:worlds:CodeClient", args)
    one = "```python\nx = 20\nprint(x + seed)\n```"
    return await session(
        factory,
        {},
        22,
        one,
        "```\nprint(x)\n```",
        "```\nz = 1\n```",
        "```\nprint('n' * 99)\n```",
        "```\nprint(y)\n```",
    )


async def shop(url):
    factory = load_factory("openenv:tools", {"base_url": f"{url}/shop"})
    environment = factory()
    first = checked_reset(await environment.reset({"prompt": "Buy two."}, 1))
    tools = [tool["function"] for tool in traits_of(environment).tools]
    await environment.close()
    calls = ("price", {"item": "pear", "count": 2}), ("buy", {"item": "pear"})
    wrong = ("price", {}), ("steal", {}), ("buy", {"item": "nothing"})
    broken = Action("", [1], {}, [{"id": "call00000", "name": "buy", "error": "no JSON"}])
    buy = ("buy", {"item": "fig"})
    return {
        "first": first,
        "tools": {tool["name"]: tool["description"] for tool in tools},
        "required": tools[0]["parameters"]["required"],
        "bought": await session(factory, {}, 1, act("", *calls), broken, act("", buy, buy)),
        "at once": await session(factory, {}, 1, act("", buy, buy, buy)),
        "answered": await session(factory, {}, 1, act("", *wrong), "I have no money"),
    }


def refused(name, args):
    try:
        load_factory(name, args)
    except RewardError as error:
        return str(error)
    return "not refused"


async def everything(url):
    return {
        "guesses": await guesses(url),
        "code": await code(url),
        "shop": await shop(url),
        "refused": [
            refused("openenv:generic", {}),
            refused("openenv:generic", {"base_url": url}),
            refused("openenv:tools", {"base_url": url, "action": "text"}),
            refused("openenv:worlds:NoClient", {"base_url": url, "action": "text"}),
        ],
    }


class Play:
    """An environment whose first text is what was seen."""

    async def reset(self, row, seed):
        with served() as url:
            return json.dumps(await everything(url))

    def step(self, action):
        raise NotImplementedError
