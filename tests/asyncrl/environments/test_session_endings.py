"""How sessions end in a real worker process: each is closed once, and every call is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.protocol import Action
from asyncrl.environments.workers.lane import EnvironmentLane, SessionLost
from asyncrl.environments.workers.messages import Answer, Failed, Restore, Restored, Setup
from asyncrl.environments.workers.pool import EnvironmentFailed, EnvironmentPool, Session
from asyncrl.environments.workers.worker import _Worker
from asyncrl.rewards.config import RewardConfig

NOTED = """
import asyncio, pathlib, time


class Noted:
    name = "late"  # until it is reset

    def __init__(self, folder):
        self.folder, self.said = pathlib.Path(folder), []

    def note(self, what):
        with (self.folder / "notes").open("a") as file:
            file.write(f"{self.name} {what}\\n")

    async def reset(self, row, seed):
        self.name = row["name"]
        self.note("reset")

    async def step(self, action):
        self.said.append(action.text)
        if action.text == "block":  # the worker's event loop
            self.note("blocks")
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        if action.text == "wait":
            self.note("waits")
            await asyncio.sleep(1000)
        while action.text == "stay":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
        if action.text == "raise":
            raise ValueError("half done")
        if action.text == "object":
            return ([{"role": "user", "content": object()}], False)
        return (" ".join(self.said), False)

    async def close(self):
        self.note("closed")


class InThreads(Noted):
    def reset(self, row, seed):
        self.name = row["name"]

    def step(self, action):
        return asyncio.run(super().step(action))

    def snapshot(self):
        return list(self.said)

    def restore(self, state):
        self.said = list(state)
"""


def turn(text: str) -> Action:
    return Action(text, [1, 2], {"role": "assistant", "content": text})


def noted(folder: Path) -> Counter[str]:
    file = folder / "notes"
    return Counter(file.read_text().splitlines() if file.exists() else [])


async def reached(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - another process says when
        await asyncio.sleep(0.01)


def play(
    folder: Path, name: str, scenario: Callable[[EnvironmentPool], Awaitable[None]], **values: float
) -> None:
    @asynccontextmanager
    async def running() -> AsyncIterator[EnvironmentPool]:
        (folder / "noted.py").write_text(NOTED)
        config = EnvironmentConfig(
            name=f"{folder / 'noted.py'}:{name}",
            args={"folder": str(folder)},
            **({"step_timeout_seconds": 600, "reset_timeout_seconds": 600} | values),  # type: ignore[arg-type]
        )
        pool = EnvironmentPool(config, RewardConfig())
        await pool.start()
        try:
            yield pool
            await pool.close(grace_seconds=60)
        finally:
            await pool.close()

    async def bounded() -> None:
        async with asyncio.timeout(120), running() as pool:
            await scenario(pool)

    asyncio.run(bounded())


async def failure_of(work: Awaitable[object]) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as caught:
        await work
    return caught.value


async def sent() -> None:
    """Let calls that were just made reach the worker's pipe."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_calls_that_are_read_together_with_their_close_are_answered_and_closed_once(
    tmp_path: Path,
) -> None:
    """Without an answer the process would be taken to hang, and all of its sessions be lost."""

    async def scenario(pool: EnvironmentPool) -> None:
        blocker, other, third = [await pool.open({"name": name}, 1) for name in "abc"]
        blocking = asyncio.create_task(blocker.step(turn("block")))
        await reached(lambda: noted(tmp_path)["a blocks"])
        opening = asyncio.create_task(pool.open({"name": "late"}, 1))
        stepping = asyncio.create_task(other.step(turn("wait")))
        await sent()
        for task in (opening, stepping):
            task.cancel()
        await asyncio.wait([opening, stepping])
        other.close()
        (tmp_path / "go").touch()
        assert (await blocking).observation == "block"
        lane = blocker.lane
        await reached(lambda: not lane.sent)
        await reached(lambda: noted(tmp_path)["late closed"] and noted(tmp_path)["b closed"])
        waiting = asyncio.create_task(third.step(turn("wait")))
        await reached(lambda: noted(tmp_path)["c waits"])
        waiting.cancel()
        third.close()
        assert (await failure_of(blocker.step(turn("object")))).reason == "wrong_type"
        assert blocker.lost
        await reached(lambda: noted(tmp_path)["a closed"])
        assert pool.counts.replaced_workers == 0
        await pool.open({"name": "open at the end"}, 1)

    play(tmp_path, "Noted", scenario)
    closed = {line: n for line, n in noted(tmp_path).items() if line.endswith("closed")}
    assert closed == dict.fromkeys(
        [f"{name} closed" for name in ("a", "b", "c", "late", "open at the end")], 1
    )


