"""Agents whose function hangs, in a real worker process: counted, shown, and bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.protocol import Action
from asyncrl.environments.workers.lane import SessionLost
from asyncrl.environments.workers.pool import EnvironmentFailed, EnvironmentPool, Session
from asyncrl.rewards.config import RewardConfig

AGENT = """
import json, pathlib, time, urllib.request


def solve(row, client):
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Authorization": "Bearer " + client.api_key}
    url = client.base_url + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
    deadline = time.monotonic() + 400
    while row["hangs"] and time.monotonic() < deadline and not pathlib.Path(row["until"]).exists():
        time.sleep(0.05)
    return answer["usage"]["total_tokens"]
"""
TURN = Action("hi", [1, 2], {"role": "assistant", "content": "hi"}, context_length=7)


async def opened(pool: EnvironmentPool, until: Path, *, hangs: bool) -> Session:
    return await pool.open({"hangs": hangs, "until": str(until)}, 1, example_id="add-17")


async def reached(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - another process says when
        await asyncio.sleep(0.01)


def test_threads_that_hang_are_counted_and_their_process_is_replaced_after_several(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    config = EnvironmentConfig(
        name=f"agent:{tmp_path / 'mine.py'}:solve", step_timeout_seconds=1, reset_timeout_seconds=60
    )

    async def hang(pool: EnvironmentPool, until: Path) -> None:
        session = await opened(pool, until, hangs=True)
        with pytest.raises(EnvironmentFailed, match="within 1 s"):
            await session.step(TURN)

    async def scenario() -> None:
        pool = EnvironmentPool(config, RewardConfig())
        await pool.start()
        try:
            never, released = tmp_path / "never", tmp_path / "released"
            innocent = await opened(pool, never, hangs=False)
            await asyncio.gather(*(hang(pool, never) for _ in range(3)), hang(pool, released))
            await reached(lambda: pool.counts.hanging == 4)
            assert (pool.counts.replaced_workers, innocent.lost) == (0, False)
            released.touch()
            lane = innocent.lane
            await reached(lambda: lane._hanging == 3)  # one has ended after all
            assert (await innocent.step(TURN)).reward == 9.0, "the endpoint's usage"
            waiting = await opened(pool, never, hangs=False)
            await asyncio.gather(hang(pool, never), hang(pool, never))
            await reached(lambda: pool.counts.replaced_workers == 1)
            assert pool.counts.hanging == 6
            with pytest.raises(SessionLost) as lost:
                await waiting.step(TURN)
            assert lost.value.suspects == 0
            again = await opened(pool, never, hangs=False)
            assert (await again.step(TURN)).done
        finally:
            await pool.close()

    async def bounded() -> None:
        async with asyncio.timeout(180):
            await scenario()

    asyncio.run(bounded())


def test_a_sample_that_is_dropped_while_its_agent_works_ends_the_agent(tmp_path: Path) -> None:
    """Also if its next call is a long way off: nobody would answer it."""
    (tmp_path / "mine.py").write_text(
        "import asyncio, pathlib\n"
        "class Slow:\n"
        "    def reset(self, row, seed): self.row = row\n"
        "    async def step(self, action):\n"
        "        pathlib.Path(self.row['began']).touch()\n"
        "        await asyncio.sleep(1000)\n"
        "    async def close(self): pathlib.Path(self.row['closed']).touch()\n"
    )
    config = EnvironmentConfig(name=f"{tmp_path / 'mine.py'}:Slow", step_timeout_seconds=600)

    async def scenario() -> None:
        pool = EnvironmentPool(config, RewardConfig())
        await pool.start()
        try:
            began, closed = tmp_path / "began", tmp_path / "closed"
            session = await pool.open({"began": str(began), "closed": str(closed)}, 1)
            step = asyncio.create_task(session.step(TURN))
            await reached(began.exists)
            step.cancel()
            session.close()
            await reached(closed.exists)
        finally:
            await pool.close()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())
