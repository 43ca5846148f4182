"""The engine is told when no turn of a response follows, so that it frees what it keeps for one."""

from __future__ import annotations

from typing import Any

import pytest
from counting_environments import Counting, Plain, first_turn, run, until
from generator_harness import SAMPLE, GeneratorHarness, verify
from local_environments import LocalPool

from asyncrl.wire.messages import to_generator as tg

SESSION = f"train-{SAMPLE}"


class Failing(Counting):
    async def step(self, action: Any) -> Any:
        if self.turn == 1:
            raise ValueError("no")
        return await super().step(action)


def test_between_turns_it_is_kept_and_at_the_end_it_is_freed() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        del harness.engine.ended_sessions[:]  # of the sample's beginning
        harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        await until(lambda: len(harness.engine.requests) == 3)
        assert not harness.engine.ended_sessions
        harness.engine.feed("train-5.1+2", [9], 1, end="stop")
        await until(harness.finished)
        assert harness.engine.ended_sessions == [SESSION]

    run(Counting, scenario)


@pytest.mark.parametrize("on_error", ["zero", "stop"])
def test_it_is_freed_when_the_environment_fails(on_error: str) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        del harness.engine.ended_sessions[:]
        harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        await until(lambda: harness.engine.ended_sessions)
        assert harness.engine.ended_sessions == [SESSION]

    run(Failing, scenario, rewards={"on_error": on_error})


def test_it_is_freed_when_the_sample_is_dropped() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        del harness.engine.ended_sessions[:]
        await harness.send(tg.Discard((SAMPLE,)))
        await until(lambda: harness.engine.ended_sessions)
        # After the engine was told to forget the request, which would keep its KV for later turns.
        assert harness.engine.abandoned == ["train-5.1+1"]
        assert harness.engine.ended_sessions == [SESSION]

    run(Counting, scenario)


@pytest.mark.parametrize("lost", [True, False])
def test_it_is_freed_when_the_sample_starts_over(lost: bool) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        del harness.engine.ended_sessions[:]
        if lost:
            pool.local.lose()
            harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        else:
            await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        assert harness.generator.environment.started_over == 1
        assert harness.engine.ended_sessions == [SESSION]

    run(Plain, scenario)


def test_a_sample_without_an_environment_has_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        monkeypatch.setattr(harness.generator, "episodes", None)
        await harness.send(tg.Generate(SAMPLE, tg.PromptPayload("p", b"\1\0\0\0", {}), 7))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await until(harness.finished)
        assert harness.engine.requests[0].session == ""
        assert not harness.engine.ended_sessions

    run(Counting, scenario)
