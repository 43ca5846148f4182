"""Commands that leave something behind, and an endpoint that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import openai
import pytest
from played_agents import POLICY, QUESTION, run

from asyncrl.environments.agents import sessions as agent_programs
from asyncrl.environments.agents.endpoint import Endpoint
from asyncrl.environments.agents.openai_messages import ChatCall, Turn
from asyncrl.environments.agents.sessions import ClientSettings, command_program

LEAVING = """
import subprocess, sys
row = sys.stdin.read()
apart = sys.argv[1] == "apart"
left = subprocess.Popen(["sleep", "1000"], start_new_session=apart)  # holds stdout and stderr
open(sys.argv[2], "w").write(str(left.pid))
print(0.25)
"""


@pytest.mark.parametrize("place", ["same", "apart"])
def test_a_command_is_over_when_it_exits_whoever_holds_its_pipes(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_programs, "_DRAIN_SECONDS", 0.2)
    program = command_program([sys.executable, "-S", "-c", LEAVING, place, str(tmp_path / "pid")])

    async def scenario() -> None:
        async with asyncio.timeout(60):
            assert await program({}, ClientSettings("http://x", "k", "m", 1)) == 0.25

    try:
        run(scenario())
    finally:  # one with a session of its own lives on
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


async def yes(call: ChatCall) -> Turn:
    del call
    return Turn({"content": "yes"}, 1)


def test_an_endpoint_that_has_died_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        endpoint = Endpoint(POLICY)
        assert await _said(endpoint) == "yes"
        before, serving = endpoint.url, endpoint._serving
        assert serving is not None
        serving.cancel()
        await asyncio.wait([serving])
        assert await _said(endpoint) == "yes"
        assert endpoint.url != before
        await endpoint.stop()

    run(scenario())
    assert "has died and restarts" in caplog.text


async def _said(endpoint: Endpoint) -> str | None:
    """What a new session hears."""
    await endpoint.start()
    key = endpoint.open(yes)
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0)
    chat = await client.chat.completions.create(model="m", messages=[QUESTION])
    await client.close()
    return chat.choices[0].message.content
