from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from asyncrl.errors import RunFailed, WaitTimeout
from asyncrl.fleet import condition_wait
from asyncrl.fleet.condition_wait import ConditionWait


def test_a_condition_is_evaluated_after_every_notification() -> None:
    async def wait() -> int:
        waiter, evaluated, done = ConditionWait(), [], [False]

        def condition() -> bool:
            evaluated.append(done[0])
            return done[0]

        task = asyncio.create_task(waiter.until(condition, seconds=60, what=lambda: "the test"))
        await asyncio.sleep(0)
        waiter.notify()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done[0] = True
        waiter.notify()
        await task
        return len(evaluated)

    assert asyncio.run(wait()) == 3


def test_a_wait_that_is_too_long_says_what_it_waited_for() -> None:
    async def wait() -> None:
        await ConditionWait().until(lambda: False, seconds=0.01, what=lambda: "Godot")

    with pytest.raises(WaitTimeout, match="waited 0 s for Godot"):
        asyncio.run(wait())


def test_progress_starts_the_time_limit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, on which each wait for a change takes 15 s."""
    clock = itertools.count(step=15)
    monkeypatch.setattr(condition_wait, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(condition_wait, "_PIECE_SECONDS", 60.0)

    async def wait() -> int:
        waiter, finished = ConditionWait(), [0]

        async def work() -> None:
            while finished[0] < 6:
                await asyncio.sleep(0.001)
                finished[0] += 1
                waiter.notify()

        working = asyncio.create_task(work())
        await waiter.until(
            lambda: finished[0] == 6,
            seconds=40,
            what=lambda: "six samples",
            progress=lambda: finished[0],
        )
        await working
        return finished[0]

    assert asyncio.run(wait()) == 6


def test_the_first_error_ends_every_later_wait() -> None:
    async def wait() -> None:
        waiter = ConditionWait()
        waiter.fail(RunFailed("first"))
        waiter.fail(RunFailed("second"))
        for _ in range(2):
            with pytest.raises(RunFailed, match="first"):
                await waiter.until(lambda: False, seconds=60, what=lambda: "nothing")
        await waiter.until(lambda: True, seconds=60, what=lambda: "what holds already")

    asyncio.run(wait())


def test_time_in_which_the_controller_was_suspended_is_no_waiting_time() -> None:
    async def wait() -> None:
        waiter, done = ConditionWait(), [False]

        def finish() -> None:
            done[0] = True
            waiter.notify()

        def suspend() -> None:
            time.sleep(2.5)  # nothing of the loop runs, as after SIGSTOP
            asyncio.get_running_loop().call_later(0.05, finish)

        asyncio.get_running_loop().call_later(0.05, suspend)
        await waiter.until(lambda: done[0], seconds=2.0, what=lambda: "a process")

    asyncio.run(wait())