def test_what_restores_goes_back_to_before_a_step_that_has_failed(tmp_path: Path) -> None:
    async def failed(session: Session, action: Action) -> str:
        error = await failure_of(session.step(action))
        assert not session.lost
        return error.reason

    async def scenario(pool: EnvironmentPool) -> None:
        session = await pool.open({"name": "a"}, 1)
        await session.step(turn("x"))
        assert await failed(session, turn("raise")) == "raised"
        await session.restore(1)
        assert (await session.step(turn("y"))).observation == "x y"
        assert await failed(session, turn("object")) == "wrong_type"
        await session.restore(1)
        unsendable = Action("z", [1], {}, [{"name": "add", "arguments": {"a": 10**30}}])
        assert await failed(session, unsendable) == "wrong_type"
        await session.restore(1)  # that turn has never begun
        assert (await session.step(turn("z"))).observation == "x z"
        hanging = await pool.open({"name": "b"}, 1)
        assert (await failure_of(hanging.step(turn("wait")))).reason == "timeout"
        assert hanging.lost, "its thread is in the step still"
        assert (await session.step(turn("w"))).observation == "x z w"

    play(tmp_path, "InThreads", scenario, step_timeout_seconds=5.0)


def test_a_call_that_must_be_alone_is_and_those_behind_it_follow_even_if_it_is_cancelled() -> None:
    async def scenario() -> None:
        lane = EnvironmentLane(EnvironmentConfig(name="guessing"), RewardConfig())
        lane.ready = True  # its process, which does not run, reads nothing

        def call(number: int, *, alone: bool = False) -> asyncio.Task[Answer]:
            lane.sessions.add(number)
            return asyncio.create_task(lane.call(Restore(number, number, 0), 60.0, alone=alone))

        async def answered(number: int) -> list[int]:
            lane._take_in(Restored(number))
            lane.feed()
            await sent()
            return list(lane.sent)

        calls = [call(0), call(1), call(2, alone=True), call(3, alone=True), call(4), call(5)]
        await sent()
        assert list(lane.sent) == [0, 1]
        assert await answered(0) == [1]
        calls[2].cancel()
        assert await answered(1) == [3]
        calls[3].cancel()
        await sent()
        assert list(lane.sent) == [3]  # it still runs
        assert await answered(3) == [4, 5]
        calls += [call(6, alone=True), call(7)]
        await sent()
        assert list(lane.sent) == [4, 5]
        calls[6].cancel()
        await sent()
        assert list(lane.sent) == [4, 5, 7]
        await lane.close()
        for lost in await asyncio.gather(*calls[4:6], calls[7], return_exceptions=True):
            assert isinstance(lost, SessionLost)
            assert lost.suspects == 3

    asyncio.run(scenario())


def test_a_call_that_waits_while_its_session_ends_is_not_sent() -> None:
    async def scenario() -> None:
        lane = EnvironmentLane(EnvironmentConfig(name="guessing"), RewardConfig())
        lane.ready = True  # its process, which does not run, reads nothing
        lane.sessions |= {0, 1}
        calls = [
            asyncio.create_task(lane.call(Restore(number, session, 0), 60.0, alone=number == 1))
            for number, session in ((0, 0), (1, 1), (2, 0))
        ]
        await sent()
        lane._take_in(Failed(0, "raised", ""))
        lane.feed()
        lane._take_in(Restored(1))
        lane.feed()
        await sent()
        assert not lane.sent
        with pytest.raises(SessionLost, match="no longer has its session, which has failed"):
            await calls[2]

    asyncio.run(scenario())


class _SentMessages:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_a_step_that_crosses_the_failure_of_its_session_is_answered() -> None:
    channel = _SentMessages()
    worker = _Worker(channel, lambda: None, Setup("x", {}, "", 1.0, 1.0))  # type: ignore[arg-type]
    worker._begin(Restore(7, 3, 0))  # the worker has closed session 3
    assert channel.sent == [Failed(7, "raised", "its session has failed in an earlier call")]


def test_a_step_that_cannot_be_cancelled_is_given_up_while_others_are_answered(
    tmp_path: Path,
) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        stubborn, other = [await pool.open({"name": name}, 1) for name in "ab"]

        async def play_on() -> None:
            while True:
                await other.step(turn("x"))

        staying = asyncio.create_task(failure_of(stubborn.step(turn("stay"))))
        with pytest.raises(SessionLost):
            await play_on()
        assert (await staying).reason == "timeout"

    play(tmp_path, "Noted", scenario, step_timeout_seconds=0.5)
