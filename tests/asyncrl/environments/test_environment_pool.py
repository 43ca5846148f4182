"""Environments in real worker processes: those that behave, and those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from local_environments import LocalPool

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.protocol import Action, Traits
from asyncrl.environments.workers.lane import SessionLost
from asyncrl.environments.workers.pool import EnvironmentFailed, EnvironmentPool, Session
from asyncrl.errors import RewardError
from asyncrl.rewards.config import RewardConfig

HOSTILE = """
import asyncio, os, signal, sys, threading, time


class Base:
    replay = "deterministic"

    def reset(self, row, seed):
        self.row, self.seed, self.said = row, seed, []
        if row.get("at") == "reset":
            return self.behave(row["kind"])
        return f"hello {row['prompt']}"

    def behave(self, kind):
        if kind == "hang":
            time.sleep(1000)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            sys.exit(3)
        if kind == "raise":
            raise ValueError("the user's own words")
        if kind == "nan":
            return ("x", False, float("nan"))
        if kind == "type":
            return 7
        if kind == "object":
            return ([{"role": "user", "content": object()}], False)
        if kind == "huge":
            return ("x" * (70 << 20), False)
        if kind == "fork":
            return (f"forked {min(1, os.fork())}", False)
        if kind == "print":
            print("noise " * 10000 * 30)
            return ("printed", False)
        if kind == "bomb":
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
        return ("fine", False)


class Sync(Base):
    def step(self, action):
        self.said.append(action.text)
        if action.text != "ok":
            return self.behave(action.text)
        place = threading.current_thread().ident if self.row.get("threads") else os.getpid()
        return {"observation": f"{self.seed} {len(self.said)} {place}", "reward": 0.5}


class Async(Base):
    replay = "recorded"

    async def step(self, action):
        if action.text == "block":
            time.sleep(1000)
        if action.text == "wait":
            await asyncio.sleep(1000)
        await asyncio.sleep(0)
        return (f"later {action.text}", action.text == "end", 1.0)


class Saved(Base):
    replay = None

    def snapshot(self):
        return list(self.said)

    def restore(self, state):
        self.said = list(state)

    def step(self, action):
        self.said.append(action.text)
        return (" ".join(self.said), False)
