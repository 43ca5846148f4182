"""Who may ask the endpoint of agents, how much and for how long: at its ASGI side."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncrl.engine.config import SamplingConfig
from asyncrl.environments.agents import endpoint as module
from asyncrl.environments.agents.endpoint import MAX_BODY_BYTES, Endpoint
from asyncrl.environments.agents.openai_messages import ChatCall, PolicySettings, Turn
from asyncrl.environments.agents.sessions import adapter
from asyncrl.environments.config import EnvironmentConfig, with_policy
from asyncrl.errors import RewardError

ASKED = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()


async def answer(call: ChatCall) -> Turn:
    del call
    return Turn({"role": "assistant", "content": "!"}, 1)


async def asked(
    endpoint: Endpoint,
    key: str | None,
    parts: list[bytes],
    *,
    path: str = "/v1/chat/completions",
    whole: bool = False,
) -> tuple[int, dict[str, Any], int]:
    """Status, body, and how many parts of the request were read; after the last one none comes."""
    sent, read = list[dict[str, Any]](), 0
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}

    async def receive() -> dict[str, Any]:
        nonlocal read
        if read >= len(parts):
            await asyncio.Event().wait()
        read += 1
        return {"type": "http.request", "body": parts[read - 1], "more_body": not whole}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await endpoint(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]), read


@pytest.mark.parametrize("key", [None, "", "sk-another", "closed"])
def test_nothing_is_read_of_who_has_no_key(key: str | None) -> None:
    async def scenario() -> None:
        endpoint = Endpoint(PolicySettings())
        open_key, closed = endpoint.open(answer), endpoint.open(answer)
        assert len({open_key, closed}) == 2
        endpoint.close(closed)
        status, body, read = await asked(endpoint, closed if key == "closed" else key, [ASKED])
        assert (status, read) == (401, 0)
        assert open_key not in json.dumps(body)

    asyncio.run(scenario())


def test_a_request_is_bounded_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        endpoint = Endpoint(PolicySettings())
        key = endpoint.open(answer)
        part = b" " * (1 << 20)
        status, _, read = await asked(endpoint, key, [part] * 1000)
        assert (status, read) == (413, MAX_BODY_BYTES // len(part) + 1)
        monkeypatch.setattr(module, "_BODY_SECONDS", 0.01)
        async with asyncio.timeout(60):
            status, body, _ = await asked(endpoint, key, [ASKED[:5]])
        assert (status, "did not arrive" in body["error"]["message"]) == (408, True)

    asyncio.run(scenario())


def test_half_a_character_is_refused_and_a_whole_one_is_not() -> None:
    """A tool that cuts its output after so many UTF-16 units leaves half an emoji."""

    async def scenario() -> None:
        endpoint = Endpoint(PolicySettings())
        key = endpoint.open(answer)
        for text, expected in [("\\ud83d", 400), ("\\ude00 x", 400), ("\\ud83d\\ude00", 200)]:
            said = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()
            status, body, _ = await asked(endpoint, key, [said], whole=True)
            assert status == expected
            assert ("half a character" in json.dumps(body)) == (expected == 400)

    asyncio.run(scenario())


def test_it_listens_on_a_loopback_address() -> None:
    async def scenario() -> None:
        endpoint = Endpoint(PolicySettings())
        await endpoint.start()
        try:
            assert endpoint.url.startswith("http://127.0.0.1:")
        finally:
            await endpoint.stop()

    asyncio.run(scenario())


def test_parameters_may_be_ignored_and_that_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "temperature": 0.2, "seed": 3}

    async def scenario() -> None:
        endpoint = Endpoint(PolicySettings(), ignore=("temperature", "seed"))
        key = endpoint.open(answer)
        for one in (body, {**body, "seed": None}, {**body, "temperature": 1.0}):
            status, _, _ = await asked(endpoint, key, [json.dumps(one).encode()], whole=True)
            assert status == 200
        assert endpoint.ignored == {"temperature": 2, "seed": 2}
        for other in ({"n": 2}, {"logprobs": True}, {"stop": ["x"]}):
            status, _, _ = await asked(
                endpoint, key, [json.dumps({**body, **other}).encode()], whole=True
            )
            assert status == 400
        strict = Endpoint(PolicySettings())
        key = strict.open(answer)
        status, refusal, _ = await asked(strict, key, [json.dumps(body).encode()], whole=True)
        assert "environment.args: {ignore: [temperature]}" in refusal["error"]["message"]

    asyncio.run(scenario())
    assert caplog.text.count("temperature=0.2") == 1
    with pytest.raises(RewardError, match="cannot be ignored"):
        adapter("command", {"command": ["true"], "ignore": ["n"]})
    made = adapter("command", {"command": ["true"], "ignore": ["seed"]})()
    assert made._endpoint.ignore == ("seed",)


def test_the_settings_of_the_run_reach_the_endpoint_of_its_agents() -> None:
    args = {"command": ["true"], "ignore": ["seed"]}
    written = EnvironmentConfig(name="agent:command", args=args)
    sampling = SamplingConfig(temperature=0.7, top_k=5, stop=["END"], max_tokens=32)
    given = with_policy(written, sampling, "models/mine", (3, 9))
    assert written.args == args, "the configuration of the run is as written"
    endpoint = adapter("command", given.args)()._endpoint
    assert endpoint.ignore == ("seed",)
    assert endpoint.policy == PolicySettings(
        model="mine", temperature=0.7, top_k=5, stop=("END",), stop_tokens=(3, 9), max_tokens=32
    )
