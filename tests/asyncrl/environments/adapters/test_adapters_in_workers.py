"""Adapters in a real worker process: what they declare is what the pool goes back by."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.protocol import Action
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.errors import RewardError
from asyncrl.rewards.config import RewardConfig

COUNTER = '''
class Counter:
    def reset(self, start=0, **row):
        self.total = start
        return f" Start: {start}."
    async def increase(self, by: int) -> str:
        """Increase the counter.

        Args:
            by: how much.
        """
        self.total += by
        return str(self.total)
    def get_reward(self) -> float:
        return self.total / 10
'''


def act(text: str, **arguments: Any) -> Action:
    calls = [{"id": "abc123def", "name": "increase", "arguments": arguments}] if arguments else []
    return Action(text, [1], {"role": "assistant", "content": text}, calls)


def in_worker(name: str, args: dict[str, Any], play: Any) -> Any:
    async def all_of_it() -> Any:
        config = EnvironmentConfig(name=name, args=args, step_timeout_seconds=60)
        pool = EnvironmentPool(config, RewardConfig())
        await pool.start()
        try:
            return await play(pool)
        finally:
            await pool.close()

    bounded: Coroutine[Any, Any, Any] = asyncio.wait_for(all_of_it(), 180)
    return asyncio.run(bounded)


def test_gymnasium_goes_back_by_its_copies() -> None:
    async def play(pool: EnvironmentPool) -> Any:
        session = await pool.open({"prompt": "p", "seed": 5}, 1, example_id="lake")
        assert session.traits.restores
        first = [await session.step(act(word)) for word in ("right", "down", "left")]
        await session.restore(1)
        again = [await session.step(act(word)) for word in ("down", "left")]
        return first[1:], again

    args = {"actions": ["left", "down", "right", "up"], "make": {"is_slippery": True}}
    first, again = in_worker("gymnasium:FrozenLake-v1", args, play)
    assert first == again


def test_a_class_for_trl_is_made_again_with_the_same_answers(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(COUNTER)

    async def play(pool: EnvironmentPool) -> Any:
        found = []
        for _ in "ab":
            session = await pool.open({"prompt": "Count.", "start": 2}, 1, example_id="count")
            answer = await session.step(act("", by=3))
            end = await session.step(act("5"))
            found.append((session.first, session.traits.replay, answer.observation, end.done))
            found.append((answer.reward + end.reward,))
        return found

    found = in_worker(f"trl:{source}:Counter", {}, play)
    assert found[:2] == found[2:]
    first, replay, observation, done = found[0]
    assert first == [{"role": "user", "content": "Count. Start: 2."}]
    assert (replay, observation[0]["content"], done) == ("deterministic", "5", True)
    assert found[1] == (pytest.approx(0.5),)


def test_what_an_adapter_refuses_is_said_before_a_sample_begins() -> None:
    async def play(pool: EnvironmentPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(RewardError, match="has Box actions"):
        in_worker("gymnasium:Pendulum-v1", {}, play)