"""


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario

    asyncio.run(bounded())


@asynccontextmanager
async def running(folder: Path, name: str, **values: Any) -> AsyncIterator[EnvironmentPool]:
    (folder / "hostile.py").write_text(HOSTILE)
    rewards = values.pop("rewards", {})
    calls = values.pop("calls", [])
    settings = {"step_timeout_seconds": 60, **values}
    config = EnvironmentConfig(name=f"{folder / 'hostile.py'}:{name}", **settings)
    pool = EnvironmentPool(
        config, RewardConfig.model_validate(rewards), lambda *call: calls.append(call)
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def turn(text: str) -> Action:
    return Action(text, [1, 2], {"role": "assistant", "content": text})


async def opened(pool: EnvironmentPool, seed: int = 1, **row: Any) -> Session:
    return await pool.open({"prompt": "p", **row}, seed, example_id="add-17")


async def failure_of(work: Coroutine[Any, Any, Any]) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as caught:
        await work
    assert caught.value.function == "environment"
    return caught.value


def test_many_sessions_share_a_process_each_in_a_thread_of_its_own(tmp_path: Path) -> None:
    calls: list[tuple[str, float]] = []

    async def scenario() -> None:
        async with running(tmp_path, "Sync", calls=calls) as pool:
            some = await asyncio.gather(*(opened(pool, seed, threads=True) for seed in range(5)))
            assert {one.first for one in some} == {"hello p"}
            assert some[0].traits == Traits("deterministic")
            answers = [[await one.step(turn("ok")) for one in some] for _ in range(2)]
            said = [[str(step.observation).split() for step in row] for row in answers]
            assert [words[:2] for words in said[1]] == [[str(seed), "2"] for seed in range(5)]
            threads = [[words[2] for words in row] for row in said]
            assert threads[0] == threads[1]
            assert len(set(threads[0])) == 5
            assert [step.reward for step in answers[0]] == [0.5] * 5
            for one in some:
                one.close()
            assert pool.steps == 10
            assert [method for method, _ in calls] == ["reset"] * 5 + ["step"] * 10
            assert pool.step_seconds == pytest.approx(sum(took for _, took in calls[5:]))

    play(scenario())


def test_a_failing_environment_costs_its_own_sample_only(tmp_path: Path) -> None:
    expected = {
        "raise": ("raised", "the user's own words"),
        "exit": ("raised", "SystemExit"),
        "nan": ("not_finite", "finite in float32"),
        "type": ("wrong_type", "step must return"),
        "object": ("wrong_type", "cannot be sent"),
        "huge": ("too_long", "bytes, more than"),
    }

    async def scenario() -> None:
        async with running(tmp_path, "Sync") as pool:
            innocent = await opened(pool)
            before = str((await innocent.step(turn("ok"))).observation).split()[2]
            for kind, (reason, said) in expected.items():
                error = await failure_of((await opened(pool)).step(turn(kind)))
                assert error.reason == reason
                assert said in str(error)
                assert "hostile.py:Sync' of example 'add-17'" in str(error)
            error = await failure_of(opened(pool, at="reset", kind="nan"))
            assert (error.reason, "reset must return" in str(error)) == ("wrong_type", True)
            unsendable = Action("x", [1], {}, [{"name": "add", "arguments": {"a": 10**30}}])
            error = await failure_of((await opened(pool)).step(unsendable))
            assert (error.reason, "the turn cannot be sent" in str(error)) == ("wrong_type", True)
            talker = await opened(pool)
            assert (await talker.step(turn("print"))).observation == "printed"
            assert (await talker.step(turn("fork"))).observation == "forked 1"
            after = str((await innocent.step(turn("ok"))).observation).split()
            assert after[1:] == ["2", before]  # the same process, nobody has disturbed it

    play(scenario())


def test_a_thread_that_hangs_is_left_behind_and_the_process_replaced_after_several(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "Sync", step_timeout_seconds=0.3) as pool:
            innocent = await opened(pool)
            hanging = [await opened(pool) for _ in range(5)]
            errors = await asyncio.gather(
                *(failure_of(one.step(turn("hang"))) for one in hanging[:4])
            )
            assert {error.reason for error in errors} == {"timeout"}
            assert "within 0.3 s (environment.step_timeout_seconds)" in str(errors[0])
            assert not innocent.lost
            assert (await innocent.step(turn("ok"))).reward == 0.5
            await failure_of(hanging[4].step(turn("hang")))
            with pytest.raises(SessionLost):  # too many threads hang in its process
                await innocent.step(turn("ok"))
            assert innocent.lost
            assert (await (await opened(pool)).step(turn("ok"))).reward == 0.5

    play(scenario())


def test_a_dead_process_is_replaced_and_says_who_was_in_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "Sync") as pool:
            idle, alone = await opened(pool), await opened(pool)
            with pytest.raises(SessionLost, match="SIGKILL") as caught:
                await alone.step(turn("crash"))
            assert caught.value.suspects == 1
            with pytest.raises(SessionLost) as caught:
                await idle.step(turn("ok"))
            assert caught.value.suspects == 0
            several = [await opened(pool) for _ in range(3)]
            results = await asyncio.gather(
                several[0].step(turn("hang")),
                several[1].step(turn("hang")),
                several[2].step(turn("crash")),
                return_exceptions=True,
            )
            assert [getattr(one, "suspects", None) for one in results] == [3, 3, 3]

    play(scenario())


def test_too_many_processes_end_their_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "Sync", rewards={"max_processes": 20}) as pool:
            with pytest.raises(SessionLost, match="max_processes is 20") as caught:
                await (await opened(pool)).step(turn("bomb"))
            assert (caught.value.too_many, caught.value.suspects) == (True, 1)

    play(scenario())


def test_async_environments_share_a_loop_and_are_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "Async", step_timeout_seconds=0.3) as pool:
            one, other = await opened(pool), await opened(pool)
            assert one.traits.replay == "recorded"
            waiting = asyncio.create_task(failure_of(one.step(turn("wait"))))
            step = await other.step(turn("x"))
            assert (step.observation, step.reward) == ("later x", 1.0)
            assert (await waiting).reason == "timeout"
            assert (await other.step(turn("end"))).done  # the process is the same
            error = await failure_of((await opened(pool)).step(turn("block")))
            assert error.reason == "timeout"  # its loop was blocked, so the process is replaced
            assert other.lost

    play(scenario())


def test_snapshots_go_back_to_before_a_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "Saved") as pool:
            session = await opened(pool)
            assert session.traits == Traits(None, restores=True)
            for word in "abc":
                last = await session.step(turn(word))
            assert last.observation == "a b c"
            await session.restore(1)
            assert (await session.step(turn("z"))).observation == "a z"
            await session.restore(0)
            assert (await session.step(turn("y"))).observation == "y"

    play(scenario())


def test_samples_wait_for_a_place_and_due_ones_come_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "Sync", sessions=1) as pool:
            first = await opened(pool)
            order: list[str] = []

            async def wait(name: str, priority: int) -> None:
                session = await pool.open({"prompt": name}, 1, priority=lambda: priority)
                order.append(name)
                session.close()

            tasks = [
                asyncio.create_task(wait(name, priority))
                for name, priority in (("later", 2), ("ahead", 1), ("due", 0))
            ]
            given_up = asyncio.create_task(wait("given up", 0))
            await asyncio.sleep(0)
            assert pool.queued == 4
            given_up.cancel()
            first.park()
            await asyncio.gather(*tasks)
            assert order == ["due", "ahead", "later"]
            assert pool.queued == 0
            assert (await first.step(turn("ok"))).reward == 0.5
            first.close()
            await opened(pool)

    play(scenario())


def test_what_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        for name, args, said in [
            ("None", {}, "has no 'None'"),
            ("Sync", {"what": 1}, "cannot be called"),
        ]:
            with pytest.raises(RewardError, match=said):
                async with running(tmp_path, name, args=args):
                    pass
        (tmp_path / "broken.py").write_text("raise RuntimeError('at import')\n")
        config = EnvironmentConfig(name=f"{tmp_path / 'broken.py'}:X")
        with pytest.raises(RewardError, match="at import"):
            await EnvironmentPool(config, RewardConfig()).start()

    play(scenario())


def test_what_a_worker_says_of_tools_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's code can write to its process's files; the chat template would fail here."""

    class Quiet:
        def reset(self, row: dict[str, Any], seed: int) -> str:
            return "1"

        def step(self, action: Action) -> None: ...

    async def scenario() -> None:
        pool = LocalPool(Quiet, {})
        honest = pool.local.call

        async def lying(call: Any, seconds: float, *, alone: bool) -> Any:
            opened = await honest(call, seconds, alone=alone)
            traits = replace(opened.traits, tools=[{"function": None}])
            return msgspec.structs.replace(opened, traits=traits)

        monkeypatch.setattr(pool.local, "call", lying)
        error = await failure_of(opened(pool))
        assert error.reason == "wrong_type"
        assert "each of `tools` must be" in str(error)

    play(scenario())
