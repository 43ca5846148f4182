"""Async reward functions: one worker runs several calls at once, each with its own timeout."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from reward_pools import running

from asyncrl.errors import RewardFailed, RewardTimeout
from asyncrl.rewards.protocol import Began, Call, Scored
from asyncrl.rewards.worker import AT_ONCE, LoadedTerm, Turns, score

SOURCE = """
import asyncio, os, time

meeting = []

async def score(prompt, response, example):
    if response == "meet":
        meeting.append(1)
        while len(meeting) < 8:
            await asyncio.sleep(0.001)
    if response == "hang":
        await asyncio.sleep(600)
    if response == "stubborn":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return 1.0
    if response == "block":
        time.sleep(600)
    if response == "raise":
        raise KeyError("a mistake")
    if response == "cancel":
        raise asyncio.CancelledError
    if response == "die":
        os._exit(5)
    await asyncio.sleep(0.05)
    return float(os.getpid())

def plain(prompt, response, example):
    return 1.0

class Judge:
    async def __call__(self, prompt, response, example):
        await asyncio.sleep(0)
        return 2.0

judge = Judge()

def timed(function):
    return lambda *given: function(*given)

@timed
async def decorated(prompt, response, example):
    assert "127.0.0.1" in os.environ["no_proxy"]
    return await score(prompt, response, example)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("first", ["score", "decorated"])
def test_calls_run_at_once_up_to_the_limit(source: Path, first: str) -> None:
    async def check() -> None:
        functions = [{"name": f"{source}:{name}"} for name in (first, "plain", "judge")]
        if first == "decorated":  # nothing tells of it before the first call
            functions.pop()
        async with running(*functions, concurrency=8, timeout_seconds=60) as pool:
            # Each of the eight returns only if all of them are being computed.
            calls = [asyncio.create_task(pool.score("", "meet", {})) for _ in range(8)]
            calls += [asyncio.create_task(pool.score("", "", {})) for _ in range(4)]
            await asyncio.sleep(0)
            assert (pool.running + pool.waiting, pool.waiting >= 4) == (12, True)
            rewards = await asyncio.gather(*calls)
            assert len({reward.terms[0] for reward in rewards}) == 1
            assert {reward.terms[1:] for reward in rewards} == {(1.0, 2.0)[: len(functions) - 1]}

    asyncio.run(check())


def test_a_call_that_hangs_or_fails_leaves_the_others_and_the_process_alone(source: Path) -> None:
    async def check() -> None:
        async with running({"name": f"{source}:score"}, timeout_seconds=3) as pool:
            before = await pool.score("", "", {})
            responses = ["hang", "raise", "stubborn", "cancel", ""]
            calls = [pool.score("", response, {}) for response in responses]
            results = await asyncio.gather(*calls, return_exceptions=True)
            kinds = [RewardTimeout, RewardFailed, RewardTimeout, RewardFailed]
            assert [type(one) for one in results[:4]] == kinds
            assert "a mistake" in str(results[1])
            assert results[4] == before
            assert await pool.score("", "", {}) == before

    asyncio.run(check())


def test_a_call_that_blocks_or_kills_the_worker_costs_the_others_nothing(source: Path) -> None:
    async def check() -> None:
        function = {"name": f"{source}:score"}
        async with running(function, timeout_seconds=2, max_attempts=2) as pool:
            for culprit, kind in (("block", RewardTimeout), ("die", RewardFailed)):
                calls = [pool.score("", response, {}) for response in ("", culprit, "", "")]
                results = await asyncio.gather(*calls, return_exceptions=True)
                assert [type(one).__name__ for one in results if isinstance(one, Exception)] == [
                    kind.__name__
                ]
                assert isinstance(results[1], kind)

    asyncio.run(check())


def test_built_in_rewards_that_block_take_turns_beside_the_event_loop() -> None:
    """One that waits for its turn has not begun; the others go on."""
    go, began = threading.Event(), list[Began]()
    cores = AT_ONCE["code"]

    async def quick(*_: object) -> float:
        while len(began) < 2 * cores:  # noqa: ASYNC110 - told by threads and tasks
            await asyncio.sleep(0.001)
        assert len(began) == 2 * cores
        go.set()
        return 2.0

    async def last(*_: object) -> float:
        return 3.0

    programs = LoadedTerm(lambda *_: float(go.wait(60)), 1.0, {}, "example", False, "code")
    after = LoadedTerm(last, 1.0, {}, "example", True)

    async def check() -> None:
        turns = Turns()
        calls = [Call(number, "", "", {}) for number in range(3 * cores)]
        terms = [[after, programs]] * (2 * cores) + [
            [LoadedTerm(quick, 1.0, {}, "example", True)]
        ] * cores
        scores = [score(*both, began.append, turns) for both in zip(calls, terms, strict=True)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*scores)
        for answer in answers[: 2 * cores]:
            assert isinstance(answer, Scored)
            assert answer.terms == (3.0, 1.0)

    asyncio.run(check())
